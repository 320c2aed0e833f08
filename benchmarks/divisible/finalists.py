"""Trains the panel's tasks on real processes with the library itself, beside full communication and never talking.

    LACONIC_DATA=… python benchmarks/divisible/finalists.py --task gpt --workers 3 --steps 240 --link 50mbit   (as root)
    LACONIC_DATA=… python benchmarks/divisible/finalists.py --task gpt --workers 2 --steps 100 --seeds 3
    LACONIC_DATA=… python benchmarks/divisible/finalists.py --task translate --steps 500 --contenders allreduce …

Prints, per contender, the metric at the end, its gap to full communication (`allreduce`) and its worst gap to workers
that never talk (`none_averaged`) at any of 10 evaluations from step 40 on, all as means over seeds: percent of a loss,
or points of accuracy or BLEU. Below 0 is better for a loss and worse for the others. `--out` keeps runs.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from laconic import tasks
from laconic.bench.record import Record, RunsFile
from laconic.bench.run import Plan, run
from laconic.bench.strategies import parse_contender

FIRST_STEP = 40  # before it, the mean of models that have hardly moved is as good as any
GPT = {"batch_size": 8, "accumulate": 2, "clip": 1.0, "decay_matrices_only": True, "weight_decay": 0.1, "lr": 2e-3}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("shakespeare", GPT | {"betas": (0.9, 0.95)}),
    "gpt999": ("shakespeare", GPT | {"betas": (0.9, 0.999)}),
    "fashion": ("fashion", {}),
    "cifar10": ("cifar10", {"subset": True, "model": "resnet8", "optimizer": "adam", "weight_decay": 0.0, "lr": 4e-3}),
    "translate": ("translate", {}),
}
DEFAULTS = ["allreduce", "none_averaged", "none", "divisible", "divisible+period=4+background=uniform:4"]


def gap(value: float, other: float, metric: str) -> float:
    """Returns the gap in percent of a loss, in points of accuracy, or in BLEU."""
    return {"loss": 100 * (value / other - 1), "accuracy": 100 * (value - other)}.get(metric, value - other)


def table(records: dict[str, list[Record]], metric: str) -> None:
    ends = {name: [record.points[-1].values[metric] for record in runs] for name, runs in records.items()}
    full = ends.get("allreduce")
    print(f"| contender | {metric} of each seed | to full | worst to never | ms per step | kB per step |")
    print("|---" * 6 + "|")
    for name, runs in records.items():
        to_full = (
            f"{statistics.fmean(gap(*pair, metric) for pair in zip(ends[name], full, strict=True)):+.2f}"
            if full
            else ""
        )
        worst = ""
        if "none_averaged" in records and name != "none_averaged":
            gaps = [
                statistics.fmean(gap(p.values[metric], q.values[metric], metric) for p, q in pairs)
                for pairs in zip(
                    *(
                        zip(a.points, b.points, strict=True)
                        for a, b in zip(runs, records["none_averaged"], strict=True)
                    ),
                    strict=True,
                )
                if pairs[0][0].step >= FIRST_STEP
            ]
            worst = f"{(max if metric == 'loss' else min)(gaps):+.2f}"
        each = " ".join(f"{value:.4g}" for value in ends[name])
        ms = statistics.fmean(1e3 * run.step_time.total for run in runs if run.step_time)
        kb = statistics.fmean(sum(run.payload_nbytes_per_step.values()) / 1e3 for run in runs)
        print(f"| {name} | {each} | {to_full} | {worst} | {ms:.0f} | {kb:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="gpt")
    parser.add_argument("--partition", default="iid")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--link", default="none", help="of each emulated host, such as 50mbit; none: loopback")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--contenders", nargs="+", default=DEFAULTS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    name, settings = TASKS[options.task]
    rate = {} if options.lr is None else {"lr": options.lr}
    task = tasks.find_task(name)(**settings | rate | {"partition": options.partition})
    records: dict[str, list[Record]] = {name: [] for name in options.contenders}
    for seed in range(options.seed, options.seed + options.seeds):
        for contender, runs in records.items():
            plan = Plan(task, options.workers, options.steps, seed, link=options.link, evaluations=10)
            record = run(parse_contender(contender), plan)
            if record.status != "ok":
                raise RuntimeError(record.reason)
            if options.out is not None:
                options.out.mkdir(parents=True, exist_ok=True)
                RunsFile(options.out).append(record)
            runs.append(record)
    table(records, task.metric)


if __name__ == "__main__":
    main()
