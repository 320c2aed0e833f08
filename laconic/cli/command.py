"""What all subcommands have in common: their interface, messages, and the options of those that train."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import GenericAlias
from typing import TYPE_CHECKING, Any

from rich.console import Console

from laconic.bench.units import is_share
from laconic.cli.options import Group, known_words, options_of, parse, summary_of
from laconic.names import look_up, suggestion
from laconic.rules import check_number, check_seed

if TYPE_CHECKING:
    from laconic.bench.run import Plan
    from laconic.tasks import Task


@dataclass
class Command:
    """A subcommand. Its fields are its options; the docstring's first paragraph and `Args` are its help text."""

    @classmethod
    def read(cls, name: str, words: Sequence[str]) -> Command:
        """Returns the command with the options that the user typed.

        Args:
            name: The subcommand's name.
            words: The words after it.
        """
        (values,) = parse(f"laconic {name}", summary_of(cls), [options_group(cls)], words)
        return cls(**values)

    def run(self) -> int:
        """Does the work, and returns the exit code."""
        raise NotImplementedError

    def after_interrupt(self) -> str:
        """Returns what the user can do after Ctrl-C, such as the command that resumes."""
        return ""


def options_group(kind: type) -> Group:
    """Returns the options of a command itself."""
    group = Group("options", "", options_of(kind))
    missing = [option.name for option in group.options if not option.help]
    assert not missing, f"{kind.__name__} documents no {missing}"
    return group


@dataclass
class TrainingCommand(Command):
    """Options of `train` and `compare`. Settings of the task are options too: --lr, --partition, …

    Args:
        task: the task to train: digits, quadratic, fashion, cifar10, shakespeare, translate, or your own as
            my_module:MyTask
        workers: the number of worker processes; with an emulated network, each runs on its own host
        link: the emulated link of each host, RATE[+DELAY][~JITTER][%LOSS], such as 100mbit or 100mbit+25ms, or one
            link per host, separated by commas; none is loopback
        rho: in place of --link: the ratio of all-reduce time to compute time in one step, from which the link follows;
            compute time is measured first; by default --link counts
        steps: training steps; by default those of the task
        seed: the seed of the model and of the data order
        evaluations: the number of evaluations
    """

    task: str = "digits"
    workers: int = 4
    link: str = "none"
    rho: float | None = None
    steps: int | None = None
    seed: int = 0
    evaluations: int = 20
    task_settings: dict[str, Any] = dataclasses.field(default_factory=dict, init=False)

    @classmethod
    def read(cls, name: str, words: Sequence[str]) -> TrainingCommand:
        own = options_group(cls)
        task = str(known_words([own], words).get("task", cls.task))
        of_task = task_group(task).without({option.name for option in own.options})
        values, settings = parse(f"laconic {name}", summary_of(cls), [own, of_task], words)
        command = cls(**values)
        command.task_settings = settings
        return command

    @property
    def is_simulated(self) -> bool:
        """Whether workers are simulated in one process."""
        return False

    def plan(self, target: str | None = None) -> Plan:
        """Returns the plan of the runs.

        Args:
            target: The target as the user typed it, or None.

        Raises:
            ValueError: An option or a setting is not valid.
        """
        import laconic.emulate
        import laconic.link
        from laconic.bench.run import Plan
        from laconic.bench.strategies import MAX_SIMULATED_WORKERS, MAX_WORKERS

        most = MAX_SIMULATED_WORKERS if self.is_simulated else MAX_WORKERS
        if not 1 <= self.workers <= most:
            few = "" if self.is_simulated else f" (up to {MAX_SIMULATED_WORKERS} with compare --simulate)"
            raise ValueError(f"workers must be from 1 to {most}{few}, not {self.workers}")
        check_seed(self.seed)
        if self.rho is not None and self.link != "none":
            raise ValueError(f"give either --link or --rho, not both ({self.link} and {self.rho:g})")
        if self.link != "none":
            parse = laconic.link.parse_links if self.is_simulated else laconic.emulate.parse_links
            parse(self.link, self.workers)
        task = find_task_class(self.task)(**self.task_settings)
        goal = None if target is None else parse_target(target, task.metric)
        task.load(0, self.workers, self.seed)  # reports a missing dataset now, in one line, instead of in every worker
        return Plan(
            task,
            self.workers,
            task.steps if self.steps is None else self.steps,
            seed=self.seed,
            link=self.link,
            rho=self.rho,
            evaluations=self.evaluations,
            command=typed_command(),
            target=goal,
        )

    def with_rate(self, plan: Plan) -> Plan:
        """Returns the plan with the link that `--rho` asks for; measures the compute time."""
        from laconic.bench.compare import rate_for

        return plan if self.rho is None else dataclasses.replace(plan, link=rate_for(self.rho, plan))


def task_group(name: str) -> Group:
    """Returns the settings of a task as options."""
    kind = find_task_class(name)
    return Group(f"settings of the task {name}", f"{name}.", options_of(kind))


def find_task_class(name: str) -> type[Task]:
    """Returns the class of a task: one of laconic's by its name, or one's own as `module:Class`.

    Raises:
        ValueError: There is no such task, module or class, or the class is no task.
    """
    from laconic.tasks import Task, find_task

    module, colon, attribute = name.partition(":")
    if not colon:
        return find_task(name)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; workers get the same path
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"--task {name}: the module {module} cannot be imported from {os.getcwd()}: {error}") from None
    classes = {
        key: value
        for key, value in vars(found).items()
        if not isinstance(value, GenericAlias) and isinstance(value, type)  # tuple[int] is a type on Python 3.10
    }
    tasks = {key: value for key, value in classes.items() if issubclass(value, Task) and value is not Task}
    if attribute in classes and attribute not in tasks:
        raise ValueError(f"--task {name}: {attribute} is not a subclass of laconic.tasks.Task; see docs/own_task.md")
    return look_up(f"task in {module}", attribute, tasks)


def parse_target(text: str, metric: str) -> float:
    """Returns the value of the task's metric that the user typed as a target.

    Args:
        text: `accuracy=85`, `accuracy=85%`, `accuracy=0.85`, `loss=1.9`, or the number alone. A share above 1 is in
            per cent.
        metric: The name of the task's metric.

    Raises:
        ValueError: The text names another metric, or has no finite number.

    Example:
        >>> parse_target("accuracy=85", "accuracy"), parse_target("0.85", "accuracy"), parse_target("1.9", "loss")
        (0.85, 0.85, 1.9)
    """
    name, _, number = text.partition("=") if "=" in text else (metric, "=", text)
    if name.strip() != metric:
        near = suggestion(name.strip(), [metric])
        raise ValueError(f"--target {text}: the metric of this task is {metric}{near or ','} write --target {metric}=…")
    try:
        value = float(number.strip().removesuffix("%"))
    except ValueError:
        raise ValueError(f"--target must be METRIC=NUMBER, such as {metric}=0.9, not {text!r}") from None
    check_number("--target", value)
    if not is_share(metric):
        if "%" in number:
            raise ValueError(f"--target {text}: {metric} is not measured in per cent")
        return value
    share = value / 100 if value > 1 or "%" in number else value
    if not 0 < share <= 1:
        raise ValueError(f"--target {text}: a target of {metric} must be above 0 and at most 100 %")
    return share


def typed_command() -> str:
    """Returns the command line as the user typed it."""
    return shlex.join(["laconic", *sys.argv[1:]])


def make_console() -> Console:
    """Returns a console as wide as the terminal, or 160 columns wide if the output is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def fail(text: str, code: int) -> int:
    """Prints an error message and returns `code`."""
    print(f"laconic: {text}", file=sys.stderr)
    return code
