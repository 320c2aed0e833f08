"""Measures methods and baselines on links of one rate and several round-trip times.

    python benchmarks/comm/latency.py --rtt 0 10 50 100                  (links are emulated)
    python benchmarks/comm/latency.py --rate 10mbit --contenders none divisible --seeds 2
    python benchmarks/comm/latency.py --loopback --contenders allreduce powersgd     (accuracy only)

The task is `fashion`, with four workers. Milliseconds per step are the median of the intervals between two evaluations,
and are also given as multiples of `none`, which only computes, in the same setting. Methods whose result does not
depend on time are run for fewer steps on links; `--loopback` gives what they reach after all steps. `--out` keeps
runs.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from itertools import pairwise
from pathlib import Path

from laconic.bench.record import RunsFile
from laconic.bench.run import Plan, run
from laconic.bench.strategies import parse_contender
from laconic.tasks.fashion import Fashion

# Steps on links of contenders that do the same on every link; the others make all of them.
FEW_STEPS = {
    "allreduce": 12, "ddp": 12, "qsgd": 12, "powersgd": 20, "demo": 20, "efficient_adam": 20, "local_sgd": 81,
    "adpsgd": 81, "diloco": 81, "sparseloco": 81, "torchft_diloco": 81,
}  # fmt: skip
CONTENDERS = (
    "none", "divisible", "a2cid2", "diloco+period=8+fragments=4+delay=2+compressor=uniform:4",
    "local_sgd+compressor=uniform:4", "adpsgd", "efficient_adam", "qsgd", "allreduce",
    "torchft_diloco", "sparseloco", "powersgd", "demo", "ddp",
)  # fmt: skip
TARGET = 0.85


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtt", type=float, nargs="+", default=[0, 10, 50, 100], help="round-trip times in ms")
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--loopback", action="store_true", help="no link, all steps")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--evaluations", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    o = parser.parse_args()
    links = [o.rate if rtt == 0 else f"{o.rate}+{rtt / 2:g}ms" for rtt in o.rtt]
    print(
        "| link | contender | seed | steps | ms per step | × none | steps, s to 85 % | accuracy | delay, period, bits |"
    )
    print("|---" * 9 + "|")
    for link, seed in itertools.product(["none"] if o.loopback else links, range(o.seed, o.seed + o.seeds)):
        floor = None
        for name in o.contenders:
            steps = o.steps if o.loopback else FEW_STEPS.get(name.partition("+")[0], o.steps)
            evaluations = o.evaluations if steps == o.steps else min(4, steps)
            record = run(parse_contender(name), Plan(Fashion(), o.workers, steps, seed, link, evaluations=evaluations))
            if record.status != "ok":
                print(f"| {link} | {name} | {seed} | {record.status}: {record.reason.splitlines()[-1]} |", flush=True)
                continue
            if o.out is not None:
                o.out.mkdir(parents=True, exist_ok=True)
                RunsFile(o.out).append(record)
            end = record.points[-1]
            ms = statistics.median(
                1e3 * (b.seconds - a.seconds) / (b.step - a.step) for a, b in pairwise(record.points)
            )
            floor = ms if name == "none" else floor
            first = next((point for point in record.points if point.values["accuracy"] >= TARGET), None)
            reached = f"{first.step}, {first.seconds:.1f}" if first and steps == o.steps else "–"
            accuracy = f"{100 * end.values['accuracy']:.2f}" if steps == o.steps else "–"
            metrics = end.method_metrics
            chosen = ", ".join(f"{metrics[key]:g}" for key in ("delay", "period", "bits") if key in metrics)
            times = f"{ms:.1f} | {ms / floor:.2f}" if floor else f"{ms:.1f} | –"
            print(f"| {link} | {name} | {seed} | {steps} | {times} | {reached} | {accuracy} | {chosen} |", flush=True)


if __name__ == "__main__":
    main()
