"""Prints the tables of grid.md, and draws its heat map.

python benchmarks/grid/page.py > tables.md
python benchmarks/grid/page.py --map benchmarks/grid/grid.svg
"""

from __future__ import annotations

import argparse
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
    """A contender in a cell, over seeds."""

    name: str
    seconds: list[float]  # infinite where the target was not reached
    averages: list[float]  # of these, for one average of all models
    steps: list[int]
    ms: list[float]
    why: str  # it has no seconds

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seconds) if self.seconds else math.inf

    @property
    def mean_without_average(self) -> float:
        return statistics.fmean(s - a for s, a in zip(self.seconds, self.averages, strict=True))


def results(rows: list[Row], cell: Cell) -> list[Result]:
    found: dict[str, Result] = {}
    for row in of_cell(rows, cell):
        one = found.setdefault(row["contender"], Result(row["contender"], [], [], [], [], ""))
        one.seconds.append(row.get("seconds") or math.inf)
        one.averages.append(row.get("average") or 0.0)
        if row.get("seconds"):
            one.steps.append(row["steps"])
        if "ms" in row:
            one.ms.append(row["ms"])
        one.why = "not reached" if row["status"] == "ok" else row["status"]
    return list(found.values())


def best(of: list[Result], *, peers: bool, without_average: bool = False) -> Result | None:
    """Returns the best of laconic or of the others; of laconic only among those with the most seeds."""
    chosen = [one for one in of if is_peer(one.name) == peers and math.isfinite(one.mean)]
    if not peers:
        chosen = [one for one in chosen if len(one.seconds) == max(len(other.seconds) for other in chosen)]
    return min(chosen, key=lambda one: one.mean_without_average if without_average else one.mean, default=None)


def least_of_others(of: list[Result], task: str) -> float:
    """Returns the seconds below which no other reaches the target, where none does: the shortest of the whole runs,
    for each contender the longest that was tried."""
    whole: dict[str, float] = {}
    for one in of:
        if is_peer(one.name) and one.ms:
            text, steps = split_steps(one.name, task)
            whole[text] = max(whole.get(text, 0.0), statistics.fmean(one.ms) * steps / 1e3)
    return min([TASKS[task].limit, *whole.values()])


def floor_of(rows: list[Row], cell: Cell) -> float | None:
    """Returns computing alone times the steps of full communication, in seconds, on the machine of this cell; the mean
    over seeds."""
    machine = of_cell(rows, cell)[0]["machine"]
    there = {
        one.name: one
        for one in results([r for r in rows if r["machine"] == machine], Cell(cell.task, 0, 0, cell.workers))
    }
    if not {"none", "allreduce"} <= there.keys() or not there["allreduce"].steps:
        return None
    return statistics.fmean(there["none"].ms) * statistics.fmean(there["allreduce"].steps) / 1e3


def cells_of(rows: list[Row]) -> list[Cell]:
    found = {Cell(r["task"], r["rate"], r["round_trip"], r["workers"]) for r in rows if r["rate"]}
    return sorted(found, key=lambda cell: (cell.workers != 4, cell.task, cell.round_trip, cell.rate))


def network(cell: Cell) -> str:
    rate = "1 Gbit/s" if cell.rate == 1000 else f"{cell.rate} Mbit/s"
    return f"{rate}, {cell.round_trip} ms" if cell.round_trip else rate


def describe(one: Result, is_best: bool) -> str:
    reached = [seconds for seconds in one.seconds if math.isfinite(seconds)]
    if reached and not math.isfinite(one.mean):
        return f"{len(reached)} of {len(one.seconds)} seeds: " + ", ".join(f"{seconds:.1f}" for seconds in reached)
    if not reached:
        return one.why.replace("its bytes to the target alone take", "bytes alone:").replace("ended after", ">")
    spread = f" ({min(one.seconds):.1f} – {max(one.seconds):.1f})" if len(one.seconds) > 1 else ""
    mean = f"**{one.mean:.1f}**" if is_best else f"{one.mean:.1f}"
    return f"{mean}{spread}, {statistics.fmean(one.steps):.0f} st., {statistics.fmean(one.ms):.0f} ms"


def print_table(rows: list[Row], cells: list[Cell]) -> None:
    by_cell = {cell: {one.name: one for one in results(rows, cell)} for cell in cells}
    names = list(dict.fromkeys(name for found in by_cell.values() for name in found))
    print("| contender |" + "".join(f" {network(cell)} |" for cell in cells))
    print("|---" * (len(cells) + 1) + "|")
    for name in sorted(names, key=is_peer):
        texts = []
        for cell in cells:
            one, winner = by_cell[cell].get(name), min(by_cell[cell].values(), key=lambda one: one.mean)
            texts.append(describe(one, one is winner) if one else "")
        print(f"| {'*' + name + '*' if is_peer(name) else name} |" + "".join(f" {text} |" for text in texts))


def print_leads(rows: list[Row], cells: list[Cell]) -> None:
    print("| | best of laconic | best of the others | lead | lead if the others' average is free | × the floor |")
    print("|---" * 6 + "|")
    leads: dict[str, list[float]] = {}
    for cell in cells:
        found, floor = results(rows, cell), floor_of(rows, cell)
        ours, theirs = best(found, peers=False), best(found, peers=True)
        free = best(found, peers=True, without_average=True)
        if ours is None:
            continue
        line = f"| {cell.task}, {network(cell)} | {ours.name}: {ours.mean:.1f} s ({len(ours.seconds)} seeds) |"
        if theirs is None or free is None:
            lead = least_of_others(found, cell.task) / ours.mean
            line += f" none | **> {lead:.2f}** | > {lead:.2f} |"
            for group in ("all", "cautious", *(["10 Mbit/s"] if cell.rate == 10 else [])):
                leads.setdefault(group, []).append(lead)
        else:
            lead, cautious = theirs.mean / ours.mean, free.mean_without_average / ours.mean
            line += f" {theirs.name}: {theirs.mean:.1f} s ({len(theirs.seconds)}) | **{lead:.2f}** | {cautious:.2f} |"
            leads.setdefault("all", []).append(lead)
            leads.setdefault("cautious", []).append(cautious)
            if cell.rate == 10:
                leads.setdefault("10 Mbit/s", []).append(lead)
        print(line + (f" {ours.mean / floor:.2f} |" if floor else " |"))
    for name, values in leads.items():
        print(f"\ngeometric mean, {name}: {statistics.geometric_mean(values):.2f} over {len(values)} cells", end="")
    print()


def short(name: str) -> str:
    kind, *settings = name.partition("@")[0].split("+")
    bits = next((s.split("=")[1] for s in settings if s.startswith("compressor=")), "")
    suffix = {"uniform:4": ", 4 bits", "pick:7": ", Pick(7)"}.get(bits, "")
    return SHORT.get(kind, kind) + suffix


def draw_map(rows: list[Row]) -> str:
    """Returns a heat map: for each cell the winner, its seconds, and by how much the best of the others is later."""
    cells = [cell for cell in cells_of(rows) if cell.workers == 4]
    tasks, networks = list(dict.fromkeys(cell.task for cell in cells)), sorted({(c.round_trip, c.rate) for c in cells})
    left, top, width, height = 92.0, 56.0, 210.0, 52.0
    marks = [text(left + i * width + width / 2, 20, task, "bold", "middle") for i, task in enumerate(tasks)]
    marks += [
        text(left + i * width + width / 2, 40, "winner, seconds; best other", "small", "middle")
        for i in range(len(tasks))
    ]
    for row, (round_trip, rate) in enumerate(networks):
        y = top + row * height
        marks.append(text(4, y + 22, "1 Gbit/s" if rate == 1000 else f"{rate} Mbit/s", "small"))
        marks.append(text(4, y + 38, f"{round_trip} ms", "small"))
        for column, task in enumerate(tasks):
            found = results(rows, Cell(task, rate, round_trip, 4))
            ours, theirs = best(found, peers=False), best(found, peers=True)
            if ours is None:
                continue
            lead = (theirs.mean if theirs else least_of_others(found, task)) / ours.mean
            x, shade = left + column * width, max(0.0, min(1.0, (lead - 1) / 2))
            colour = "#009e73" if lead >= 1 else "#d55e00"
            opacity = 0.15 + 0.6 * (shade if lead >= 1 else min(1.0, 1 / lead - 1))
            place = f'x="{x:g}" y="{y:g}" width="{width - 4:g}" height="{height - 4:g}"'
            marks.append(f'<rect {place} rx="3" fill="{colour}" fill-opacity="{opacity:.2f}"/>')
            winner, other = (ours, theirs) if lead >= 1 or theirs is None else (theirs, ours)
            marks.append(text(x + 8, y + 20, f"{short(winner.name)}, {winner.mean:.1f} s", "small bold"))
            behind = f"{short(other.name)}, {other.mean:.1f} s" if other else "none of the others"
            marks.append(text(x + 8, y + 38, behind, "small"))
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
    groups: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells_of(rows):
        groups.setdefault((cell.workers, cell.task), []).append(cell)
    for (workers, task), cells in groups.items():
        print(f"\n### {task}, {workers} workers\n")
        print_table(rows, cells)
    for workers in dict.fromkeys(workers for workers, _ in groups):
        print(f"\n### Leads, {workers} workers\n")
        print_leads(rows, [cell for cell in cells_of(rows) if cell.workers == workers])


if __name__ == "__main__":
    main()
