"""The figures of A2CiD2.

    python benchmarks/a2cid2.py ring                         gossip alone on a simulated ring of 64: no processes
    python benchmarks/a2cid2.py driven                       the same with random own steps, on rings of 8, 16 and 64
    python benchmarks/a2cid2.py waiting [--steps 120]        seconds a step and waiting at 100 Mbit/s, against DDP
    python benchmarks/a2cid2.py momentum [--steps 200]       consensus distance and accuracy on a ring of 8
    python benchmarks/a2cid2.py straggler [--steps 40]       one of four workers 4 times slower, against DDP
    python benchmarks/a2cid2.py processor [--steps 150]      processor time of the background
    python benchmarks/a2cid2.py all --steps 6 --seeds 1      everything at a tiny scale

Time to an accuracy is a comparison: `laconic compare --methods a2cid2,ddp,powersgd --task fashion --workers 4
--link 100mbit --target-accuracy 0.85 --seeds 3 --out runs/a2cid2`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic import topology
from laconic.bench.run import Plan, run
from laconic.bench.strategies import Contender, Reading, Session, parse_contender
from laconic.comm.wire import Connector, WireError
from laconic.tasks import Task
from laconic.tasks.fashion import Fashion


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


def gossip_with_steps(
    graph: topology.Topology, momentum: bool, rate: float, memory: float, steps: int, rng: np.random.Generator
) -> float:
    """Mean ‖x − x̄‖² per coordinate when workers make random own steps: v = memory · v + noise, x += v. With memory 1
    each worker always goes its own way, as with unlike data."""
    constants = graph.constants(rate)
    eta, alpha_tilde = (constants.eta, constants.alpha_tilde) if momentum else (0.0, 0.5)
    c = 0.5 * (1 - math.exp(-2 * eta))
    position, velocity, delta = np.zeros((3, graph.size, 40))
    fixed, found = rng.normal(size=velocity.shape), []
    for step in range(steps):
        velocity = fixed if memory == 1 else memory * velocity + rng.normal(size=velocity.shape)
        position += velocity + c * delta
        delta *= 1 - 2 * c
        for edge in rng.integers(len(graph.edges), size=rng.poisson(rate * graph.size / 2)):
            i, j = graph.edges[edge]
            gap = position[i] - position[j]
            position[i] -= gap / 2
            position[j] += gap / 2
            delta[i] -= (alpha_tilde - 0.5) * gap
            delta[j] += (alpha_tilde - 0.5) * gap
        if step >= steps // 2:
            found.append(spread(position) / position.size)
    return float(np.mean(found))


def spread(x: np.ndarray) -> float:
    return float(((x - x.mean(axis=0)) ** 2).sum())


def ring(seeds: range, **_: Any) -> None:
    graph = topology.ring(64)
    constants = graph.constants(1.0)
    root = math.sqrt(constants.chi_1 * constants.chi_2)
    print("| time, in √(χ1χ2) | seed | Σ‖x − x̄‖² with momentum | without | ratio | of distances | drift of the mean |")
    print("|---|---|---|---|---|---|---|")
    for units in (6, 12, 18, 24):
        for seed in seeds:
            fast, drift = gossip_alone(graph, True, units * root, np.random.default_rng(seed))
            plain, _ = gossip_alone(graph, False, units * root, np.random.default_rng(seed))
            ratio = plain / fast
            print(
                f"| {units} | {seed} | {fast:.2e} | {plain:.2e} | {ratio:.0f} | {math.sqrt(ratio):.1f} | {drift:.0e} |"
            )


def driven(seeds: range, **_: Any) -> None:
    print("| ring of | own steps | seed | distance with momentum ÷ without | ÷ without, rate 2 |")
    print("|---|---|---|---|---|")
    for size in (8, 16, 64):
        for memory, name in ((0.0, "independent"), (0.9, "momentum 0.9"), (1.0, "always the same")):
            for seed in seeds:
                fast, plain, twice = (
                    gossip_with_steps(topology.ring(size), accelerated, rate, memory, 3000, np.random.default_rng(seed))
                    for accelerated, rate in ((True, 1.0), (False, 1.0), (False, 2.0))
                )
                ratios = f"{math.sqrt(fast / plain):.2f} | {math.sqrt(fast / twice):.2f}"
                print(f"| {size} | {name} | {seed} | {ratios} |", flush=True)


class Traffic:
    """Workers that do not train together, while plain sockets carry as many bytes as the link takes beside them: what
    the network itself costs on a machine where the same cores compute, emulate the network and run its TCP."""

    is_baseline, averages = True, True

    def settings(self) -> dict[str, Any]:
        return {}

    @contextmanager
    def join(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        store = dist.PrefixStore("traffic", dist.distributed_c10d._get_default_store().clone())
        wire = Connector(store, rank, timeout=60).connect(rank ^ 1)
        sent = torch.zeros(sum(p.numel() for p in model.parameters()))
        received = torch.empty_like(sent)

        def carry() -> None:
            with contextlib.suppress(WireError, OSError):  # whoever is done first closes
                while not done.is_set():
                    wire.sendrecv(sent, received)

        done, thread = threading.Event(), threading.Thread(target=carry, daemon=True)
        thread.start()
        yield Session(model, optimizer, lambda: Reading({}, None, None, {}))
        done.set()
        thread.join()
        wire.close()


WAITING = {
    "none": parse_contender("none"),
    "bare traffic": Contender("bare traffic", "traffic", Traffic()),
    "a2cid2": parse_contender("a2cid2"),
    "a2cid2, no momentum": parse_contender("a2cid2+momentum=false"),
    "ddp": parse_contender("ddp"),
}


def waiting(task: Task, steps: int, seeds: range, **_: Any) -> None:
    print("| at 100 Mbit/s | seed | ms a step | × none | × bare traffic | waiting, % | MB/s sent | steps an exchange |")
    print("|---|---|---|---|---|---|---|---|")
    for seed in seeds:
        took: dict[str, float] = {}
        for name, contender in WAITING.items():
            number = min(steps, 20) if name == "ddp" else steps
            record = run(contender, Plan(task, workers=4, steps=number, seed=seed, link="100mbit", evaluations=1))
            if record.step_time is None:
                raise RuntimeError(record.reason)
            step_time = record.step_time
            took[name] = step_time.total
            waited = "" if step_time.waiting is None else f"{100 * step_time.waiting / step_time.total:.2f}"
            rate = (record.nic_nbytes_per_step or 0) / step_time.total / 1e6
            made = record.points[-1].method_metrics.get("exchanges", 0)
            ratios = [
                f"{step_time.total / took[base]:.2f}" if base in took else "" for base in ("none", "bare traffic")
            ]
            print(
                f"| {name} | {seed} | {1e3 * step_time.total:.1f} | {' | '.join(ratios)} | {waited} | {rate:.1f} "
                f"| {f'{number / made:.1f}' if made else ''} |",
                flush=True,
            )


@dataclass
class Loop:
    """What a worker does: a plain loop."""

    task: Task
    steps: int
    seed: int
    least_seconds: float = 0.0  # that a step lasts: a pause fills up what computing leaves, as if on an accelerator
    slowness: float = 1.0  # rank 0's steps last so many times longer
    looks: int = 1  # at the consensus distance

    def __call__(self, wrap: Callable[..., Any]) -> dict[str, Any]:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.manual_seed(self.seed)
        model = self.task.build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        shard = self.task.load(rank, size, self.seed)
        least_seconds = self.least_seconds * (self.slowness if rank == 0 else 1)
        looks = {self.steps * (i + 1) // self.looks for i in range(self.looks)}
        told: dict[str, Any] = {"distances": []}
        with wrap(model, optimizer) as (module, worker):
            start, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
            for step in range(self.steps):
                begun = time.perf_counter()
                self.task.loss(module, shard.batch(step)).backward()  # type: ignore[no-untyped-call]
                time.sleep(max(0.0, least_seconds - (time.perf_counter() - begun)))
                optimizer.step()
                optimizer.zero_grad()
                if step + 1 == self.steps:
                    told["seconds"] = time.perf_counter() - start
                    told["training_cpu"] = time.thread_time() - thread
                    told["background_cpu"] = time.process_time() - process - told["training_cpu"]
                    told["exchanges"] = worker.method.metrics()["exchanges"] if worker else 0.0
                if worker is not None and step + 1 in looks:
                    with worker.consensus():
                        told["distances"].append(worker.consensus_distance)
                        if step + 1 == self.steps:
                            told |= self.task.evaluate(model)
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


def momentum(task: Task, steps: int, seeds: range, **_: Any) -> None:
    variants = {
        "momentum, rate 1": laconic.A2CiD2("ring", rate=1.0),
        "plain, rate 1": laconic.A2CiD2("ring", rate=1.0, momentum=False),
        "plain, rate 2": laconic.A2CiD2("ring", rate=2.0, momentum=False),
    }
    print(f"| ring of 8 | seed | √ mean ‖x − x̄‖² at five steps | geometric mean | {task.metric} | exchanges a step |")
    print("|---|---|---|---|---|---|")
    for seed in seeds:
        for name, method in variants.items():
            told = laconic.spawn(Loop(task, steps, seed, looks=min(5, steps)), 8, ByMethod(method))
            made = statistics.mean(worker["exchanges"] for worker in told) / steps
            distances = told[0]["distances"]
            mean = statistics.geometric_mean(distances)
            listed = " ".join(f"{distance:.3g}" for distance in distances)
            print(f"| {name} | {seed} | {listed} | {mean:.3g} | {told[0][task.metric]:.4f} | {made:.2f} |", flush=True)


def straggler(task: Task, steps: int, seeds: range, **_: Any) -> None:
    print("| way | seed | steps a second of the others: alike | with one 4 × slower | ratio |")
    print("|---|---|---|---|---|")
    for seed in seeds:
        for name, wrap in (("a2cid2", ByMethod(laconic.A2CiD2("ring", rate=1.0))), ("ddp", ByDDP())):
            rates = []
            for slowness in (1.0, 4.0):
                told = laconic.spawn(Loop(task, steps, seed, least_seconds=0.12, slowness=slowness), 4, wrap)
                rates.append(steps / statistics.median(worker["seconds"] for worker in told[1:]))
            print(f"| {name} | {seed} | {rates[0]:.2f} | {rates[1]:.2f} | {rates[1] / rates[0]:.3f} |", flush=True)


def swap_alone(numel: int) -> float:
    """In each of two workers: seconds of processor time that one swap takes, without any method around it."""
    dist.init_process_group("gloo")
    store = dist.PrefixStore("swap", dist.distributed_c10d._get_default_store().clone())
    wire = Connector(store, dist.get_rank(), timeout=60).connect(1 - dist.get_rank())
    sent, received = torch.zeros(2, numel)
    swaps = 40
    for swap in range(swaps + 5):
        if swap == 5:
            start = time.thread_time()
        wire.sendrecv(sent, received)
    return (time.thread_time() - start) / swaps


def processor(task: Task, steps: int, seeds: range, **_: Any) -> None:
    print(
        "| model | parameters | seed | exchanges a step | training, ms a step | background | share, % | bare swap, ms |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for model in ("mlp", "cnn"):
        task = dataclasses.replace(task, model=model)  # type: ignore[call-arg]
        parameters = sum(p.numel() for p in task.build_model().parameters())
        for seed in seeds:
            told = laconic.spawn(Loop(task, steps, seed), 4, ByMethod(laconic.A2CiD2("ring", rate=1.0)))
            training, background, made = (
                statistics.mean(worker[what] for worker in told) / steps
                for what in ("training_cpu", "background_cpu", "exchanges")
            )
            bare = statistics.mean(laconic.spawn(swap_alone, 2, parameters))
            print(
                f"| {model} | {parameters:,} | {seed} | {made:.2f} | {1e3 * training:.1f} | {1e3 * background:.2f} "
                f"| {100 * background / training:.1f} | {1e3 * bare:.2f} |",
                flush=True,
            )


FIGURES: dict[str, Callable[..., None]] = {
    figure.__name__: figure for figure in (ring, driven, waiting, momentum, straggler, processor)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=[*FIGURES, "all"])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="only this one")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds) if arguments.seed is None else range(arguments.seed, arguments.seed + 1)
    for name in FIGURES if arguments.figure == "all" else [arguments.figure]:
        print(f"\n## {name}\n")
        FIGURES[name](task=Fashion(), steps=arguments.steps, seeds=seeds)


if __name__ == "__main__":
    main()
