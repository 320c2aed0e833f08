"""Prints the tables of grid.md, and draws its heat map.

A seed of a cell was measured on one machine. The seconds of several machines are shown in tables of their own, and two
contenders are compared seed by seed: their lead is the geometric mean over the seeds that both have.

python benchmarks/grid/page.py > tables.md
python benchmarks/grid/page.py --map benchmarks/grid/grid.svg
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grid import TASKS, Cell, is_peer, of_cell, read, split_steps

sys.path.append(str(Path(__file__).parents[2] / "docs" / "figures"))
from draw import svg, text

Row = dict[str, Any]
SHORT = {
    "a2cid2": "A2CiD2",
    "ddp": "DDP",
    "diloco": "DiLoCo",
    "divisible": "Divisible",
    "local_sgd": "LocalSGD",
    "sparseloco": "SparseLoCo",
    "torchft_diloco": "torchft",
}


@dataclass
class Result:
    """A contender in a cell. Seconds are by seed, and infinite where the target was not reached."""

    name: str
    seconds: dict[int, float]
    steps: list[int]
    ms: list[float]
    why: str  # it has no seconds

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seconds.values()) if self.seconds else math.inf

    def behind(self, first: Result) -> float:
        """Returns how many times later than `first` it is; infinite if it misses the target in a common seed."""
        ratios = [seconds / first.seconds[seed] for seed, seconds in self.seconds.items() if seed in first.seconds]
        return statistics.geometric_mean(ratios) if ratios and all(map(math.isfinite, ratios)) else math.inf


def results(rows: list[Row]) -> list[Result]:
    """Returns the contenders of the rows of a cell."""
    found: dict[str, Result] = {}
    for row in rows:
        one = found.setdefault(row["contender"], Result(row["contender"], {}, [], [], ""))
        one.seconds[row["seed"]] = row.get("seconds") or math.inf
        if row.get("seconds"):
            one.steps.append(row["steps"])
        if "ms" in row:
            one.ms.append(row["ms"])
        one.why = "not reached" if row["status"] == "ok" else row["status"]
    return list(found.values())


def best_of_laconic(of: list[Result]) -> Result | None:
    """Returns the best method of laconic, among those with the most seeds."""
    chosen = [one for one in of if not is_peer(one.name) and math.isfinite(one.mean)]
    most = max((len(one.seconds) for one in chosen), default=0)
    return min((one for one in chosen if len(one.seconds) == most), key=lambda one: one.mean, default=None)


def best_of_others(of: list[Result], ours: Result) -> tuple[Result | None, float]:
    """Returns the best of the others, seed by seed, and how many times later than `ours` it is."""
    behind = {one.name: one.behind(ours) for one in of if is_peer(one.name)}
    first = min((one for one in of if is_peer(one.name)), key=lambda one: behind[one.name], default=None)
    if first is None or not math.isfinite(behind[first.name]):
        return None, math.inf
    return first, behind[first.name]


def least_of_others(of: list[Result], task: str) -> float:
    """Returns the seconds below which no other reaches the target, where none does: the shortest of the whole runs,
    for each contender the longest that was tried."""
    whole: dict[str, float] = {}
    for one in of:
        if is_peer(one.name) and one.ms:
            text, steps = split_steps(one.name, task)
            whole[text] = max(whole.get(text, 0.0), statistics.fmean(one.ms) * steps / 1e3)
    return min([TASKS[task].limit, *whole.values()])


def floor_of(rows: list[Row], cell: Cell, machine: str) -> float | None:
    """Returns computing alone times the steps of full communication, in seconds, on a machine; the mean over seeds."""
    there = of_cell(rows, Cell(cell.task, 0, 0, cell.workers))
    found = {one.name: one for one in results([row for row in there if row["machine"] == machine])}
    if not {"none", "allreduce"} <= found.keys() or not found["allreduce"].steps:
        return None
    return statistics.fmean(found["none"].ms) * statistics.fmean(found["allreduce"].steps) / 1e3


def above_floor(rows: list[Row], cell: Cell, one: Result) -> float:
    """Returns the seconds as a multiple of the floor of their machine; the geometric mean over seeds."""
    machines = {row["seed"]: row["machine"] for row in of_cell(rows, cell)}
    floors = {seed: floor_of(rows, cell, machines[seed]) for seed in one.seconds}
    found = [seconds / floor for seed, seconds in one.seconds.items() if (floor := floors[seed])]
    return statistics.geometric_mean(found) if found else math.nan


def cells_of(rows: list[Row]) -> list[Cell]:
    found = {Cell(r["task"], r["rate"], r["round_trip"], r["workers"]) for r in rows if r["rate"]}
    return sorted(found, key=lambda cell: (cell.workers != 4, cell.task, cell.round_trip, cell.rate))


def network(cell: Cell) -> str:
    rate = "1 Gbit/s" if cell.rate == 1000 else f"{cell.rate} Mbit/s"
    return f"{rate}, {cell.round_trip} ms" if cell.round_trip else rate


def describe(one: Result, is_best: bool) -> str:
    times = list(one.seconds.values())
    reached = [seconds for seconds in times if math.isfinite(seconds)]
    if reached and not math.isfinite(one.mean):
        return f"{len(reached)} of {len(times)} seeds: " + ", ".join(f"{seconds:.1f}" for seconds in reached)
    if not reached:
        return one.why.replace("its bytes to the target alone take", "bytes alone:").replace("ended after", ">")
    spread = f" ({min(times):.1f} – {max(times):.1f})" if len(times) > 1 else ""
    mean = f"**{one.mean:.1f}**" if is_best else f"{one.mean:.1f}"
    return f"{mean}{spread}, {statistics.fmean(one.steps):.0f} st., {statistics.fmean(one.ms):.0f} ms"


def print_table(rows: list[Row], cells: list[Cell]) -> None:
    by_cell = {cell: {one.name: one for one in results(of_cell(rows, cell))} for cell in cells}
    names = list(dict.fromkeys(name for found in by_cell.values() for name in found))
    print("| contender |" + "".join(f" {network(cell)} |" for cell in cells))
    print("|---" * (len(cells) + 1) + "|")
    for name in sorted(names, key=is_peer):
        texts = []
        for cell in cells:
            one, winner = by_cell[cell].get(name), min(by_cell[cell].values(), key=lambda one: one.mean)
            texts.append(describe(one, one is winner) if one else "")
        print(f"| {'*' + name + '*' if is_peer(name) else name} |" + "".join(f" {text} |" for text in texts))


def mean_of(one: Result, seeds: list[int]) -> str:
    """Returns the mean seconds over some seeds, and their number."""
    mean = statistics.fmean(one.seconds[seed] for seed in seeds)
    return f"{mean:.1f} s ({len(seeds)} seed{'s' if len(seeds) > 1 else ''})"


def print_leads(rows: list[Row], cells: list[Cell]) -> None:
    print("| | best of laconic | best of the others | lead (by seed) | × the floor |")
    print("|---" * 5 + "|")
    leads: dict[str, list[float]] = {}
    for cell in cells:
        found = results(of_cell(rows, cell))
        ours = best_of_laconic(found)
        if ours is None:
            continue
        theirs, lead = best_of_others(found, ours)
        if theirs is None:
            lead = least_of_others(found, cell.task) / ours.mean
            other, bound, each = "none", "> ", ""
        else:
            both = sorted(ours.seconds.keys() & theirs.seconds.keys())
            other, bound = f"{short(theirs.name)} {mean_of(theirs, both)}", ""
            each = f" ({', '.join(f'{theirs.seconds[seed] / ours.seconds[seed]:.2f}' for seed in both)})"
        print(
            f"| {cell.task}, {network(cell)} | {short(ours.name)} {mean_of(ours, list(ours.seconds))} | {other} |"
            f" {bound}**{lead:.2f}**{each} | {above_floor(rows, cell, ours):.2f} |"
        )
        leads.setdefault("all", []).append(lead)
        if cell.rate == 10:
            leads.setdefault("10 Mbit/s", []).append(lead)
    for name, values in leads.items():
        print(f"\ngeometric mean, {name}: {statistics.geometric_mean(values):.2f} over {len(values)} cells", end="")
    print()


def short(name: str) -> str:
    kind, *settings = name.partition("@")[0].split("+")
    bits = next((s.split("=")[1] for s in settings if s.startswith("compressor=")), "")
    kinds = {"uniform:4": ", 4 bits", "pick:7": ", Pick(7)"}
    suffix = ", sparse" if bits.startswith("topk") else kinds.get(bits, "")
    steps = name.partition("@")[2]
    return SHORT.get(kind, kind) + suffix + (f", {steps} steps" if steps else "")


def draw_map(rows: list[Row]) -> str:
    """Returns a heat map: for each cell the winner, its seconds, and by how much the best of the others is later."""
    cells = [cell for cell in cells_of(rows) if cell.workers == 4]
    tasks, networks = list(dict.fromkeys(cell.task for cell in cells)), sorted({(c.round_trip, c.rate) for c in cells})
    left, top, width, height = 92.0, 56.0, 210.0, 52.0
    marks = [text(left + i * width + width / 2, 20, task, "bold", "middle") for i, task in enumerate(tasks)]
    marks += [
        text(left + i * width + width / 2, 40, "winner, best other, times later", "small", "middle")
        for i in range(len(tasks))
    ]
    for row, (round_trip, rate) in enumerate(networks):
        y = top + row * height
        marks.append(text(4, y + 22, "1 Gbit/s" if rate == 1000 else f"{rate} Mbit/s", "small"))
        marks.append(text(4, y + 38, f"{round_trip} ms", "small"))
        for column, task in enumerate(tasks):
            found = results(of_cell(rows, Cell(task, rate, round_trip, 4)))
            ours = best_of_laconic(found)
            if ours is None:
                continue
            theirs, lead = best_of_others(found, ours)
            if theirs is None:
                lead = least_of_others(found, task) / ours.mean
            x, shade = left + column * width, max(0.0, min(1.0, (lead - 1) / 2))
            colour = "#009e73" if lead >= 1 else "#d55e00"
            opacity = 0.15 + 0.6 * (shade if lead >= 1 else min(1.0, 1 / lead - 1))
            place = f'x="{x:g}" y="{y:g}" width="{width - 4:g}" height="{height - 4:g}"'
            marks.append(f'<rect {place} rx="3" fill="{colour}" fill-opacity="{opacity:.2f}"/>')
            winner, other = (ours, theirs) if lead >= 1 or theirs is None else (theirs, ours)
            marks.append(text(x + 8, y + 20, short(winner.name), "small bold"))
            marks.append(text(x + 8, y + 38, short(other.name) if other else "none of the others", "small"))
            factor = lead if lead >= 1 else 1 / lead
            marks.append(text(x + width - 12, y + 29, f"{'' if theirs else '> '}{factor:.1f} ×", "bold", "end"))
    return svg(top + len(networks) * height + 4, marks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path(__file__).parent / "grid.jsonl")
    parser.add_argument("--map", type=Path, help="writes the heat map instead")
    options = parser.parse_args()
    rows = read(options.file)
    if options.map is not None:
        options.map.write_text(draw_map(rows))
        return
    tables = dict.fromkeys((cell.workers, cell.task) for cell in cells_of(rows))
    for (workers, task), machine in itertools.product(tables, sorted({row["machine"] for row in rows})):
        there = [row for row in rows if row["machine"] == machine]
        cells = [cell for cell in cells_of(there) if (cell.workers, cell.task) == (workers, task)]
        if cells:
            floor = floor_of(there, cells[0], machine)
            print(f"\n### {task}, {workers} workers, machine {machine} (floor {floor or math.nan:.1f} s)\n")
            print_table(there, cells)
    for workers in dict.fromkeys(workers for workers, _ in tables):
        print(f"\n### Leads, {workers} workers\n")
        print_leads(rows, [cell for cell in cells_of(rows) if cell.workers == workers])


if __name__ == "__main__":
    main()
