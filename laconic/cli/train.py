"""`laconic train`: trains one task with one method."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from laconic.cli.command import (
    TrainingCommand,
    fail,
    make_console,
    options_group,
    task_group,
    typed_command,
)
from laconic.cli.options import POSITIONAL, Group, known_words, options_of, parse, summary_of, value_text
from laconic.rules import check_count


@dataclass
class Train(TrainingCommand):
    """Train one task with one method. The settings of the method and of the task are options too.

    Args:
        method: a method or baseline; `laconic methods` lists them
        out: the folder for runs.jsonl and the checkpoint; by default nothing is written
        overwrite: delete the results of an earlier run in --out
        save_every: steps between two checkpoints; with --out, one is always saved at the end, by default no other
        resume: the --out folder of an earlier run: continue from its checkpoint, up to --steps; by default start anew
    """

    method: Annotated[str, POSITIONAL] = "allreduce"
    out: Path | None = None
    overwrite: bool = False
    save_every: int | None = None
    resume: Path | None = None
    method_settings: dict[str, str] = dataclasses.field(default_factory=dict, init=False)

    @classmethod
    def read(cls, name: str, words: Sequence[str]) -> Train:
        from laconic.bench.strategies import find_strategy, strategy_names

        own = options_group(cls)
        names = {option.name for option in own.options}
        given = known_words([own], words)
        typed, task = given.get("method"), str(given.get("task", cls.task))
        method = (typed or cls.method).partition("+")[0]
        if words and words[0].startswith("-") and method not in strategy_names():
            raise ValueError(f"{method!r} is no method: it comes first, as in laconic {name} local_sgd --period 4")
        # A setting that method and task both have belongs to the method.
        settings = Group(f"settings of the method {method}", f"{method}.", options_of(find_strategy(method)))
        of_method = settings.without(names)
        hidden = [option.name for option in settings.options if option.name in names]
        of_task = task_group(task).without(names | {option.name for option in of_method.options})
        prog, description, rest = f"laconic {name}", summary_of(cls), list(words)
        if typed is None:
            description += f"\nMethods and baselines: {', '.join(strategy_names())}."
        else:
            prog, description = f"{prog} {method}", f"{method}: {summary_of(find_strategy(method))}"
            description += "".join(f"\nIts setting {key} is written {method}+{key}=VALUE." for key in hidden)
            own = own.without({"method"})
            rest.remove(typed)
        values, method_settings, task_settings = parse(prog, description, [own, of_method, of_task], rest)
        command = cls(**values, **({} if typed is None else {"method": typed}))
        command.method_settings = {key: value_text(value) for key, value in method_settings.items()}
        command.task_settings = task_settings
        return command

    def run(self) -> int:
        from laconic.bench.compare import prepare_folder
        from laconic.bench.progress import Display
        from laconic.bench.record import RunsFile
        from laconic.bench.run import run
        from laconic.bench.strategies import parse_contender
        from laconic.bench.table import table

        if self.save_every is not None:
            check_count("save_every", self.save_every)
        contender = parse_contender(self.method, self.method_settings)
        if self.resume is not None and self.out is not None:
            raise ValueError("give either --out or --resume, not both: a resumed run writes to the --resume folder")
        if contender.strategy.is_baseline and self.resume is not None:
            raise ValueError(f"{contender.method} has no checkpoints: only laconic's methods can be resumed")
        plan = self.plan()
        out = self.resume or self.out
        if self.resume is not None and not (self.resume / "checkpoint").is_dir():
            raise FileNotFoundError(f"{self.resume} has no checkpoint to resume from")
        plan = self.with_rate(plan)
        if self.out is not None:
            prepare_folder(self.out, self.overwrite)
        if out is not None and not contender.strategy.is_baseline:
            plan = dataclasses.replace(
                plan, checkpoint=out / "checkpoint", save_every=self.save_every, resume=self.resume is not None
            )
        console = make_console()
        with Display(console)(contender, plan) as progress:
            record = run(contender, plan, progress)
        if out is not None:
            RunsFile(out).append(record)
        if record.status != "ok":
            return fail(record.reason, 1)
        console.print(table([record], None))
        if out is not None:
            console.print(f"written: {out}", highlight=False, soft_wrap=True)
        return 0

    def after_interrupt(self) -> str:
        folder = self.resume or self.out
        if folder is None:
            return "nothing was saved: --out FOLDER --save-every STEPS saves checkpoints"
        if not any((folder / "checkpoint").glob("*/manifest.json")):
            return f"{folder} has no checkpoint yet: --save-every STEPS saves them"
        command = typed_command()
        if self.resume is None:
            command = command.replace("--out", "--resume").replace(" --overwrite", "")
        return f"resume with: {command}"
