"""The figures of ADPSGD: its overhead, comparisons with a constant period and with quantization, and its speed-ups.

python benchmarks/adpsgd/adpsgd.py overhead
python benchmarks/adpsgd/adpsgd.py training --task fashion --out runs/adpsgd-fashion
python benchmarks/adpsgd/adpsgd.py speed --workers 2 --batch-size 128 --steps 400 --out runs/adpsgd-speed   (as root)
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

import laconic
from laconic.bench.compare import rate_for
from laconic.bench.record import Record, RunsFile
from laconic.bench.run import Plan, run
from laconic.bench.strategies import parse_contender
from laconic.comm import Solo
from laconic.tasks import Task
from laconic.tasks.cifar10 import Cifar10
from laconic.tasks.digits import Digits
from laconic.tasks.fashion import Fashion

# At 6, with the rate divided by 10 after half of the steps, about as many rounds as a constant period of 8 in total.
ADPSGD = "adpsgd+initial_period=6+total_steps={}"
# The paper's settings as ρ (sending time over computing time): 10 Gbit/s, then 100 Gbit/s; and its speed-ups.
GOALS = {0.56: 1.46, 1.26: 1.95, 0.16: 1.14, 0.32: 1.27}


class Quiet(Solo):
    """Two workers without a network: what remains of a round is the method's overhead."""

    size = 2

    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return x


@dataclass
class QuietReplica:
    x_and_scalar: Tensor
    comm: Quiet
    step: int = 1000
    lr: float = 0.1

    @property
    def x(self) -> Tensor:
        return self.x_and_scalar[:-1]

    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return x

    def gather_slices(self, values: Sequence[float]) -> list[Sequence[float]]:
        return [values]


def overhead(d: int, repetitions: int) -> dict[str, list[float]]:
    """Measures CPU seconds of this thread for a copy of the vector and for a round of ADPSGD without its all-reduce,
    in turns."""
    replica = QuietReplica(torch.randn(d + 1), Quiet())
    method = laconic.ADPSGD(initial_period=1, max_period=1, calibration=1)
    method.setup(replica)  # type: ignore[arg-type]
    source, target = torch.randn(d), torch.empty(d)
    work: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "round": lambda: method.after_step(replica),  # type: ignore[arg-type]
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for repetition in range(repetitions + 3):
        for name, act in work.items():
            start = time.thread_time()
            act()
            if repetition >= 3:
                seconds[name].append(time.thread_time() - start)
    return seconds


def print_overhead(repetitions: int) -> None:
    torch.set_num_threads(1)
    print("| entries | copy, ms | round, ms | ratio of medians | median of ratios | ratio of minima |")
    print("|---|---|---|---|---|---|")
    for d in (1_000_000, 1_860_000, 16_700_000):
        seconds = overhead(d, repetitions if d > 10_000_000 else 5 * repetitions)
        copy, round_ = (statistics.median(seconds[name]) for name in ("copy", "round"))
        in_turn = statistics.median(b / a for a, b in zip(seconds["copy"], seconds["round"], strict=True))
        least = min(seconds["round"]) / min(seconds["copy"])
        print(
            f"| {d:,} | {copy * 1e3:.2f} | {round_ * 1e3:.2f} | {round_ / copy:.2f} | {in_turn:.2f} | {least:.2f} |",
            flush=True,
        )


class StepDecays:
    """The learning rate divided by 10 after half and after three quarters of the steps, without a warm-up."""

    def build_schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        return MultiStepLR(optimizer, [steps // 2, steps * 3 // 4], gamma=0.1)


class SteppedDigits(StepDecays, Digits):
    pass


class SteppedFashion(StepDecays, Fashion):
    pass


class SteppedCifar10(StepDecays, Cifar10):
    pass


def stepped_task(name: str) -> Task:
    match name:
        case "digits":
            return SteppedDigits(optimizer="sgd", lr=0.05)
        case "fashion":
            return SteppedFashion(optimizer="sgd", lr=0.05)
        case "cifar10":
            return SteppedCifar10(model="resnet8", subset=True, lr=0.1)
    raise ValueError(f"task must be digits, fashion or cifar10, not {name!r}")


def run_all(names: list[str], plan: Plan, seeds: range, out: Path) -> list[Record]:
    out.mkdir(parents=True, exist_ok=True)
    file, records = RunsFile(out), []
    for seed in seeds:
        for name in names:
            record = run(parse_contender(name), dataclasses.replace(plan, seed=seed))
            file.append(record)
            records.append(record)
    return records


def summary(record: Record) -> dict[str, float]:
    last = record.points[-1]
    figures = {
        record.metric: last.values[record.metric],
        # of the last quarter of the evaluated steps: the mean over workers of the loss of their batches
        "train_loss": statistics.fmean(loss for _, loss in record.train_loss[-(len(record.train_loss) // 4) :]),
        "MB": last.payload_nbytes / 1e6,
        "seconds": record.seconds,
    }
    if "rounds" in last.method_metrics:
        figures["rounds"] = last.method_metrics["rounds"]
        figures["variance, mean over steps"] = statistics.fmean(
            point.method_metrics["variance"] for point in record.points
        )
        figures["variance, mean over rounds"] = last.method_metrics["mean_variance"]
    return figures


def print_means(records: list[Record]) -> None:
    """Prints a line per method: means over seeds, with the least and the greatest."""
    columns = list(dict.fromkeys(name for record in records for name in summary(record)))
    print("| method |" + "".join(f" {name} |" for name in columns))
    print("|---|" + "---|" * len(columns))
    for way in dict.fromkeys(record.name for record in records):
        runs = [summary(record) for record in records if record.name == way]
        cells = []
        for name in columns:
            values = [figures[name] for figures in runs if name in figures]
            cells.append(f"{statistics.fmean(values):.4g} ({min(values):.4g} – {max(values):.4g})" if values else "")
        print(f"| {way} | " + " | ".join(cells) + " |")


def training(task: Task, workers: int, steps: int, seeds: range, out: Path) -> list[Record]:
    """Compares an adaptive period with constant ones, and with quantized gradients."""
    adaptive = ADPSGD.format(steps)
    names = [adaptive, "local_sgd+period=8", "local_sgd+period=4", "allreduce", "qsgd"]
    names += [f"{adaptive}+compressor=uniform:4", f"adpsgd+initial_period=1+total_steps={steps}+compressor=uniform:4"]
    records = run_all(names, Plan(task, workers, steps, evaluations=20), seeds, out)
    print_means(records)
    return records


def speed(task: Task, workers: int, steps: int, seeds: range, rhos: list[float], out: Path) -> list[Record]:
    """Measures the seconds of whole runs over links slow enough for each ρ."""
    names = [ADPSGD.format(steps), "allreduce", "ddp"]
    records: list[Record] = []
    print("| ρ | seed | link | adpsgd, s | allreduce, s | ddp, s | × allreduce | target | × ddp | mean period |")
    print("|" + "---|" * 10)
    for seed, rho in itertools.product(seeds, rhos):
        plan = Plan(task, workers, steps, seed, evaluations=2, rho=rho)
        plan = dataclasses.replace(plan, link=rate_for(rho, plan))
        runs = run_all(names, plan, range(seed, seed + 1), out)
        seconds = [record.seconds for record in runs]
        period = steps / runs[0].points[-1].method_metrics["rounds"]
        print(
            f"| {rho} | {seed} | {plan.link} | " + " | ".join(f"{value:.1f}" for value in seconds) + " | "
            f"{seconds[1] / seconds[0]:.2f} | {GOALS[rho]} | {seconds[2] / seconds[0]:.2f} | {period:.1f} |",
            flush=True,
        )
        records += runs
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["overhead", "training", "speed"])
    parser.add_argument("--task", choices=["digits", "fashion", "cifar10"], default="fashion")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rhos", type=float, nargs="+", choices=GOALS, default=list(GOALS))
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/adpsgd"))
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.seeds)
    task = dataclasses.replace(stepped_task(given.task), batch_size=given.batch_size)
    match given.figure:
        case "overhead":
            print_overhead(given.repetitions)
        case "training":
            training(task, given.workers, given.steps, seeds, given.out)
        case "speed":
            speed(task, given.workers, given.steps, seeds, given.rhos, given.out)


if __name__ == "__main__":
    main()
