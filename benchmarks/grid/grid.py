"""Who reaches the target first, on which network? Methods and peers on a grid of tasks, rates and round trips.

    LACONIC_DATA=… python benchmarks/grid/grid.py run --out benchmarks/grid/grid.jsonl          (as root; hours)
    LACONIC_DATA=… python benchmarks/grid/grid.py run --out … --tasks fashion --rates 100 --round-trips 0 --seeds 1
    python benchmarks/grid/grid.py table benchmarks/grid/grid.jsonl

Every run is a real training on emulated hosts. A line of the file is one run; `run` makes those that the file lacks, by
turns: all contenders of a cell with one seed, then the next cell, then the next seed. A run that takes longer than
`--limit` seconds is ended and counts as not reached. The clock includes one average of all models at the target for
methods whose workers differ.
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
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic import tasks
from laconic.bench.baselines import BASELINES
from laconic.bench.run import Plan, run
from laconic.bench.strategies import parse_contender

sys.path.append(str(Path(__file__).parents[1] / "divisible"))
from finalists import TASKS as RECIPES

# Task, settings, steps, evaluations, target: one that workers that never talk miss and full communication reaches.
TASKS: dict[str, tuple[str, dict[str, Any], int, int, float]] = {
    "fashion": (*RECIPES["fashion"], 300, 30, 0.85),
    "gpt": (*RECIPES["gpt"], 160, 16, 2.32),
}
RATES, ROUND_TRIPS = (10, 100, 1000), (0, 50)  # Mbit/s, ms
START = 20.0  # seconds to start and to evaluate
FLOOR = ("none", "allreduce")  # computing alone, and the steps of full communication: on loopback


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
    return tuple(row[name] for name in ("task", "rate", "round_trip", "workers", "contender", "seed"))


def train(cell: Cell, contender: str, seed: int) -> dict[str, Any]:
    """Makes one run and returns its row."""
    name, settings, steps, evaluations, target = TASKS[cell.task]
    plan = Plan(tasks.find_task(name)(**settings), cell.workers, steps, seed, cell.link, evaluations=evaluations)
    record = run(parse_contender(contender), plan)
    if record.status != "ok":
        return {"status": record.reason[-300:]}
    reached = record.reached(target)
    assert record.step_time is not None
    return {
        "status": "ok",
        "seconds": reached and round(reached.seconds, 3),
        "steps": reached and reached.step,
        "kb": reached and round(reached.payload_nbytes / 1e3, 1),
        "ms": round(1e3 * record.step_time.total, 2),
        "kb_per_step": round(sum(record.payload_nbytes_per_step.values()) / 1e3, 2),
        "final": round(record.final() or math.nan, 5),
    }


def train_within(seconds: float, row: dict[str, Any]) -> dict[str, Any]:
    """Makes one run in a process of its own, which is ended after so many seconds of training (and some to start)."""
    command = [sys.executable, __file__, "one", json.dumps(row)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=seconds + START)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C: workers and emulated hosts end
            process.communicate()
            return {"status": f"ended after {seconds:g} s"}
    if process.returncode != 0:
        return {"status": f"exit code {process.returncode}"}
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def run_all(options: argparse.Namespace) -> None:
    done = {key(json.loads(line)) for line in options.out.read_text().splitlines()} if options.out.exists() else set()
    networks = [(0, 0), *itertools.product(options.rates, options.round_trips)]
    for seed, task, (rate, round_trip) in itertools.product(range(options.seeds), options.tasks, networks):
        cell = Cell(task, rate, round_trip, options.workers)
        for contender in FLOOR if rate == 0 else options.contenders:
            row = dataclasses.asdict(cell) | {"contender": contender, "seed": seed}
            if key(row) in done:
                continue
            row |= train_within(options.limit, row)
            row["date"] = datetime.date.today().isoformat()
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{cell}, {contender}, seed {seed}: {row.get('seconds')} s, {row.get('steps')} steps", flush=True)


def floor_of(rows: list[dict[str, Any]], cell: Cell) -> float | None:
    """Returns computing alone times the steps of full communication, in seconds; the mean over seeds."""
    there = [row for row in rows if row["rate"] == 0 and (row["task"], row["workers"]) == (cell.task, cell.workers)]
    ms = [row["ms"] for row in there if row["contender"] == "none" and row["status"] == "ok"]
    steps = [row["steps"] for row in there if row["contender"] == "allreduce" and row.get("steps")]
    return statistics.fmean(ms) * statistics.fmean(steps) / 1e3 if ms and steps else None


def times(rows: list[dict[str, Any]], cell: Cell) -> dict[str, list[float]]:
    """Returns the seconds to the target of each contender, one for each seed; infinite if it was not reached."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if (row["task"], row["rate"], row["round_trip"], row["workers"]) == dataclasses.astuple(cell):
            found.setdefault(row["contender"], []).append(row.get("seconds") or math.inf)
    return found


def is_peer(contender: str) -> bool:
    return contender.split("+")[0] in BASELINES


def table(rows: list[dict[str, Any]]) -> None:
    cells = sorted({Cell(r["task"], r["rate"], r["round_trip"], r["workers"]) for r in rows if r["rate"]}, key=str)
    contenders = list(dict.fromkeys(row["contender"] for row in rows if row["rate"]))
    print("| contender |" + "".join(f" {cell} |" for cell in cells))
    print("|---" * (len(cells) + 1) + "|")
    by_cell = {cell: times(rows, cell) for cell in cells}
    means = {cell: {name: statistics.fmean(found) for name, found in by_cell[cell].items()} for cell in cells}
    for name in contenders:
        texts = []
        for cell in cells:
            found = by_cell[cell].get(name)
            if not found:
                texts.append("")
            elif math.inf in found:
                texts.append("not reached")
            else:
                spread = f" ({min(found):.3g} – {max(found):.3g})" if len(found) > 1 else ""
                best = means[cell][name] == min(means[cell].values())
                texts.append(f"**{means[cell][name]:.3g}**{spread}" if best else f"{means[cell][name]:.3g}{spread}")
        print(f"| {name}{' (peer)' if is_peer(name) else ''} |" + "".join(f" {text} |" for text in texts))
    leads = []
    for cell in cells:
        ours = min((value for name, value in means[cell].items() if not is_peer(name)), default=math.inf)
        peers = min((value for name, value in means[cell].items() if is_peer(name)), default=math.inf)
        floor = floor_of(rows, cell)
        above = f", {ours / floor:.2f} × the floor of {floor:.2f} s" if floor else ""
        if math.isfinite(ours) and math.isfinite(peers):
            leads.append(peers / ours)
        print(f"\n{cell}: best of laconic {ours:.3g} s, best peer {peers:.3g} s, × {peers / ours:.2f}{above}", end="")
    if leads:
        print(f"\n\ngeometric mean of the leads over {len(leads)} cells: {statistics.geometric_mean(leads):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    running.add_argument("--rates", nargs="+", type=int, default=RATES, help="Mbit/s")
    running.add_argument("--round-trips", nargs="+", type=int, default=ROUND_TRIPS, help="ms")
    running.add_argument("--workers", type=int, default=4)
    running.add_argument("--seeds", type=int, default=3)
    running.add_argument("--limit", type=float, default=90, help="seconds of a run")
    running.add_argument("--contenders", nargs="+", required=True)
    tabulating = commands.add_parser("table")
    tabulating.add_argument("file", type=Path)
    commands.add_parser("one").add_argument("row")
    options = parser.parse_args()
    if options.command == "one":
        row = json.loads(options.row)
        cell = Cell(row["task"], row["rate"], row["round_trip"], row["workers"])
        print(json.dumps(train(cell, row["contender"], row["seed"])))
    elif options.command == "run":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        run_all(options)
    else:
        table([json.loads(line) for line in options.file.read_text().splitlines()])


if __name__ == "__main__":
    main()
