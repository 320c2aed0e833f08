"""Measures what Divisible costs and gains: overhead, seconds per step on slow links, accuracy at equal steps.

    python benchmarks/divisible/figures.py overhead --d 25000000
    python benchmarks/divisible/figures.py small
    python benchmarks/divisible/figures.py speed --figure cifar10        (as root: links are emulated)
    python benchmarks/divisible/figures.py accuracy --task fashion --ratio 1024
    python benchmarks/divisible/figures.py accuracy --task fashion --partition classes:2 --corrected
    python benchmarks/divisible/figures.py accuracy --task cifar10 --steps 1000 --rates 4e-3 8e-3
    python benchmarks/divisible/figures.py accuracy --task translate --ratio 128 --steps 500 --rates 3e-3
    python benchmarks/divisible/figures.py slow                          (as root; 25 minutes with ddp)
    python benchmarks/divisible/figures.py slow --contenders none divisible powersgd

`speed` takes the paper's four pairs of ρ and ratio (`--figure`, or all). `slow` compares methods and baselines with
four workers on links of 100 Mbit/s, interleaved by seed, with `--fused` with torch's fused Adam. `--out` keeps
runs.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import laconic
from laconic import compress, tasks
from laconic.bench.compare import rate_for
from laconic.bench.record import Record, RunsFile
from laconic.bench.run import Plan, run
from laconic.bench.strategies import Contender, MethodStrategy, parse_contender
from laconic.comm import Pending, Solo
from laconic.comm.solo import Arrived
from laconic.tasks.fashion import Fashion

sys.path.append(str(Path(__file__).parents[1] / "efficient_adam"))
from step import FusedFashion

CACHES_NBYTES = 1 << 28  # larger than any cache


class Echo(Solo):
    """Simulates two identical workers on a network that costs nothing but the copies that any implementation makes."""

    size = 2
    members = property(lambda self: [0, 1])

    def channel(self, name: str = "background") -> Echo:
        return self

    def mean_async(self, x: Tensor, *, out: Tensor | None = None) -> Pending[Tensor]:
        return Arrived(x.clone())

    def all_to_all_async(
        self, chunks: Sequence[Tensor], *, lengths: Sequence[int] | None = None
    ) -> Pending[list[Tensor]]:
        return Arrived([chunks[0].clone()] * 2)

    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]:
        return Arrived([x.clone(), x])

    def meet(self, what: str, note: Any = None) -> list[Any]:
        return [note, note]


def overhead(d: int, method: laconic.Divisible) -> dict[str, Any]:
    """Returns the CPU time of the method in a step over that of a copy of the vector (one thread, medians).

    "cold" empties the caches before each step and each copy, as computing does in training; "warm" does not.
    """
    torch.set_num_threads(1)
    model = torch.nn.Linear(d, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    model.weight.grad = torch.ones_like(model.weight)
    elsewhere = torch.zeros(CACHES_NBYTES // 4)
    with laconic.Worker(model, optimizer, method, comm=Echo()) as worker, torch.no_grad():
        optimizer.step()  # creates the optimizer's state
        other = torch.empty_like(worker.x)
        sweep = method.period if isinstance(method.period, int) else 1

        def step() -> None:
            worker.step += 1
            worker.method.before_step(worker)
            worker.method.after_step(worker)

        for _ in range(2 * sweep):
            step()
        work: dict[str, Any] = {}
        for state in ("cold", "warm"):
            copies, steps = [], []
            for _ in range(9):  # interleaved: the machine's speed varies
                for jobs, job, times in ((copies, lambda: other.copy_(worker.x), 3), (steps, step, sweep)):
                    for _ in range(times):
                        if state == "cold":
                            elsewhere.add_(1)
                        jobs.append(cpu_seconds(job))
            copy = statistics.median(copies)
            # The mean over the pieces of a sweep, which may differ; the median over sweeps.
            sweeps = [statistics.fmean(steps[i : i + sweep]) for i in range(0, len(steps), sweep)]
            work |= {f"{state}_copy_ms": round(1e3 * copy, 3), state: round(statistics.median(sweeps) / copy, 2)}
    return work


SCALES = (1.0, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4)


def small(background: str, steps: int = 300) -> list[float]:
    """Returns how far coordinates move whose gradients are small compared with others in their block: the mean step in
    learning rates, by the scale of the gradient. Signal and noise are equally large."""

    def run() -> list[float]:
        torch.set_num_threads(1)
        d, lr = 1024 * len(SCALES), 1e-3
        scale = torch.tensor(SCALES).repeat(1024)[torch.randperm(d, generator=torch.Generator().manual_seed(0))]
        model = torch.nn.Linear(d, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        method: laconic.Method = laconic.AllReduce()
        if background != "allreduce":
            method = laconic.Divisible(1024, 4, None if background == "identity" else compress.parse(background))
        with laconic.Worker(model, optimizer, method) as worker:
            for step in range(steps):
                generator = torch.Generator().manual_seed(10 * step + worker.rank)
                model.weight.grad = (scale * (1 + torch.randn(d, generator=generator))).view(1, d)
                optimizer.step()
        return [round(-float(worker.x[scale == one].mean()) / (lr * steps), 2) for one in torch.tensor(SCALES)]

    moved: list[float] = laconic.spawn(run, 2)[0]
    return moved


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


@dataclasses.dataclass
class Barrier(laconic.Method):
    """Waits for the others in every step, and sends nothing else."""

    def after_step(self, worker: laconic.Replica) -> None:
        worker.comm.mean(torch.zeros(1))


def find_contender(name: str) -> Contender:
    return Contender(name, name, MethodStrategy(Barrier())) if name == "barrier" else parse_contender(name)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A pair of the paper, where sending the whole update takes `rho` times as long as computing a step."""

    task: tasks.Task
    rho: float
    divisible: str  # the contender
    goal: float  # speed-up over full communication without overlap: 90 % of the paper's


FIGURES = {
    "cifar10": Figure(tasks.find_task("fashion")(batch_size=512), 6.0, "divisible+ratio=1024", 6.3),
    "cifar10-non-iid": Figure(
        tasks.find_task("fashion")(batch_size=512, partition="classes:2"),
        5.7,
        "divisible+ratio=128+corrected=true",
        5.8,
    ),
    "imagenet": Figure(tasks.find_task("fashion")(batch_size=512), 2.6, "divisible+ratio=64", 3.2),
    "wmt16": Figure(tasks.find_task("translate")(batch_size=32), 6.4, "divisible+ratio=128", 6.3),
}
# Settings of tasks for `accuracy`, where they are not the defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "cifar10": {"model": "resnet8", "optimizer": "adam", "weight_decay": 0.0},
}
STEPS = {
    "none": 40,
    "barrier": 40,
    "divisible": 80,
    "allreduce": 16,
    "ddp": 16,
}  # "auto" measures in the first 20 or so


def speed(figure: Figure, workers: int, seed: int, out: Path | None) -> None:
    """Prints milliseconds per step of every contender, all on the same link rate."""
    plan = Plan(figure.task, workers, 1, seed, evaluations=4, rho=figure.rho)
    plan = dataclasses.replace(plan, link=rate_for(figure.rho, plan))
    contenders = {name: find_contender(figure.divisible if name == "divisible" else name) for name in STEPS}
    seconds, waiting = {}, {}
    records = {name: keep(run(contenders[name], dataclasses.replace(plan, steps=STEPS[name])), out) for name in STEPS}
    for name, record in records.items():
        begin, end = record.points[0], record.points[-1]
        seconds[name] = (end.seconds - begin.seconds) / (end.step - begin.step)
        assert record.step_time is not None
        waiting[name] = 100 * (record.step_time.waiting or 0.0) / record.step_time.total
    ms = " | ".join(f"{1e3 * seconds[name]:.1f}" for name in STEPS)
    gain = [f"{seconds[name] / seconds['divisible']:.2f}" for name in ("allreduce", "ddp")]
    period = records["divisible"].points[-1].method_metrics["period"]
    print(
        f"| {figure.rho} | {figure.divisible} | {seed} | {plan.link} | {ms} | {gain[0]} | {figure.goal} | {gain[1]} | "
        f"{waiting['barrier']:.1f} | {waiting['divisible']:.1f} | {period:.0f} |",
        flush=True,
    )


def slow(task: tasks.Task, contenders: Sequence[str], workers: int, steps: int, seeds: range, out: Path | None) -> None:
    """Prints milliseconds per step and seconds to 85 % on a slow network, with one average of models that differ."""
    print("| contender | seed | ms per step | steps to 85 % | seconds to 85 % | accuracy | period | bits |")
    print("|---|---|---|---|---|---|---|---|")
    for seed, name in itertools.product(seeds, contenders):
        plan = Plan(task, workers, steps, seed, evaluations=steps // 10, link="100mbit")
        record = keep(run(find_contender(name), plan), out)
        begin, end = record.points[0], record.points[-1]
        ms = 1e3 * (end.seconds - begin.seconds) / (end.step - begin.step)
        first = record.reached(0.85)
        reached = f"{first.step} | {first.seconds:.1f}" if first else "– | –"
        chosen = " | ".join(
            f"{end.method_metrics[key]:g}" if key in end.method_metrics else "–" for key in ("period", "bits")
        )
        print(f"| {name} | {seed} | {ms:.1f} | {reached} | {end.values['accuracy']:.4f} | {chosen} |", flush=True)


def accuracy(
    task: tasks.Task,
    contenders: Sequence[str],
    workers: int,
    steps: int,
    seeds: range,
    rates: list[float],
    rho: float | None,
    out: Path | None,
) -> None:
    """Prints the metric of the agreed model, on loopback or on links on which a full all-reduce takes `rho` steps."""
    link = "none" if rho is None else rate_for(rho, Plan(task, workers, 1, seeds[0], evaluations=1, rho=rho))
    print(f"| contender | learning rate | {task.metric} of each seed | mean |")
    print("|---|---|---|---|")
    for name, lr in itertools.product(contenders, rates):
        values = []
        for seed in seeds:
            plan = Plan(dataclasses.replace(task, lr=lr), workers, steps, seed, evaluations=1, link=link, rho=rho)
            values.append(keep(run(parse_contender(name), plan), out).points[-1].values[task.metric])
        each = " ".join(f"{value:.4f}" for value in values)
        print(f"| {name} | {lr:g} | {each} | {statistics.fmean(values):.4f} |", flush=True)


def keep(record: Record, out: Path | None) -> Record:
    if record.status != "ok":
        raise RuntimeError(record.reason)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        RunsFile(out).append(record)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "small", "speed", "slow", "accuracy"])
    parser.add_argument("--figure", choices=FIGURES, nargs="+", default=list(FIGURES))
    parser.add_argument("--task", default="fashion")
    parser.add_argument("--partition", default="iid")
    parser.add_argument("--subset", action="store_true", help="of cifar10, 8000 images to train with and 2000 to test")
    parser.add_argument("--corrected", action="store_true")
    parser.add_argument("--backgrounds", nargs="+", default=["uniform:4", "pick:7"])
    parser.add_argument("--workers", type=int)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ratio", type=int, default=1024)
    parser.add_argument("--period", type=int, nargs="+", default=[4])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3])
    parser.add_argument("--rho", type=float)
    parser.add_argument("--contenders", nargs="+")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--d", type=int, default=25_000_000)
    parser.add_argument("--out", type=Path)
    o = parser.parse_args()
    seeds = range(o.seed, o.seed + o.seeds)
    match o.what:
        case "overhead":
            print("| background | period | copy, ms | copies per step | copy in the cache, ms | copies per step |")
            print("|---|---|---|---|---|---|")
            for coder, period in itertools.product(o.backgrounds, o.period):
                background = None if coder == "identity" else compress.parse(coder)
                work = overhead(o.d, laconic.Divisible(o.ratio, period, background, o.corrected))
                figures = " | ".join(str(figure) for figure in work.values())
                print(f"| {coder} | {period} | {figures} |", flush=True)
        case "small":
            print(f"| background | {' | '.join(map(str, SCALES))} |")
            print("|---" * (1 + len(SCALES)) + "|")
            for background in ("allreduce", "identity", "uniform:8", "uniform:4", "uniform:3", "pick:4", "pick:7"):
                print(f"| {background} | {' | '.join(map(str, small(background)))} |", flush=True)
        case "speed":
            print(
                f"| ρ | contender | seed | link | {' | '.join(f'{name}, ms' for name in STEPS)} | × allreduce | goal | "
                f"× ddp | barrier waits, % | divisible waits, % | period |"
            )
            print("|" + "---|" * (10 + len(STEPS)))
            for seed, name in itertools.product(seeds, o.figure):
                speed(FIGURES[name], o.workers or 2, seed, o.out)
        case "slow":
            contenders = o.contenders or ["none", "divisible", "powersgd", "ddp"]
            slow(FusedFashion() if o.fused else Fashion(), contenders, o.workers or 4, o.steps, seeds, o.out)
        case "accuracy":
            settings = SETTINGS.get(o.task, {}) | ({"subset": True} if o.subset else {})
            task = tasks.find_task(o.task)(partition=o.partition, **settings)
            corrected = "+corrected=true" if o.corrected else ""
            divisible = [f"divisible+ratio={o.ratio}+period={period}{corrected}" for period in o.period]
            contenders = o.contenders or ["allreduce", *divisible]
            accuracy(task, contenders, o.workers or 4, o.steps, seeds, o.rates, o.rho, o.out)


if __name__ == "__main__":
    main()
