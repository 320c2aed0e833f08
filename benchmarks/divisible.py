"""What Divisible costs and buys: its own work, seconds a step on emulated links, accuracy at equal steps.

    python benchmarks/divisible.py own-work
    python benchmarks/divisible.py speed --rho 6.0 --ratio 1024 --workers 2
    python benchmarks/divisible.py slow --workers 4
    python benchmarks/divisible.py accuracy --partition classes:2 --ratio 128

Each line of output is one result in JSON; `--out` appends it to a file too.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic import compress, tasks
from laconic.comm import Pending, Solo
from laconic.comm.solo import Arrived
from laconic.emulate import Link, Network

WARMUP = 30  # steps that no timing counts: "auto" measures in them


class Echo(Solo):
    """Two workers that are alike, on a network without cost but the copies that any implementation makes."""

    size = 2

    def channel(self, name: str = "background") -> Echo:
        return self

    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return x.clone()

    def mean_async(self, x: Tensor) -> Pending[Tensor]:
        return Arrived(x.clone())

    def all_to_all_async(
        self, chunks: Sequence[Tensor], *, lengths: Sequence[int] | None = None
    ) -> Pending[list[Tensor]]:
        return Arrived([chunks[0].clone()] * 2)

    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]:
        return Arrived([x, x])


def own_work(d: int, method: laconic.Divisible) -> dict[str, Any]:
    """CPU seconds of the method in a step, over those of a copy of the vector (one thread, least of several)."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(d, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    model.weight.grad = torch.ones_like(model.weight)
    with laconic.Worker(model, optimizer, method, comm=Echo()) as worker, torch.no_grad():
        optimizer.step()  # the moments are there from here on
        other = torch.empty_like(worker.x)
        sweep = method.period if isinstance(method.period, int) else 1

        def steps() -> None:
            for _ in range(sweep):
                worker.step += 1
                worker.method.before_step(worker)
                worker.method.after_step(worker)

        steps()
        copies, works = [], []
        for _ in range(7):  # by turns: the machine's speed varies
            copies += [cpu_seconds(lambda: other.copy_(worker.x)) for _ in range(3)]
            works.append(cpu_seconds(steps) / sweep)
    return {"copy_ms": round(1e3 * min(copies), 3), "copies": round(min(works) / min(copies), 2)}


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


@dataclasses.dataclass
class Barrier(laconic.Method):
    """Waits for the others in each step and tells them nothing."""

    def after_step(self, worker: laconic.Replica) -> None:
        worker.comm.mean(torch.zeros(1))


def train(
    task: tasks.Task, method: laconic.Method | None, steps: int, seed: int, evaluate_every: int = 0
) -> dict[str, Any]:
    """In one worker: the user's loop. Without a method it is torch's DDP. Evaluating is not in the seconds."""
    torch.manual_seed(seed)
    model = task.build_model()
    if method is None:
        dist.init_process_group("gloo")
        wrapped: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = task.build_optimizer(model)
        durations, curve = loop(task, wrapped, optimizer, dist.get_rank(), dist.get_world_size(), steps, seed, 0, None)
        return {"durations": durations, "curve": curve, "final": task.evaluate(model)}
    optimizer = task.build_optimizer(model)
    with laconic.Worker(model, optimizer, method) as worker:
        durations, curve = loop(task, model, optimizer, worker.rank, worker.size, steps, seed, evaluate_every, worker)
        metrics = worker.method.metrics()
        nbytes = {name: worker.meter.total.nbytes(name) / steps for name in ("foreground", "background")}
    final = task.evaluate(model) if worker.rank == 0 else {}
    return {"durations": durations, "curve": curve, "final": final, "metrics": metrics, "nbytes_a_step": nbytes}


def loop(
    task: tasks.Task,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    size: int,
    steps: int,
    seed: int,
    evaluate_every: int,
    worker: laconic.Worker | None,
) -> tuple[list[float], list[tuple[int, float]]]:
    """Seconds of each step, and (step, metric) of the agreed model."""
    shard, schedule = task.load(rank, size, seed), task.build_schedule(optimizer, steps)
    durations, curve = [], []
    for step in range(steps):
        start = time.monotonic()
        task.loss(model, shard.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        durations.append(time.monotonic() - start)
        if worker is not None and evaluate_every and (step + 1) % evaluate_every == 0:
            with worker.consensus() as agreed:
                curve.append((step + 1, task.evaluate(agreed)[task.metric]))
    return durations, curve


def seconds_a_step(result: dict[str, Any]) -> float:
    return statistics.median(result["durations"][WARMUP:])


def speed(task: tasks.Task, rho: float, ratio: int, workers: int, steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """Seconds a step where sending the whole update takes `rho` times as long as computing a step."""
    alone = laconic.spawn(train, workers, task, laconic.LocalSGD(10**9), steps, seed)[0]
    floor = seconds_a_step(alone)
    d = sum(p.numel() for p in task.build_model().parameters() if p.requires_grad)
    link = Link(round(8 * 2 * (workers - 1) / workers * 4 * d / (rho * floor)))
    coded = laconic.Divisible(ratio, background=compress.parse("uniform:4"))
    methods: dict[str, laconic.Method | None] = {"allreduce": laconic.AllReduce(), "barrier": Barrier(), "ddp": None}
    methods |= {"divisible identity": laconic.Divisible(ratio, background=None), "divisible uniform:4": coded}
    yield {"method": "alone", "seconds": floor, "mbit": link.bits_per_second / 1e6}
    full = 0.0
    for name, method in methods.items():
        with Network([link] * workers) as network:
            result = laconic.spawn(train, workers, task, method, steps, seed, hosts=network.hosts)[0]
        seconds = seconds_a_step(result)
        full = full or seconds
        row = {"method": name, "seconds": seconds, "speed-up": round(full / seconds, 2), "rho": rho, "ratio": ratio}
        yield {**row, **result.get("metrics", {})}


def slow(task: tasks.Task, link: Link, workers: int, steps: int, seed: int, target: float) -> Iterator[dict[str, Any]]:
    """Seconds a step and to the target on one slow link. (DDP and PowerSGD: `laconic compare` has the peers.)"""
    for name in ("identity", "uniform:4", "sign"):
        coder = None if name == "identity" else compress.parse(name)
        with Network([link] * workers) as network:
            method = laconic.Divisible(1024, background=coder)
            result = laconic.spawn(train, workers, task, method, steps, seed, 25, hosts=network.hosts)[0]
        reached = next((step for step, value in result["curve"] if value >= target), None)
        seconds = sum(result["durations"][:reached]) if reached else None
        yield {"background": name, "seconds": seconds_a_step(result), "to target": seconds, **result["metrics"]}


def accuracy(
    task: tasks.Task, ratio: int, period: int, workers: int, steps: int, seeds: int, rates: list[float]
) -> Iterator[dict[str, Any]]:
    """The agreed model at equal steps on loopback: full communication, and Divisible with a period as on a link."""
    moments = "local" if task.partition == "iid" else "corrected"
    methods = {
        "allreduce": laconic.AllReduce(),
        "divisible identity": laconic.Divisible(ratio, period, moments, None),
        "divisible uniform:4": laconic.Divisible(ratio, period, moments, compress.parse("uniform:4")),
    }
    for (name, method), lr, seed in itertools.product(methods.items(), rates, range(seeds)):
        run = dataclasses.replace(task, lr=lr)
        result = laconic.spawn(train, workers, run, method, steps, seed)[0]
        yield {"method": name, "lr": lr, "seed": seed, "partition": task.partition, **result["final"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["own-work", "speed", "slow", "accuracy"])
    parser.add_argument("--task", default="fashion")
    parser.add_argument("--partition", default="iid")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rho", type=float, default=6.0)
    parser.add_argument("--ratio", type=int, default=1024)
    parser.add_argument("--period", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--target", type=float, default=0.85)
    parser.add_argument("--d", type=int, default=4_000_000)
    parser.add_argument("--out", type=Path)
    o = parser.parse_args()

    def show(rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            print(json.dumps(row), flush=True)
            if o.out:
                with open(o.out, "a") as file:
                    file.write(json.dumps({"what": o.what, **row}) + "\n")

    if o.what == "own-work":
        for coder, kind, period in itertools.product(
            ("identity", "uniform:4", "log:4", "sign"), ("local", "corrected"), (1, 2, 4, 8)
        ):
            background = None if coder == "identity" else compress.parse(coder)
            method = laconic.Divisible(o.ratio, period, kind, background)
            show([{"background": coder, "moments": kind, "period": period, **own_work(o.d, method)}])
        return
    task = tasks.find_task(o.task)(batch_size=o.batch_size, partition=o.partition)
    if o.what == "accuracy":
        show(accuracy(task, o.ratio, o.period, o.workers, o.steps, o.seeds, o.rates))
        return
    for seed in range(o.seeds):
        if o.what == "speed":
            show(speed(task, o.rho, o.ratio, o.workers, o.steps, seed))
        else:
            show(slow(task, Link(round(o.mbit * 1e6)), o.workers, o.steps, seed, o.target))


if __name__ == "__main__":
    main()
