"""Measures A2CiD2; the results are in a2cid2.md.

    python benchmarks/a2cid2/a2cid2.py FIGURE [--steps 120] [--seeds 3]

FIGURE is one of
    ring         gossip without local steps on a ring of 64, in one process
    driven       the same with random local steps, on rings of 8, 16 and 64
    shares       how often each edge of a ring of 4 is used at 100 and 10 Mbit/s (300 steps; as root)
    waiting      time per step and waiting at 100 Mbit/s, against DDP (as root)
    momentum     consensus distance and accuracy on a ring of 8
    straggler    one of four workers 4 times slower, against DDP
    processor    CPU time of the background
    all          everything; with --steps 6 --seeds 1 at a tiny scale

For time to accuracy use `laconic compare --methods a2cid2,ddp,powersgd --task fashion --workers 4
--link 100mbit --target accuracy=85 --seeds 3 --out runs/a2cid2`.
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
from laconic.comm.store import JobStore
from laconic.comm.wire import Connector, WireError
from laconic.emulate import hosts_behind
from laconic.tasks import Task
from laconic.tasks.fashion import Fashion


def job_store(prefix: str) -> JobStore:
    return JobStore(dist.distributed_c10d._get_default_store(), "the launcher", timeout=60.0).prefixed(prefix)


def gossip_without_steps(
    graph: topology.Topology, momentum: bool, units: float, rng: np.random.Generator
) -> tuple[float, float]:
    """Returns Σ‖x − x̄‖² at the end relative to the start, and the drift of the mean, by the paper's equations."""
    constants = graph.constants(1.0)
    eta, alpha_tilde = (constants.eta, constants.alpha_tilde) if momentum else (0.0, 0.5)
    x = rng.normal(size=(graph.size, 40))
    x_tilde, mixed_until = x.copy(), np.zeros(graph.size)
    mean, start = x.mean(axis=0), spread(x)

    def mix(i: int, now: float) -> None:
        c = 0.5 * (1 - math.exp(-2 * eta * (now - mixed_until[i])))
        delta = x_tilde[i] - x[i]
        x[i] += c * delta
        x_tilde[i] -= c * delta
        mixed_until[i] = now

    exchanges = rng.poisson(units * graph.size / 2)  # rate 1: one exchange per worker and unit of time
    for now in np.sort(rng.uniform(0, units, exchanges)):
        i, j = graph.edges[rng.integers(len(graph.edges))]
        mix(i, now)
        mix(j, now)
        difference = x[i] - x[j]
        x[i] -= difference / 2
        x[j] += difference / 2
        x_tilde[i] -= alpha_tilde * difference
        x_tilde[j] += alpha_tilde * difference
    for i in graph.nodes:
        mix(i, units)
    return spread(x) / start, float(np.abs(x.mean(axis=0) - mean).max())


def gossip_with_steps(
    graph: topology.Topology, momentum: bool, rate: float, memory: float, steps: int, rng: np.random.Generator
) -> float:
    """Returns the mean ‖x − x̄‖² per coordinate if workers make random local steps: v = memory · v + noise, x += v.

    With memory 1 each worker always moves in the same direction, as with non-iid data.
    """
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
            difference = position[i] - position[j]
            position[i] -= difference / 2
            position[j] += difference / 2
            delta[i] -= (alpha_tilde - 0.5) * difference
            delta[j] += (alpha_tilde - 0.5) * difference
        if step >= steps // 2:
            found.append(spread(position) / position.size)
    return float(np.mean(found))


def spread(x: np.ndarray) -> float:
    return float(((x - x.mean(axis=0)) ** 2).sum())


def ring(seeds: range, **_: Any) -> None:
    graph = topology.ring(64)
    constants = graph.constants(1.0)
    root = math.sqrt(constants.chi_1 * constants.chi_2)
    print("| time, in √(χ1χ2) | seed | Σ‖x − x̄‖² with momentum | without | ratio | its root | drift of mean |")
    print("|---|---|---|---|---|---|---|")
    for units in (6, 12, 18, 24):
        for seed in seeds:
            fast, drift = gossip_without_steps(graph, True, units * root, np.random.default_rng(seed))
            plain, _ = gossip_without_steps(graph, False, units * root, np.random.default_rng(seed))
            ratio = plain / fast
            print(
                f"| {units} | {seed} | {fast:.2e} | {plain:.2e} | {ratio:.0f} | {math.sqrt(ratio):.1f} | {drift:.0e} |"
            )


def driven(seeds: range, **_: Any) -> None:
    print("| ring of | local steps | seed | distance with momentum ÷ without | ÷ without, rate 2 |")
    print("|---|---|---|---|---|")
    for size in (8, 16, 64):
        for memory, name in ((0.0, "independent"), (0.9, "memory 0.9"), (1.0, "constant")):
            for seed in seeds:
                fast, plain, twice = (
                    gossip_with_steps(topology.ring(size), accelerated, rate, memory, 3000, np.random.default_rng(seed))
                    for accelerated, rate in ((True, 1.0), (False, 1.0), (False, 2.0))
                )
                ratios = f"{math.sqrt(fast / plain):.2f} | {math.sqrt(fast / twice):.2f}"
                print(f"| {size} | {name} | {seed} | {ratios} |", flush=True)


class Traffic:
    """Workers that train alone while plain sockets saturate the link in the background.

    This measures the cost of the traffic itself on a machine whose cores compute, emulate the network and run TCP.
    """

    is_baseline, averages = True, True

    def settings(self) -> dict[str, Any]:
        return {}

    @contextmanager
    def join(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        wire = Connector(job_store("traffic"), rank, timeout=60).connect(rank ^ 1)
        sent = torch.zeros(sum(p.numel() for p in model.parameters()))
        received = torch.empty_like(sent)

        def transfer() -> None:
            with contextlib.suppress(WireError, OSError):  # the worker that finishes first closes the connection
                while not done.is_set():
                    wire.sendrecv(sent, received)

        done, thread = threading.Event(), threading.Thread(target=transfer, daemon=True)
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
    print("| at 100 Mbit/s | seed | ms per step | × none | × bare traffic | waiting, % | MB/s sent | steps/exchange |")
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
    """The training loop of one worker."""

    task: Task
    steps: int
    seed: int
    min_step_seconds: float = 0.0  # a pause fills up shorter steps, as if an accelerator computed
    slowdown: float = 1.0  # the factor by which rank 0's steps are longer
    evaluations: int = 1  # of the consensus distance

    def __call__(self, wrap: Callable[..., Any]) -> dict[str, Any]:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.manual_seed(self.seed)
        model = self.task.build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        shard = self.task.load(rank, size, self.seed)
        min_seconds = self.min_step_seconds * (self.slowdown if rank == 0 else 1)
        evaluated_steps = {self.steps * (i + 1) // self.evaluations for i in range(self.evaluations)}
        results: dict[str, Any] = {"distances": []}
        with wrap(model, optimizer) as (module, worker):
            start, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
            for step in range(self.steps):
                step_start = time.perf_counter()
                self.task.loss(module, shard.batch(step)).backward()  # type: ignore[no-untyped-call]
                time.sleep(max(0.0, min_seconds - (time.perf_counter() - step_start)))
                optimizer.step()
                optimizer.zero_grad()
                if step + 1 == self.steps:
                    results["seconds"] = time.perf_counter() - start
                    results["training_cpu"] = time.thread_time() - thread
                    results["background_cpu"] = time.process_time() - process - results["training_cpu"]
                    results["exchanges"] = worker.method.metrics()["exchanges"] if worker else 0.0
                if worker is not None and step + 1 in evaluated_steps:
                    with worker.consensus():
                        results["distances"].append(worker.consensus_distance)
                        if step + 1 == self.steps:
                            results |= self.task.evaluate(model)
        return results


def count_partners(numel: int, steps: int) -> tuple[dict[int, int], dict[str, float]]:
    """Trains a vector with `rate="auto"`. Returns the exchanges by peer at the last step, and the metrics."""
    model = nn.Linear(numel, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with laconic.Worker(model, optimizer, laconic.A2CiD2("ring"), timeout=60) as worker:
        for _ in range(steps):
            time.sleep(0.05)
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        assert isinstance(worker.method, laconic.A2CiD2)
        return dict(sorted(worker.method.partners.items())), worker.method.metrics()


def shares(**_: Any) -> None:
    print("| link | rank | exchanges by peer | smallest share of an edge | exchanges of all of x per step |")
    print("|---|---|---|---|---|")
    for link in ("100mbit", "10mbit"):
        with hosts_behind(link, 4) as hosts:
            for rank, (partners, metrics) in enumerate(laconic.spawn(count_partners, 4, 1_860_000, 300, hosts=hosts)):
                share, rate = metrics["smallest_edge_share"], metrics["exchanges_per_step"]
                print(f"| {link} | {rank} | {partners} | {share:.2f} | {rate:.3f} |", flush=True)


class WithMethod:
    def __init__(self, method: laconic.Method) -> None:
        self.method = method

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> WithMethod:
        self.worker = laconic.Worker(model, optimizer, self.method)
        return self

    def __enter__(self) -> tuple[nn.Module, laconic.Worker]:
        return self.worker.model, self.worker.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.worker.__exit__(*raised)


class WithDDP:
    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> WithDDP:
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
    print(f"| ring of 8 | seed | √ mean ‖x − x̄‖² at five steps | geometric mean | {task.metric} | exchanges per step |")
    print("|---|---|---|---|---|---|")
    for seed in seeds:
        for name, method in variants.items():
            results = laconic.spawn(Loop(task, steps, seed, evaluations=min(5, steps)), 8, WithMethod(method))
            made = statistics.mean(worker["exchanges"] for worker in results) / steps
            distances = results[0]["distances"]
            mean = statistics.geometric_mean(distances)
            listed = " ".join(f"{distance:.3g}" for distance in distances)
            print(
                f"| {name} | {seed} | {listed} | {mean:.3g} | {results[0][task.metric]:.4f} | {made:.2f} |", flush=True
            )


def straggler(task: Task, steps: int, seeds: range, **_: Any) -> None:
    print("| method | seed | steps per second of the others: equal workers | with one 4 × slower | ratio |")
    print("|---|---|---|---|---|")
    for seed in seeds:
        for name, wrap in (("a2cid2", WithMethod(laconic.A2CiD2("ring", rate=1.0))), ("ddp", WithDDP())):
            rates = []
            for slowdown in (1.0, 4.0):
                results = laconic.spawn(Loop(task, steps, seed, min_step_seconds=0.12, slowdown=slowdown), 4, wrap)
                rates.append(steps / statistics.median(worker["seconds"] for worker in results[1:]))
            print(f"| {name} | {seed} | {rates[0]:.2f} | {rates[1]:.2f} | {rates[1] / rates[0]:.3f} |", flush=True)


def bare_swap(numel: int) -> float:
    """Returns the CPU seconds of sending and receiving one vector between two workers, without any method."""
    dist.init_process_group("gloo")
    wire = Connector(job_store("swap"), dist.get_rank(), timeout=60).connect(1 - dist.get_rank())
    sent, received = torch.zeros(2, numel)
    swaps = 40
    for swap in range(swaps + 5):
        if swap == 5:
            start = time.thread_time()
        wire.sendrecv(sent, received)
    return (time.thread_time() - start) / swaps


def processor(task: Task, steps: int, seeds: range, **_: Any) -> None:
    print("| model | parameters | seed | exchanges/step | training, ms/step | background | share, % | bare swap, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for model in ("mlp", "cnn"):
        task = dataclasses.replace(task, model=model)  # type: ignore[call-arg]
        parameters = sum(p.numel() for p in task.build_model().parameters())
        for seed in seeds:
            results = laconic.spawn(Loop(task, steps, seed), 4, WithMethod(laconic.A2CiD2("ring", rate=1.0)))
            training, background, made = (
                statistics.mean(worker[key] for worker in results) / steps
                for key in ("training_cpu", "background_cpu", "exchanges")
            )
            bare = statistics.mean(laconic.spawn(bare_swap, 2, parameters))
            print(
                f"| {model} | {parameters:,} | {seed} | {made:.2f} | {1e3 * training:.1f} | {1e3 * background:.2f} "
                f"| {100 * background / training:.1f} | {1e3 * bare:.2f} |",
                flush=True,
            )


FIGURES: dict[str, Callable[..., None]] = {
    figure.__name__: figure for figure in (ring, driven, shares, waiting, momentum, straggler, processor)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=[*FIGURES, "all"])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="run only this seed")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds) if arguments.seed is None else range(arguments.seed, arguments.seed + 1)
    for name in FIGURES if arguments.figure == "all" else [arguments.figure]:
        print(f"\n## {name}\n")
        FIGURES[name](task=Fashion(), steps=arguments.steps, seeds=seeds)


if __name__ == "__main__":
    main()
