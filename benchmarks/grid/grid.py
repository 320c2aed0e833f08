"""Who reaches the target first, on which network? Methods and peers on a grid of tasks, rates and round trips.

    LACONIC_DATA=… python benchmarks/grid/grid.py run      (as root; hours on 2 cores; needs the extras [bench,peers])
    LACONIC_DATA=… python benchmarks/grid/grid.py run --tasks fashion --rates 100 --round-trips 0 --seeds 1
    python benchmarks/grid/page.py --file runs/grid.jsonl  (prints the tables of grid.md)

Every run is a real training on emulated hosts. A line of the file is one run; `run` makes those that the file lacks.
The recorded runs are in grid.jsonl.
The time to the target is that of the model that is there first, as everywhere in `laconic compare`: the mean of all
models, with the time of averaging them once where workers differ, or the agreed model that all workers hold.

Not everything is run, since most of it is hopeless, and a line says why:
- A run that takes longer than the task's limit (about four times the best) is ended.
- A contender that does not reach the target in the task's steps is tried with a training twice as long, whose schedule
  is as long too: `powersgd@320` trains for 320 steps.
- A contender whose bytes to the target, as counted on a faster link, take longer than the limit is not started.
- With a delay, only contenders that were run without it, and within 2.5 times the best.
- Seeds after the first, only the two best of laconic and the two best others of each cell. `--contenders` runs those
  that it names, and no others, in every seed.

A seed of a cell is measured on one machine, which `--machine` names: runs of different machines are never compared, and
a lead over several seeds is the geometric mean of the leads of each.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laconic import tasks
from laconic.bench.baselines import BASELINES
from laconic.bench.run import Plan, run
from laconic.bench.strategies import parse_contender

sys.path.append(str(Path(__file__).parents[1] / "divisible"))
from finalists import TASKS as RECIPES


@dataclass(frozen=True)
class Recipe:
    """A task, and a target that workers that never communicate miss and full communication reaches."""

    name: str
    settings: dict[str, Any]
    steps: int
    evaluations: int
    target: float
    limit: float  # seconds of a run


TASKS = {
    "fashion": Recipe(*RECIPES["fashion"], steps=300, evaluations=30, target=0.85, limit=30),
    "gpt": Recipe(*RECIPES["gpt"], steps=160, evaluations=16, target=2.32, limit=90),
}
RATES, ROUND_TRIPS = (100, 10, 1000), (0, 50)  # Mbit/s, ms
START, ENDING = 40.0, 10.0  # seconds to start, to average at the end and to evaluate, and to end
SLOW_START = 600.0  # and so many more divided by the link's Mbit/s: the model travels three times
FLOOR = ("none", "none_averaged", "allreduce")  # computing alone, and the steps of full communication: on loopback
SPARSE = "diloco+period=4+outer_lr=2.5+outer_momentum=0+fragments=2+delay=2+mixing=steps+decay=0.95"
CONTENDERS = (
    f"{SPARSE}+compressor=topk:0.015625:bits=1",
    "divisible",
    "diloco+period=8+fragments=4+delay=2+compressor=uniform:4",
    "diloco+period=32+fragments=2+delay=8+mixing=0+compressor=uniform:4",
    "local_sgd+compressor=uniform:4",
    "a2cid2",
    "efficient_adam",
    "efficient_adam+delay=1",
    "adpsgd+compressor=uniform:4",
    "qsgd",
    "sparseloco+period=8+outer_lr=2.5",
    "sparseloco+period=8+kept=128+outer_lr=2.5",
    "sparseloco+period=8+kept=256+outer_lr=2.5",
    "sparseloco+period=4+outer_lr=2.5",
    "sparseloco+period=4+kept=128+outer_lr=2.5",
    "sparseloco+period=4+kept=256+outer_lr=2.5",
    "sparseloco+period=8+kept=128",
    "torchft_diloco",
    "torchft_diloco+period=8+delay=3",
    "demo",
    "demo+kept=8",
    "powersgd",
    "post_local_sgd",
    "ddp",
    "torchft_diloco@320",
    "powersgd@320",
)
ADAPTIVE = ("divisible", "a2cid2")  # they send fewer bytes on a slower link
NEAR = 2.5  # times the best without a delay: worth trying with one
REPEATED = 2  # of laconic and of others in each cell, with more seeds


@dataclass(frozen=True)
class Cell:
    """A task on a network."""

    task: str
    rate: int
    round_trip: int
    workers: int

    @property
    def link(self) -> str:
        if self.rate == 0:
            return "none"
        delay = f"+{self.round_trip / 2:g}ms" if self.round_trip else ""
        return f"{self.rate}mbit{delay}"

    def __str__(self) -> str:
        return f"{self.task}, {self.link}, {self.workers} workers"


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("task", "rate", "round_trip", "workers", "contender", "seed", "machine"))


def split_steps(contender: str, task: str) -> tuple[str, int]:
    """Returns the contender's specification, and for how many steps it trains.

    >>> split_steps("powersgd@320", "gpt"), split_steps("powersgd", "gpt")
    (('powersgd', 320), ('powersgd', 160))
    """
    text, _, steps = contender.partition("@")
    return text, int(steps or TASKS[task].steps)


def train(cell: Cell, contender: str, seed: int) -> dict[str, Any]:
    """Makes one run and returns its row."""
    recipe = TASKS[cell.task]
    task = tasks.find_task(recipe.name)(**recipe.settings)
    text, steps = split_steps(contender, cell.task)
    plan = Plan(task, cell.workers, steps, seed, cell.link, evaluations=recipe.evaluations * steps // recipe.steps)
    torch.set_num_threads(os.cpu_count() or 1)  # to evaluate, when the workers have ended
    record = run(parse_contender(text), plan)
    if record.status != "ok":
        return {"status": record.reason[-300:]}
    reached = record.reached(recipe.target)
    assert record.step_time is not None
    return {
        "status": "ok",
        "seconds": reached and round(reached.seconds, 3),
        "steps": reached and reached.step,
        "average": round(record.average_seconds, 3) if reached and reached.differs else 0.0,  # part of `seconds`
        "average_seconds": round(record.average_seconds, 3),
        "kb": reached and round(reached.payload_nbytes / 1e3, 1),
        "ms": round(1e3 * record.step_time.total, 2),
        "kb_per_step": round(sum(record.payload_nbytes_per_step.values()) / 1e3, 2),
        "final": round(record.final() or math.nan, 5),
        "curve": [round(point.values[record.metric], 4) for point in record.points],
        "agreed": [round(p.agreed[record.metric], 4) if p.agreed else None for p in record.points],
    }


def train_within(seconds: float, row: dict[str, Any]) -> dict[str, Any]:
    """Makes one run in a process of its own, which is ended after so many seconds of training (and some to start)."""
    around = START + (SLOW_START / row["rate"] if row["rate"] else 0.0)
    command = [sys.executable, __file__, "one", json.dumps(row)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=seconds + around)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C: workers and emulated hosts end
            try:
                process.communicate(timeout=ENDING)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            return {"status": f"ended after {seconds:g} s"}
    if process.returncode != 0:
        return {"status": f"exit code {process.returncode}"}
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def limit_of(contender: str, task: str) -> float:
    """Returns after how many seconds a run is ended."""
    return TASKS[task].limit * split_steps(contender, task)[1] / TASKS[task].steps


def why_not(rows: list[dict[str, Any]], cell: Cell, contender: str, seed: int, *, chosen: bool) -> str | None:
    """Returns why a run is not worth making, or None. Contenders that the user has chosen are run in all seeds."""
    limit, own = limit_of(contender, cell.task), [row for row in rows if row["contender"] == contender]
    sent = [row["kb"] for row in own if (row["task"], row["workers"]) == (cell.task, cell.workers) and row.get("kb")]
    adapts = name_of(contender) in ADAPTIVE
    if sent and cell.rate and not adapts and 8e-3 * min(sent) / cell.rate > limit:
        return f"its bytes to the target alone take {8e-3 * min(sent) / cell.rate:.0f} s"
    if cell.rate == 0:
        return None
    if seed == 0 and cell.round_trip and not chosen:
        found = {name: min(values) for name, values in times(rows, dataclasses.replace(cell, round_trip=0)).items()}
        if contender not in found:
            return "not run without a delay"
        if found[contender] > NEAR * min(found.values()):
            return f"more than {NEAR} times the best without a delay"
    elif seed and not chosen:
        first = {name: values[0] for name, values in times(rows, cell).items() if math.isfinite(values[0])}
        alike = sorted((name for name in first if is_peer(name) == is_peer(contender)), key=first.__getitem__)
        if contender not in alike[:REPEATED]:
            return "not among the best of the first seed"
    return None


def run_all(options: argparse.Namespace) -> None:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = read(options.out) if options.out.exists() else []
    done = {key(row) for row in rows}
    seeds = range(options.first_seed, options.seeds)
    networks = [(0, 0), *((rate, trip) for trip in options.round_trips for rate in options.rates)]
    for seed, task, (rate, round_trip) in itertools.product(seeds, options.tasks, networks):
        cell = Cell(task, rate, round_trip, options.workers)
        others = {row["machine"] for row in of_cell(rows, cell) if row["seed"] == seed} - {options.machine}
        if rate and others:
            raise SystemExit(
                f"{cell}, seed {seed} was measured on machine {others.pop()!r}: remove those runs, or take other seeds"
            )
        chosen = options.contenders or (*FLOOR, *CONTENDERS)
        for contender in [name for name in chosen if (name in FLOOR) == (rate == 0)]:
            row = dataclasses.asdict(cell) | {"contender": contender, "seed": seed, "machine": options.machine}
            reason = why_not(rows, cell, contender, seed, chosen=bool(options.contenders))
            if key(row) in done or (reason is not None and seed):
                continue
            found = train_within(limit_of(contender, task), row) if reason is None else {"status": reason}
            row |= found | {"date": datetime.date.today().isoformat()}
            rows.append(row)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{cell}, {contender}, seed {seed}: {row.get('seconds')} s, {row['status']}", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_cell(rows: list[dict[str, Any]], cell: Cell) -> list[dict[str, Any]]:
    place = dataclasses.astuple(cell)
    return [row for row in rows if (row["task"], row["rate"], row["round_trip"], row["workers"]) == place]


def times(rows: list[dict[str, Any]], cell: Cell) -> dict[str, list[float]]:
    """Returns the seconds to the target of each contender, one for each seed; infinite if it was not reached."""
    found: dict[str, list[float]] = {}
    for row in of_cell(rows, cell):
        found.setdefault(row["contender"], []).append(row.get("seconds") or math.inf)
    return found


def name_of(contender: str) -> str:
    return contender.partition("@")[0].split("+")[0]


def is_peer(contender: str) -> bool:
    return name_of(contender) in BASELINES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=Path("runs/grid.jsonl"))
    running.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    running.add_argument("--rates", nargs="+", type=int, default=RATES, help="Mbit/s")
    running.add_argument("--round-trips", nargs="+", type=int, default=ROUND_TRIPS, help="ms")
    running.add_argument("--workers", type=int, default=4)
    running.add_argument("--seeds", type=int, default=3)
    running.add_argument("--machine", default="here", help="a label; runs of one cell must have the same")
    running.add_argument("--first-seed", type=int, default=0)
    running.add_argument("--contenders", nargs="+", help="instead of the list above; in every seed")
    commands.add_parser("one").add_argument("row")
    options = parser.parse_args()
    if options.command == "one":
        row = json.loads(options.row)
        cell = Cell(row["task"], row["rate"], row["round_trip"], row["workers"])
        print(json.dumps(train(cell, row["contender"], row["seed"])))
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        run_all(options)


if __name__ == "__main__":
    main()
