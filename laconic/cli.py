"""Lists methods, trains with one of them, and compares them with baselines on emulated networks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import socket
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from laconic.rules import check_count, check_number, check_seed
from laconic.tracking.top import Top

if TYPE_CHECKING:
    from laconic.bench.run import Plan
    from laconic.tasks import Task


def main() -> None:
    """Runs the command line. Exit code 2 means wrong arguments, exit code 1 a run that failed."""
    # torch warns from C++ that emulated hosts have no host names. Nothing depends on them.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    command, unknown = tyro.cli(_commands(), prog="laconic", description=__doc__, return_unknown_args=True)
    try:
        code = command.run(_parse_settings(unknown))
    except (ValueError, FileExistsError, FileNotFoundError) as error:
        code = _fail(str(error), 2)
    except (OSError, RuntimeError) as error:
        code = _fail(str(error), 1)
    except KeyboardInterrupt:
        code = _fail("interrupted", 130)
    sys.exit(code)


def _commands() -> Any:
    kinds = {
        "methods": Methods,
        "train": Train,
        "compare": Compare,
        "report": Report,
        "demo": Demo,
        "data": Data,
        "store": Store,
        "top": Top,
    }
    named = [Annotated[kind, tyro.conf.subcommand(name)] for name, kind in kinds.items()]
    return typing.Union[tuple(named)]  # noqa: UP007  the members come from a table


@dataclass
class Methods:
    """List all methods and baselines, with their settings and papers."""

    def run(self, settings: dict[str, str]) -> int:
        from laconic.bench.baselines import BASELINES
        from laconic.methods import METHODS

        _reject_settings(settings, self)
        table = Table(title="methods of laconic, then baselines", show_lines=True)
        for header in ("name", "settings", "description", "paper"):
            table.add_column(header)
        kinds: dict[str, type] = {**METHODS, **BASELINES}
        for name, kind in kinds.items():
            fields = [f for f in dataclasses.fields(kind) if f.init]
            defaults = "\n".join(f"{f.name}={_default(f)}" for f in fields)
            summary = (kind.__doc__ or "").split("\n\n")[0].replace("\n    ", " ").strip()
            table.add_row(name, defaults, summary, getattr(kind, "paper", "") or "–")
        _console().print(table)
        return 0


@dataclass
class CommonOptions:
    """Options of `train` and `compare`. All other options are settings of the task: --lr, --partition, …"""

    task: str = "digits"
    """the task to train: digits, quadratic, fashion, cifar10, shakespeare or translate"""
    workers: int = 4
    """the number of worker processes; with an emulated network, each runs on its own host"""
    link: str = "none"
    """the emulated link of each host, such as 100mbit, or one link per host, separated by commas; none is loopback"""
    rho: float | None = None
    """instead of --link: the ratio of all-reduce time to compute time in one step; compute time is measured first"""
    steps: int | None = None
    """training steps; by default those of the task"""
    seed: int = 0
    """the seed of the model and of the data order"""
    evaluations: int = 20
    """the number of evaluations; their time does not count as training time"""

    def plan(self, settings: dict[str, str]) -> Plan:
        """Returns the plan of the runs.

        Args:
            settings: The settings of the task, as text.

        Raises:
            ValueError: An option or a setting is not valid.
        """
        from laconic.bench.compare import rate_for
        from laconic.bench.run import Plan
        from laconic.bench.strategies import MAX_WORKERS

        if not 1 <= self.workers <= MAX_WORKERS:
            raise ValueError(f"workers must be from 1 to {MAX_WORKERS}, not {self.workers}")
        check_seed(self.seed)
        if self.rho is not None and self.link != "none":
            raise ValueError(f"give either --link or --rho, not both ({self.link} and {self.rho:g})")
        if self.link != "none":
            from laconic.emulate import parse_links

            parse_links(self.link, self.workers)
        task = _build_task(self.task, settings, self)
        task.load(0, self.workers, self.seed)  # reports a missing dataset now, in one line, instead of in every worker
        command = shlex.join(["laconic", *sys.argv[1:]])
        plan = Plan(
            task,
            self.workers,
            task.steps if self.steps is None else self.steps,
            seed=self.seed,
            link=self.link,
            rho=self.rho,
            evaluations=self.evaluations,
            command=command,
        )
        if self.rho is not None:
            plan = dataclasses.replace(plan, link=rate_for(self.rho, plan))
        return plan


@dataclass
class Train(CommonOptions):
    """Train one task with one method. The method's settings are options too: laconic train local_sgd --period 4."""

    method: Positional[str] = "allreduce"
    """a method or baseline; `laconic methods` lists them"""
    out: Path | None = None
    """the folder for runs.jsonl and the checkpoint"""
    overwrite: bool = False
    """delete the results of an earlier run in --out"""
    save_every: int | None = None
    """steps between two checkpoints; with --out, one is always saved at the end"""
    resume: Path | None = None
    """the --out folder of an earlier run: continue from its checkpoint, up to --steps"""

    def run(self, settings: dict[str, str]) -> int:
        from laconic.bench.compare import prepare_folder
        from laconic.bench.progress import Display
        from laconic.bench.record import RunsFile
        from laconic.bench.run import run
        from laconic.bench.strategies import parse_contender, setting_types
        from laconic.bench.table import table

        if self.save_every is not None:
            check_count("save_every", self.save_every)
        of_method = setting_types(self.method)
        contender = parse_contender(self.method, {key: value for key, value in settings.items() if key in of_method})
        if self.resume is not None and self.out is not None:
            raise ValueError("give either --out or --resume, not both: a resumed run writes to the --resume folder")
        if contender.strategy.is_baseline and self.resume is not None:
            raise ValueError(f"{contender.method} has no checkpoints: only laconic's methods can be resumed")
        plan = self.plan({key: value for key, value in settings.items() if key not in of_method})
        out = self.resume or self.out
        if self.resume is not None and not (self.resume / "checkpoint").is_dir():
            raise FileNotFoundError(f"{self.resume} has no checkpoint to resume from")
        if self.out is not None:
            prepare_folder(self.out, self.overwrite)
        if out is not None and not contender.strategy.is_baseline:
            plan = dataclasses.replace(
                plan, checkpoint=out / "checkpoint", save_every=self.save_every, resume=self.resume is not None
            )
        console = _console()
        with Display(console)(contender, plan) as progress:
            record = run(contender, plan, progress)
        if out is not None:
            RunsFile(out).append(record)
        if record.status != "ok":
            return _fail(record.reason, 1)
        console.print(table([record], None))
        if out is not None:
            console.print(f"written: {out}", highlight=False, soft_wrap=True)
        return 0


@dataclass
class Compare(CommonOptions):
    """Train one task with several methods and baselines, on the same data, seeds and network, and write a report."""

    methods: str = ""
    """methods and baselines, separated by commas, with optional settings: ddp,local_sgd+period=4; by default all"""
    seeds: int = 1
    """the number of seeds, counted up from --seed"""
    target_accuracy: float | None = None
    """a value of the task's metric; tables and report show the time to reach it"""
    out: Path = Path("runs/compare")
    """the folder for runs.jsonl and index.html"""
    overwrite: bool = False
    """delete the results of an earlier comparison in --out"""

    def run(self, settings: dict[str, str]) -> int:
        from laconic.bench.compare import compare, prepare_folder
        from laconic.bench.progress import Display
        from laconic.bench.report import write_report
        from laconic.bench.strategies import parse_contender, strategy_names
        from laconic.bench.table import table

        check_count("seeds", self.seeds)
        if self.target_accuracy is not None:
            check_number("target_accuracy", self.target_accuracy)
        chosen = [name.strip() for name in self.methods.split(",")] if self.methods else strategy_names()
        contenders = [parse_contender(name) for name in chosen]
        # `none` comes first: its step time is the compute time, from which the waiting time of baselines follows.
        contenders.sort(key=lambda contender: contender.method != "none")
        plan = dataclasses.replace(self.plan(settings), target=self.target_accuracy)
        prepare_folder(self.out, self.overwrite)
        console = _console()
        records = compare(contenders, plan, self.seeds, self.out, Display(console))
        console.print(table(records, self.target_accuracy))
        write_report(records, self.out / "index.html", self.target_accuracy)
        console.print(f"report: {self.out / 'index.html'}", highlight=False, soft_wrap=True)
        failed = [record for record in records if record.status != "ok"]
        for record in failed:
            _fail(f"{record.name} (seed {record.seed}): {record.reason}", 1)
        return 1 if failed else 0


@dataclass
class Report:
    """Draw the report of earlier runs again, or one report of the runs in several folders."""

    directories: Positional[tuple[Path, ...]]
    """output folders of compare, train or report; their runs are joined"""
    out: Path | None = None
    """the folder for runs.jsonl and index.html: by default the only folder; one of them to add to it, or a new one"""
    target: float | None = None
    """a value of the task's metric; by default that of the runs"""
    overwrite: bool = False
    """replace the runs of an earlier report in --out"""

    def run(self, settings: dict[str, str]) -> int:
        from laconic.bench.join import common_target, join_runs, write_runs
        from laconic.bench.record import RunsFile
        from laconic.bench.report import check_same_task, write_report
        from laconic.bench.table import table

        _reject_settings(settings, self)
        if not self.directories:
            raise ValueError("name at least one folder with runs: laconic report runs/compare")
        if self.out is None and len(self.directories) > 1:
            raise ValueError("several folders need --out: one of them to add the runs of the others, or a new folder")
        out = self.out or self.directories[0]
        records = join_runs(self.directories)
        check_same_task(records)
        target = common_target(records) if self.target is None else self.target
        if out.resolve() in [directory.resolve() for directory in self.directories]:
            present = join_runs([out])
            for record in records:
                if record not in present:
                    RunsFile(out).append(record)
        else:
            write_runs(records, out, self.overwrite)
        write_report(records, out / "index.html", target)
        console = _console()
        console.print(table(records, target))
        console.print(f"report: {out / 'index.html'}", highlight=False, soft_wrap=True)
        return 0


@dataclass
class Demo:
    """Run an example comparison: digits with a model of 1.1 M parameters, 4 emulated hosts, links of 100 Mbit/s."""

    out: Path = Path("runs/demo")
    """the folder for runs.jsonl and index.html"""
    overwrite: bool = False
    """delete the results of an earlier demo in --out"""

    def run(self, settings: dict[str, str]) -> int:
        from laconic.bench.strategies import strategy_names
        from laconic.emulate import EmulationError, Network, parse_links

        _reject_settings(settings, self)
        skipped = {"post_local_sgd", "ddp_fp16"}
        link = "100mbit"
        try:
            with Network(parse_links(link, 4)):
                pass
        except EmulationError as error:
            _fail(f"{error}; the demo continues on loopback, where communication costs next to nothing", 0)
            link = "none"
        chosen = ",".join(name for name in strategy_names() if name not in skipped)
        comparison = Compare(methods=chosen, link=link, steps=45, evaluations=9, target_accuracy=0.9, out=self.out)
        comparison.overwrite = self.overwrite
        return comparison.run({"model": "wide"})


@dataclass
class Data:
    """Download a dataset and verify it."""

    name: Positional[str]
    """cifar10, fashion, shakespeare or translate"""

    def run(self, settings: dict[str, str]) -> int:
        from laconic.tasks import fetch

        _reject_settings(settings, self)
        for path in fetch(self.name):
            print(path)
        return 0


@dataclass
class Store:
    """Hold the store of a job, outside of its workers, so that the job survives the loss of any of them."""

    port: int = 29500
    """the port at which workers reach the store"""
    address: str = ""
    """the address of this machine to listen at; by default all its addresses"""

    def run(self, settings: dict[str, str]) -> int:
        from laconic.launch import open_store

        _reject_settings(settings, self)
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port must be from 0 (any free port) to 65535, not {self.port}")
        store = open_store(self.address, self.port)
        where = self.address or socket.gethostname()
        print(f"laconic: holding a store at {where}:{store.port}, until interrupted. Set for each worker:", flush=True)
        print(f"MASTER_ADDR={where} MASTER_PORT={store.port} TORCHELASTIC_USE_AGENT_STORE=True", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
        return 0


def _console() -> Console:
    """Returns a console as wide as the terminal, or 160 columns wide if the output is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def _build_task(name: str, settings: dict[str, str], command: object) -> Task:
    from laconic.bench.strategies import parse_value
    from laconic.names import look_up
    from laconic.tasks import find_task

    kind = find_task(name)
    known = {f.name for f in dataclasses.fields(kind) if f.init}
    options = {f.name: None for f in dataclasses.fields(command) if f.name not in known}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in settings.items():
        look_up(f"option of this command or setting of {name}", key, dict.fromkeys(sorted(known)) | options)
        values[key] = parse_value(f"{name}.{key}", value, hints[key])
    return kind(**values)


def _parse_settings(unknown: list[str]) -> dict[str, str]:
    """Parses `--key value` and `--key=value` options that are not options of the command itself."""
    pairs: dict[str, str] = {}
    rest = iter(unknown)
    for word in rest:
        if not word.startswith("--"):
            sys.exit(f"laconic: unexpected argument {word!r}: options are written --name value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            value = next(rest, "--")
        if value.startswith("--"):
            sys.exit(f"laconic: --{key} needs a value")
        pairs[key.replace("-", "_")] = value
    return pairs


def _reject_settings(settings: dict[str, str], command: object) -> None:
    if settings:
        raise ValueError(f"laconic {type(command).__name__.lower()} has no option --{next(iter(settings))}")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return repr(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "…"


def _fail(text: str, code: int) -> int:
    """Prints an error message and returns `code`."""
    print(f"laconic: {text}", file=sys.stderr)
    return code
