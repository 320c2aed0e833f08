"""Prints the tables of docs/scale.md from claims.jsonl: python benchmarks/simulate/tables.py"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "claims.jsonl"
Line = dict[str, Any]
METHODS = ("allreduce", "local_sgd", "adpsgd", "divisible", "efficient_adam", "a2cid2", "never")
VARIANTS = ((True, 1), (False, 1), (False, 2))


def spread(values: list[float], form: str) -> str:
    """Returns the mean, and half the range of the values if there are several."""
    mean = format(sum(values) / len(values), form)
    return mean if len(values) == 1 else f"{mean} ± {(max(values) - min(values)) / 2:{form}}"


def table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    headers = list(headers)
    for row in (headers, ["---"] * len(headers), *rows):
        print("| " + " | ".join(row) + " |")
    print()


def last(line: Line) -> float:
    """Returns the accuracy of the mean model at the end, in percent."""
    return 100 * float(list(line["means"].values())[-1])


def gossip(lines: list[Line]) -> None:
    columns: dict[str, Callable[[Line], float]] = {
        "mean model, %": last,
        "single workers, %": lambda line: 100 * float(line["single"][1]),
        "worst worker, %": lambda line: 100 * float(line["single"][0]),
        "distance, step 500": lambda line: float(line["distances"][1]),
        "distance, step 1000": lambda line: float(line["distances"][-1]),
    }
    rows = []
    for task, data, graph, workers in itertools.product(
        ("fashion", "cifar10"), ("iid", "non-iid"), ("ring", "exponential", "complete"), (16, 32, 64)
    ):
        where = {"task": task, "data": data, "graph": graph, "workers": workers}
        for momentum, rate in VARIANTS:
            found = select(lines, **where, momentum=momentum, rate=rate)
            if found:
                variant = "with" if momentum else f"without, rate {rate}"
                cells = [spread([read(line) for line in found], ".2f") for read in columns.values()]
                rows.append([f"{task}, {data}", f"{graph} of {workers}", variant, str(len(found)), *cells])
    table(["data", "graph", "momentum", "seeds", *columns], rows)


def many(lines: list[Line]) -> None:
    sizes = (16, 64, 256)
    rows = []
    for method in METHODS:
        by_size = [select(lines, method=method, workers=size) for size in sizes]
        if any(by_size):
            cells = [spread([last(line) for line in found], ".2f") if found else "" for found in by_size]
            sent = [f"{found[0]['MB'] / found[0]['steps'] * 1e3:.1f}" if found else "" for found in by_size]
            rows.append([method, *cells, ", ".join(sent)])
    table(["method", *(f"{size} workers, %" for size in sizes), "kB a step and worker"], rows)


def speedup(lines: list[Line]) -> None:
    sizes = (1, 4, 16, 64)
    rows = []
    for method in METHODS:
        cells, first = [], 0.0
        for size in sizes:
            best = []
            for seed in range(3):
                reached = [
                    (steps_to_target(line), line["lr"])
                    for line in select(lines, method=method, workers=size, seed=seed)
                ]
                if len(reached) == 4 and min(reached)[0] < float("inf"):  # all learning rates were tried
                    best.append(min(reached))
            mean = sum(steps for steps, _ in best) / len(best) if best else 0.0
            first = first or mean
            rates = "/".join(f"{1e3 * rate:g}" for rate in sorted({rate for _, rate in best}))
            cells.append(f"{mean:.0f} ({first / mean:.1f} ×; {rates})" if best else "–")
        if any(cell != "–" for cell in cells):
            rows.append([method, *cells])
    table(["method", "1 worker", *(f"{size} workers" for size in sizes[1:])], rows)


def steps_to_target(line: Line) -> float:
    """Returns the first of two successive evaluations at the target."""
    means = [(int(step), value) for step, value in line["means"].items()]
    for (step, value), (_, after) in itertools.pairwise(means):
        if min(value, after) >= line["target"]:
            return step
    return float("inf")


def lost(lines: list[Line]) -> None:
    rows = []
    for method in METHODS:
        alone = select(lines, method=method, slow=1, lost=None)
        slow, gone = select(lines, method=method, slow=4), select(lines, method=method, lost=1.0)
        if alone and slow and gone:
            base, slow_line, line = alone[0], slow[0], gone[0]
            steps = base["steps"]
            what = (
                f"{line['stopped_workers']} others stop {line['stopped'] - line['lost']:.1f} s later"
                if "stopped" in line
                else f"the others go on: {last(line):.1f} %"
            )
            rows.append([
                method,
                f"{1e3 * base['end'][1] / steps:.0f}, {100 * base['waited'][1] / base['end'][1]:.0f} %",
                f"{1e3 * slow_line['end'][0] / steps:.0f}, {100 * slow_line['waited'][2] / slow_line['end'][1]:.0f} %",
                f"{1e3 * slow_line['end'][2] / steps:.0f}",
                f"{last(base):.1f} → {last(slow_line):.1f}",
                what,
            ])  # fmt: skip
    table(
        ["method", "ms a step, waiting", "with one 4 × slower: the fastest", "the slowest", "accuracy, %", "one lost"],
        rows,
    )


def seconds(lines: list[Line]) -> None:
    rows = []
    for rate, method in itertools.product((1, 10), METHODS):
        cells = []
        for size in (16, 64, 256):
            found = select(lines, method=method, workers=size, gbit=rate)
            cells.append(f"{found[0]['step_seconds']:.2f}" if found else "")
        if any(cells):
            known = select(lines, method=method, gbit=rate)[-1]["metrics"]
            rows.append([f"{rate} Gbit/s", method, *cells, f"{known['period']:.3g}, {known['bits']:.3g}"])
    table(["link", "method", "16 workers", "64 workers", "256 workers", "period, bits"], rows)


def select(lines: list[Line], **wanted: object) -> list[Line]:
    return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]


def main() -> None:
    lines = [json.loads(text) for text in RECORD.read_text().splitlines()]
    for name, write in (("gossip", gossip), ("many", many), ("speedup", speedup), ("lost", lost), ("seconds", seconds)):
        print(f"{name} (simulated)\n")
        write(select(lines, claim=name))


if __name__ == "__main__":
    main()
