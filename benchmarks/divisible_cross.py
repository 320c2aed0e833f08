"""Divisible's settings, each with each: ratio × period × bits of the background × moments, on alike and unlike data.

    LACONIC_DATA=… python benchmarks/divisible_cross.py --seeds 2
    LACONIC_DATA=… python benchmarks/divisible_cross.py --partitions classes:2 --periods 8 32 64 --ratios 1024 \
        --backgrounds uniform:4 --moments common local corrected

Real processes on loopback, the library as it is, on a model that is small enough for it: Fashion-MNIST, MLP of 235 k
parameters, four workers, batch 32, Adam with a cosine. A row for each moments and bits, a column for each period and
ratio; accuracy of the agreed model in percent, in the mean of the seeds. Full communication is in the first row.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import dataclass

from divisible import keep
from torch import nn

from laconic.bench.run import Plan, run
from laconic.bench.strategies import parse_contender
from laconic.tasks.fashion import Fashion
from laconic.tasks.vision import mlp

BITS = {"none": 32, "uniform:4": 4, "sign": 1}
MOMENTS = ("common", "local", "corrected", "averaged")


@dataclass(frozen=True)
class SmallFashion(Fashion):
    batch_size: int = 32

    def build_model(self) -> nn.Module:
        return mlp(784, 256, 128, 10)


def accuracy(way: str, task: SmallFashion, steps: int, seeds: int) -> str:
    """In percent."""
    records = [
        keep(run(parse_contender(way), Plan(task, 4, steps, seed, evaluations=1)), None) for seed in range(seeds)
    ]
    return f"{100 * statistics.fmean(record.points[-1].values['accuracy'] for record in records):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--partitions", nargs="+", default=["iid", "classes:2"])
    parser.add_argument("--periods", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--ratios", nargs="+", type=int, default=[64, 1024])
    parser.add_argument("--backgrounds", nargs="+", choices=BITS, default=list(BITS))
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS)
    o = parser.parse_args()
    columns = list(itertools.product(o.periods, o.ratios))
    for partition in o.partitions:
        task = SmallFashion(partition=partition, lr=o.lr)
        print(f"\n| {partition} | bits | {' | '.join(f'H={period}, R={ratio}' for period, ratio in columns)} |")
        print("|---" * (2 + len(columns)) + "|")
        print(f"| full communication | 32 | {accuracy('allreduce', task, o.steps, o.seeds)} |", flush=True)
        for moments, background in itertools.product(o.moments, o.backgrounds):
            if moments == "averaged" and background != "none":
                continue  # refused: Adam's v does not survive coding
            print(f"| {moments} | {BITS[background]} |", end="", flush=True)
            for period, ratio in columns:
                way = f"divisible+ratio={ratio}+period={period}+moments={moments}+background={background}"
                print(f" {accuracy(way, task, o.steps, o.seeds)} |", end="", flush=True)
            print()


if __name__ == "__main__":
    main()
