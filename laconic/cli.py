"""The command line of laconic: see what there is, train, and compare ways to train on emulated networks."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

if TYPE_CHECKING:
    from laconic.bench.run import Plan
    from laconic.tasks import Task


def main() -> None:
    """Mistakes in the call end with one line and exit code 2, runs that fail with exit code 1."""
    # torch complains from C++ that emulated hosts have no names; nothing depends on them.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    command, unknown = tyro.cli(_commands(), prog="laconic", description=__doc__, return_unknown_args=True)
    try:
        code = command.run(_pairs(unknown))
    except (ValueError, FileExistsError, FileNotFoundError) as error:
        code = _fail(str(error), 2)
    except (OSError, RuntimeError) as error:
        code = _fail(str(error), 1)
    except KeyboardInterrupt:
        code = _fail("interrupted", 130)
    sys.exit(code)


def _commands() -> Any:
    kinds = {"methods": Methods, "train": Train, "compare": Compare, "demo": Demo, "data": Data}
    named = [Annotated[kind, tyro.conf.subcommand(name)] for name, kind in kinds.items()]
    return typing.Union[tuple(named)]  # noqa: UP007  a union of what is in a table


@dataclass
class Methods:
    """Show what there is: methods and peers, with their settings and papers."""

    def run(self, settings: dict[str, str]) -> int:
        from laconic.bench.peers import PEERS
        from laconic.methods import METHODS

        _refuse(settings, self)
        table = Table(title="methods of laconic, then what PyTorch itself offers", show_lines=True)
        for header in ("name", "settings", "what it does", "paper"):
            table.add_column(header)
        kinds: dict[str, type] = {**METHODS, **PEERS}
        for name, kind in kinds.items():
            fields = [f for f in dataclasses.fields(kind) if f.init]
            defaults = "\n".join(f"{f.name}={_default(f)}" for f in fields)
            what = (kind.__doc__ or "").split("\n\n")[0].replace("\n    ", " ").strip()
            table.add_row(name, defaults, what, getattr(kind, "paper", "") or "–")
        _console().print(table)
        return 0


@dataclass
class Shared:
    """What `train` and `compare` have in common. Other options are the settings of the task: --lr, --partition, …."""

    task: str = "digits"
    """what to train: digits, quadratic, fashion, cifar10, shakespeare, translate"""
    workers: int = 4
    """processes, each on a host of its own where links are emulated"""
    link: str = "none"
    """each host's link: a rate such as 100mbit, or one for each host, with commas; none is loopback"""
    rho: float | None = None
    """instead of a rate: a full all-reduce takes this many times the computing of a step, which is measured first"""
    steps: int | None = None
    """by default the task's own"""
    seed: int = 0
    evaluations: int = 20
    """how often the agreed model is judged, off the clock"""

    def plan(self, settings: dict[str, str]) -> Plan:
        """`settings` are the task's; what it does not know is refused."""
        from laconic.bench.compare import rate_for
        from laconic.bench.run import Plan
        from laconic.bench.ways import MOST_WORKERS

        if not 1 <= self.workers <= MOST_WORKERS:
            raise ValueError(f"workers must be from 1 to {MOST_WORKERS}, not {self.workers}")
        if self.rho is not None and self.link != "none":
            raise ValueError(f"give either --link or --rho, not both ({self.link} and {self.rho:g})")
        if self.link != "none":
            from laconic.emulate import parse_links

            parse_links(self.link, self.workers)
        task = _task(self.task, settings, self)
        task.load(0, self.workers, self.seed)  # a dataset that is missing is said now, in one line
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
class Train(Shared):
    """Train one task by one method. Settings of the method are options too: laconic train local_sgd --period 4."""

    method: Positional[str] = "allreduce"
    out: Path | None = None
    """where runs.jsonl and the checkpoint go"""
    overwrite: bool = False
    save_every: int | None = None
    """steps between two checkpoints; there is always one at the end, where --out is given"""
    resume: Path | None = None
    """an --out folder of before: go on from its checkpoint, up to --steps"""

    def run(self, settings: dict[str, str]) -> int:
        from laconic.bench.compare import prepare
        from laconic.bench.progress import Display
        from laconic.bench.record import RunsFile
        from laconic.bench.run import run
        from laconic.bench.table import table
        from laconic.bench.ways import ask, settings_of

        own = settings_of(self.method)
        asked = ask(self.method, {key: value for key, value in settings.items() if key in own})
        if self.resume is not None and self.out is not None:
            raise ValueError("give either --out or --resume, not both: a resumed run goes on in its folder")
        if asked.way.is_peer and self.resume is not None:
            raise ValueError(f"{asked.name} has no checkpoints: only laconic's methods can be resumed")
        plan = self.plan({key: value for key, value in settings.items() if key not in own})
        out = self.resume or self.out
        if self.resume is not None and not (self.resume / "checkpoint").is_dir():
            raise FileNotFoundError(f"{self.resume} has no checkpoint to resume from")
        if self.out is not None:
            prepare(self.out, self.overwrite)
        if out is not None and not asked.way.is_peer:
            plan = dataclasses.replace(
                plan, checkpoint=out / "checkpoint", save_every=self.save_every, resume=self.resume is not None
            )
        console = _console()
        with Display(console)(asked, plan) as progress:
            record = run(asked, plan, progress)
        if out is not None:
            RunsFile(out).append(record)
        if record.status != "ok":
            return _fail(record.reason, 1)
        console.print(table([record], None))
        if out is not None:
            console.print(f"written: {out}", highlight=False, soft_wrap=True)
        return 0


@dataclass
class Compare(Shared):
    """Train one task in several ways, with the same data, seeds and network, and show the differences."""

    methods: str = ""
    """names with commas, each with settings if need be: ddp,powersgd,local_sgd+period=4; by default all there are"""
    seeds: int = 1
    """how many, counted up from --seed"""
    target_accuracy: float | None = None
    """also show the time to this value of the task's metric"""
    out: Path = Path("runs/compare")
    """where runs.jsonl and index.html go"""
    overwrite: bool = False

    def run(self, settings: dict[str, str]) -> int:
        from laconic.bench.compare import compare, prepare
        from laconic.bench.progress import Display
        from laconic.bench.report import write_report
        from laconic.bench.table import table
        from laconic.bench.ways import ask, names

        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, not {self.seeds}")
        chosen = [name.strip() for name in self.methods.split(",")] if self.methods else names()
        asked = [ask(name) for name in chosen]
        # The run without communication comes first: it tells what computing takes.
        asked.sort(key=lambda one: one.name != "none")
        plan = self.plan(settings)
        prepare(self.out, self.overwrite)
        console = _console()
        records = compare(asked, plan, self.seeds, self.out, Display(console))
        console.print(table(records, self.target_accuracy))
        write_report(records, self.out / "index.html", self.target_accuracy)
        console.print(f"report: {self.out / 'index.html'}", highlight=False, soft_wrap=True)
        failed = [record for record in records if record.status != "ok"]
        for record in failed:
            _fail(f"{record.name} (seed {record.seed}): {record.reason}", 1)
        return 1 if failed else 0


@dataclass
class Demo:
    """A comparison to look at: digits with a model of 1.1 M parameters, 4 hosts, links of 100 Mbit/s."""

    out: Path = Path("runs/demo")
    overwrite: bool = False

    def run(self, settings: dict[str, str]) -> int:
        from laconic.bench.ways import names
        from laconic.emulate import EmulationError, Network, parse_links

        _refuse(settings, self)
        skipped = {"post_local_sgd", "ddp_fp16"}
        link = "100mbit"
        try:
            with Network(parse_links(link, 4)):
                pass
        except EmulationError as error:
            _fail(f"{error}; the demo goes on without emulation, so the wire is not what slows it down", 0)
            link = "none"
        chosen = ",".join(name for name in names() if name not in skipped)
        this = Compare(methods=chosen, link=link, steps=45, evaluations=9, target_accuracy=0.9, out=self.out)
        this.overwrite = self.overwrite
        return this.run({"model": "wide"})


@dataclass
class Data:
    """Fetch a dataset, and verify it."""

    name: Positional[str]

    def run(self, settings: dict[str, str]) -> int:
        from laconic.tasks import fetch

        _refuse(settings, self)
        for path in fetch(self.name):
            print(path)
        return 0


def _console() -> Console:
    """As wide as the terminal; where there is none, wide enough for a table."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def _task(name: str, settings: dict[str, str], command: object) -> Task:
    from laconic.bench.ways import parse_value
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


def _pairs(unknown: list[str]) -> dict[str, str]:
    """`--key value` and `--key=value` that the command itself does not know."""
    pairs: dict[str, str] = {}
    rest = iter(unknown)
    for word in rest:
        if not word.startswith("--"):
            sys.exit(f"laconic: {word!r} is neither an option nor the value of one")
        key, equals, value = word[2:].partition("=")
        if not equals:
            value = next(rest, "--")
        if value.startswith("--"):
            sys.exit(f"laconic: --{key} needs a value")
        pairs[key.replace("-", "_")] = value
    return pairs


def _refuse(settings: dict[str, str], command: object) -> None:
    if settings:
        raise ValueError(f"laconic {type(command).__name__.lower()} has no option --{next(iter(settings))}")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return repr(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "…"


def _fail(text: str, code: int) -> int:
    print(f"laconic: {text}", file=sys.stderr)
    return code
