"""The figures of A2CiD2.

    python benchmarks/a2cid2.py ring                         gossip alone on a simulated ring of 64: no processes
    python benchmarks/a2cid2.py waiting [--task fashion]     seconds a step and waiting at 100 Mbit/s, against DDP
    python benchmarks/a2cid2.py momentum [--task fashion]    consensus distance and accuracy on a ring of 8
    python benchmarks/a2cid2.py straggler [--task fashion]   one of four workers 4 times slower, against DDP
    python benchmarks/a2cid2.py processor [--task fashion]   processor time of the background
    python benchmarks/a2cid2.py all --task digits --steps 6 --seeds 1      everything at a tiny scale

Time to an accuracy is a comparison: `laconic compare --methods a2cid2,ddp,powersgd --task fashion --workers 4
--link 100mbit --target-accuracy 0.85 --seeds 3 --out runs/a2cid2`.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import laconic
from laconic import topology
from laconic.bench.run import Plan, run
from laconic.bench.ways import ask
from laconic.tasks import Task, find_task


def gossip_alone(
    graph: topology.Topology, momentum: bool, units: float, rng: np.random.Generator
) -> tuple[float, float]:
    """Σ‖x − x̄‖² at the end over that at the start, and the drift of the mean. The paper's formulas as they are."""
    constants = graph.constants(1.0)
    eta, alpha_tilde = (constants.eta, constants.alpha_tilde) if momentum else (0.0, 0.5)
    x = rng.normal(size=(graph.size, 40))
    x_tilde, mixed_until = x.copy(), np.zeros(graph.size)
    mean, start = x.mean(axis=0), spread(x)

    def mix(i: int, now: float) -> None:
        c = 0.5 * (1 - math.exp(-2 * eta * (now - mixed_until[i])))
        difference = x_tilde[i] - x[i]
        x[i] += c * difference
        x_tilde[i] -= c * difference
        mixed_until[i] = now

    exchanges = rng.poisson(units * graph.size / 2)  # rate 1: each worker is in one exchange a unit of time
    for now in np.sort(rng.uniform(0, units, exchanges)):
        i, j = graph.edges[rng.integers(len(graph.edges))]
        mix(i, now)
        mix(j, now)
        gap = x[i] - x[j]
        x[i] -= gap / 2
        x[j] += gap / 2
        x_tilde[i] -= alpha_tilde * gap
        x_tilde[j] += alpha_tilde * gap
    for i in graph.nodes:
        mix(i, units)
    return spread(x) / start, float(np.abs(x.mean(axis=0) - mean).max())


def spread(x: np.ndarray) -> float:
    return float(((x - x.mean(axis=0)) ** 2).sum())


def ring(seeds: int, **_: Any) -> None:
    graph = topology.ring(64)
    constants = graph.constants(1.0)
    root = math.sqrt(constants.chi_1 * constants.chi_2)
    print("| time, in √(χ1χ2) | seed | Σ‖x − x̄‖² with momentum | without | ratio | of distances | drift of the mean |")
    print("|---|---|---|---|---|---|---|")
    for units in (6, 12, 18, 24):
        for seed in range(seeds):
            fast, drift = gossip_alone(graph, True, units * root, np.random.default_rng(seed))
            plain, _ = gossip_alone(graph, False, units * root, np.random.default_rng(seed))
            ratio = plain / fast
            print(
                f"| {units} | {seed} | {fast:.2e} | {plain:.2e} | {ratio:.0f} | {math.sqrt(ratio):.1f} | {drift:.0e} |"
            )


def waiting(task: Task, steps: int, seeds: int, **_: Any) -> None:
    print("| way | seed | ms a step | × the floor | waiting, % | exchanges a step |")
    print("|---|---|---|---|---|---|")
    for seed in range(seeds):
        floor = 0.0
        for name, link in (("none", "none"), ("a2cid2", "100mbit"), ("ddp", "100mbit")):
            record = run(ask(name), Plan(task, workers=4, steps=steps, seed=seed, link=link, evaluations=1))
            if record.split is None:
                raise RuntimeError(record.reason)
            split = record.split
            floor = floor or split.step
            waited = "" if split.waiting is None else f"{100 * split.waiting / split.step:.1f}"
            made = record.points[-1].method.get("exchanges", 0) / steps
            print(f"| {name} | {seed} | {1e3 * split.step:.1f} | {split.step / floor:.2f} | {waited} | {made:.3f} |")


def train(task: Task, steps: int, seed: int, wrap: Callable[..., Any], pause: float = 0.0) -> dict[str, float]:
    """In a worker: a plain loop. Rank 0 computes for `pause` seconds more in each step."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(seed)
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shard = task.load(rank, size, seed)
    told: dict[str, float] = {}
    with wrap(model, optimizer) as (module, worker):
        start, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        for step in range(steps):
            time.sleep(pause if rank == 0 else 0.0)
            task.loss(module, shard.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        told["seconds"] = time.perf_counter() - start
        told["training_cpu"] = time.thread_time() - thread
        told["background_cpu"] = time.process_time() - process - told["training_cpu"]
        if worker is not None:
            told["exchanges"] = worker.method.metrics()["exchanges"]
            with worker.consensus():
                told["distance"] = worker.consensus_distance
                told |= task.evaluate(model)
    return told


class ByMethod:
    def __init__(self, method: laconic.Method) -> None:
        self.method = method

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> ByMethod:
        self.worker = laconic.Worker(model, optimizer, self.method)
        return self

    def __enter__(self) -> tuple[nn.Module, laconic.Worker]:
        return self.worker.model, self.worker.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.worker.__exit__(*raised)


class ByDDP:
    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> ByDDP:
        torch.distributed.init_process_group("gloo")
        self.module = nn.parallel.DistributedDataParallel(model)
        return self

    def __enter__(self) -> tuple[nn.Module, None]:
        return self.module, None

    def __exit__(self, *raised: Any) -> None:
        torch.distributed.destroy_process_group()


def momentum(task: Task, steps: int, seeds: int, **_: Any) -> None:
    variants = {
        "momentum, rate 1": laconic.A2CiD2("ring", rate=1.0),
        "plain, rate 1": laconic.A2CiD2("ring", rate=1.0, momentum=False),
        "plain, rate 2": laconic.A2CiD2("ring", rate=2.0, momentum=False),
    }
    print(f"| ring of 8 | seed | √ mean ‖x − x̄‖² | {task.metric} | exchanges a step |")
    print("|---|---|---|---|---|")
    for seed in range(seeds):
        for name, method in variants.items():
            told = laconic.spawn(train, 8, task, steps, seed, ByMethod(method))
            made = statistics.mean(worker["exchanges"] for worker in told) / steps
            print(f"| {name} | {seed} | {told[0]['distance']:.4g} | {told[0][task.metric]:.4f} | {made:.2f} |")


def straggler(task: Task, steps: int, seeds: int, **_: Any) -> None:
    print("| way | seed | steps a second of the others: alike | with one 4 × slower | ratio |")
    print("|---|---|---|---|---|")
    for seed in range(seeds):
        for name, wrap in (("a2cid2", ByMethod(laconic.A2CiD2("ring", rate=1.0))), ("ddp", ByDDP())):
            alike = laconic.spawn(train, 4, task, steps, seed, wrap)
            step = statistics.median(worker["seconds"] for worker in alike) / steps
            slowed = laconic.spawn(train, 4, task, steps, seed, wrap, 3 * step)
            rates = [steps / statistics.median(w["seconds"] for w in told[1:]) for told in (alike, slowed)]
            print(f"| {name} | {seed} | {rates[0]:.1f} | {rates[1]:.1f} | {rates[1] / rates[0]:.3f} |")


def processor(task: Task, steps: int, seeds: int, **_: Any) -> None:
    print("| rate | seed | exchanges a step | background / training, % of processor time |")
    print("|---|---|---|---|")
    for seed in range(seeds):
        told = laconic.spawn(train, 4, task, steps, seed, ByMethod(laconic.A2CiD2("ring", rate=1.0)))
        share = 100 * statistics.mean(worker["background_cpu"] / worker["training_cpu"] for worker in told)
        made = statistics.mean(worker["exchanges"] for worker in told) / steps
        print(f"| 1 | {seed} | {made:.2f} | {share:.1f} |")


FIGURES: dict[str, Callable[..., None]] = {
    figure.__name__: figure for figure in (ring, waiting, momentum, straggler, processor)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=[*FIGURES, "all"])
    parser.add_argument("--task", default="fashion")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    task = find_task(arguments.task)()
    for name in FIGURES if arguments.figure == "all" else [arguments.figure]:
        print(f"\n## {name}\n")
        FIGURES[name](task=task, steps=arguments.steps, seeds=arguments.seeds)


if __name__ == "__main__":
    main()
