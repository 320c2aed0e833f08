"""Trains 1 to 256 simulated workers, to check what is claimed of the methods at scale. Needs hours of one core.

Every run appends one line to claims.jsonl; runs that are there already are left out, so the script can be stopped and
started again. tables.py prints the tables of docs/scale.md from that file.

LACONIC_DATA=data OMP_NUM_THREADS=1 python benchmarks/simulate/claims.py gossip many speedup lost seconds
python benchmarks/simulate/tables.py
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laconic
from laconic.comm import PeerError, plan
from laconic.link import Link
from laconic.tasks import Cifar10, Fashion, Task
from laconic.tasks.order import Order
from laconic.tasks.partition import parse_partition, shard_indices
from laconic.tasks.vision import mlp

RECORD = Path(__file__).parent / "claims.jsonl"
Spec = dict[str, Any]  # the settings of one run: what identifies it in the record

BATCH = 16
COMPUTE = 0.03  # seconds of a step; varies evenly by a fifth
GOSSIP_LR = {"fashion": 0.05, "cifar10": 0.025}  # the best of 0.0125 to 0.2 on a ring of 16, see results.md
ADAM_LR = 1e-3


def patches() -> nn.Sequential:
    """Returns a convolutional network for CIFAR-10 without overlapping windows, 8,000 parameters: cheap on a CPU."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 2, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 10),
    )  # fmt: skip


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return mlp(784, 64, 10) if name == "fashion" else patches()


def task_of(spec: Spec) -> Task:
    settings = {
        "batch_size": spec.get("batch", BATCH),
        "lr": spec["lr"],
        "optimizer": spec["optimizer"],
        "weight_decay": 0.0,
        "schedule": spec.get("schedule", "cosine"),
        "partition": {"iid": "iid", "non-iid": "classes:2"}[spec["data"]],
    }
    return Fashion(**settings) if spec["task"] == "fashion" else Cifar10(subset=True, augment=False, **settings)


@functools.cache
def images(name: str, part: str) -> tuple[Tensor, Tensor]:
    """Returns all images and labels of a part, "train" or "test", as tensors that all workers share."""
    task = Fashion() if name == "fashion" else Cifar10(subset=True)
    x, y = task.tensors(*getattr(task.images(), part))
    return x, y


@torch.no_grad()
def accuracy(model: nn.Module, name: str) -> float:
    x, y = images(name, "test")
    return float((model(x).argmax(dim=1) == y).float().mean())


def method_of(spec: Spec) -> laconic.Method:
    match spec["method"]:
        case "a2cid2":
            return laconic.A2CiD2(topology=spec["graph"], rate=spec["rate"], momentum=spec["momentum"])
        case "never":
            return laconic.LocalSGD(period=10**6)
        case "adpsgd":
            return laconic.ADPSGD(total_steps=spec["steps"])
        case name:
            return laconic.METHODS[name]()


def train(spec: Spec, means: dict[int, float]) -> dict[str, Any]:
    """Trains one worker. Returns what it measured, or when and why it stopped because another one was lost.

    Args:
        spec: the settings.
        means: receives the accuracy of the mean model by step; shared, since all workers evaluate the same model.
    """
    task, model = task_of(spec), build(spec["task"])
    pixels, labels = images(spec["task"], "train")
    optimizer = task.build_optimizer(model)
    schedule = task.build_schedule(optimizer, spec["steps"])
    worker = laconic.Worker(model, optimizer, method_of(spec))
    distances, result = [], {}
    try:
        with worker:
            samples = shard_indices(
                parse_partition(task.partition), labels.numpy(), worker.rank, worker.size, spec["seed"]
            )
            order = Order(samples, task.batch_size, spec["seed"], worker.rank)
            for step in range(1, spec["steps"] + 1):
                chosen = torch.from_numpy(order(step - 1))
                task.loss(model, (pixels[chosen], labels[chosen])).backward()
                optimizer.step()
                optimizer.zero_grad()
                if schedule is not None:
                    schedule.step()
                if step == spec["steps"]:
                    total = worker.meter.total
                    result = {"end": worker.comm.now(), "waited": total.waited, "bytes": total.nbytes()}
                    result |= {"single": accuracy(model, spec["task"]), "metrics": worker.metrics()}
                if step % spec["every"] == 0 or step == spec["steps"]:
                    with worker.consensus():
                        if step not in means:
                            means[step] = accuracy(model, spec["task"])
                        distances.append(worker.consensus_distance)
                    last = list(means.values())[-2:]
                    if len(last) == 2 and min(last) >= spec.get("target", 2.0):
                        break  # a sustained crossing
    except PeerError as error:
        return {"stopped": worker.comm.now(), "step": worker.step, "why": str(error)[:200]}
    return result | {"distances": distances}


def run(spec: Spec) -> Spec:
    """Trains all workers. Returns the line of the record."""
    means: dict[int, float] = {}

    def seconds(rank: int, step: int) -> float:
        varied = random.Random(f"{spec['seed']} {rank} {step}").uniform(0.8, 1.2)
        return COMPUTE * varied * (spec.get("slow", 1) if rank == spec["workers"] - 1 else 1)

    failures = {spec["workers"] // 2: spec["lost"]} if spec.get("lost") else {}
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = laconic.simulate(
            train, spec["workers"], spec, means, link=spec.get("link", "10gbit"), compute=seconds, failures=failures,
            spare_survivors=bool(failures),
        )  # fmt: skip
    line: Spec = spec | {
        "cpu": round(time.process_time() - start, 1),
        "means": {step: round(value, 4) for step, value in means.items()},
    }
    survivors = [result for rank, result in enumerate(results) if rank not in failures]
    stopped = [result for result in survivors if "stopped" in result]
    ended = [result for result in survivors if "end" in result]
    if stopped:
        line |= {"stopped_workers": len(stopped)} | min(stopped, key=lambda result: result["stopped"])
    if ended:
        for name in ("single", "end", "waited"):
            values = [result[name] for result in ended]
            line[name] = [round(value, 5) for value in (min(values), sum(values) / len(values), max(values))]
        line["MB"] = round(sum(result["bytes"] for result in ended) / len(ended) / 1e6, 3)
        if "target" not in spec:
            line["distances"] = [round(distance, 5) for distance in ended[0]["distances"]]
        metrics = ended[0]["metrics"].items()
        line["metrics"] = {name: round(v, 4) for name, v in metrics if name.startswith(("method_", "period", "bits"))}
    return line


def gossip() -> Iterator[Spec]:
    """A2CiD2 with momentum, without, and without at twice the rate."""
    variants = ((True, 1), (False, 1), (False, 2))
    for seed in range(3):
        for task, graph, workers, data, (momentum, rate) in itertools.chain(
            itertools.product(("fashion",), ("ring",), (64, 32, 16), ("non-iid", "iid"), variants),
            itertools.product(("cifar10",), ("ring",), (64, 32, 16), ("non-iid", "iid"), variants),
            itertools.product(("fashion", "cifar10"), ("exponential", "complete"), (32,), ("non-iid", "iid"), variants),
        ):
            yield {
                "claim": "gossip", "task": task, "data": data, "graph": graph, "workers": workers, "method": "a2cid2",
                "momentum": momentum, "rate": rate, "seed": seed, "steps": 1000, "every": 250, "optimizer": "sgd",
                "lr": GOSSIP_LR[task],
            }  # fmt: skip


def sweep() -> Iterator[Spec]:
    """The learning rate of `gossip`."""
    for task, lr in itertools.product(("fashion", "cifar10"), (0.0125, 0.025, 0.05, 0.1, 0.2)):
        yield {
            "claim": "sweep", "task": task, "data": "iid", "graph": "ring", "workers": 16, "method": "a2cid2",
            "momentum": False, "rate": 1, "seed": 100, "steps": 1000, "every": 250, "optimizer": "sgd", "lr": lr,
        }  # fmt: skip


SYNCHRONOUS = ("allreduce", "local_sgd", "adpsgd", "divisible", "efficient_adam")


def many() -> Iterator[Spec]:
    """Accuracy after as many steps with 16, 64 and 256 workers; "never": workers that do not communicate, averaged."""
    for seed, workers, method in itertools.product(range(3), (16, 64, 256), (*SYNCHRONOUS, "never")):
        if workers == 256 and seed:
            continue
        yield {
            "claim": "many", "task": "fashion", "data": "iid", "workers": workers, "method": method, "seed": seed,
            "steps": 200, "every": 200, "optimizer": "adam", "lr": ADAM_LR,
        }  # fmt: skip


def speedup() -> Iterator[Spec]:
    """Steps to a target with more workers, each with the same batch, and the best of four learning rates."""
    few, numerous = (0.5e-3, 1e-3, 2e-3, 4e-3), (1e-3, 2e-3, 4e-3, 8e-3)
    for seed, (workers, steps, tried), method in itertools.product(
        range(3), ((1, 2000, few), (4, 2000, few), (16, 1000, numerous), (64, 400, numerous)), (*SYNCHRONOUS, "a2cid2")
    ):
        for lr in tried:
            if workers == 64 and seed:
                continue
            yield {
                "claim": "speedup", "task": "fashion", "data": "iid", "workers": workers, "method": method,
                "seed": seed, "graph": "exponential", "rate": 1, "momentum": True, "batch": 4, "target": 0.8,
                "schedule": "constant", "steps": steps, "every": 20, "optimizer": "adam", "lr": lr,
            }  # fmt: skip


def lost() -> Iterator[Spec]:
    """64 workers of which the last computes 4 times as slowly, or one is lost after 1 s."""
    for method, (slow, failure) in itertools.product((*SYNCHRONOUS, "a2cid2"), ((1, None), (4, None), (1, 1.0))):
        yield {
            "claim": "lost", "task": "fashion", "data": "iid", "workers": 64, "method": method, "seed": 0,
            "graph": "ring", "rate": "auto", "momentum": True, "link": "1gbit+1ms", "steps": 100, "every": 100,
            "optimizer": "adam", "lr": ADAM_LR, "slow": slow, "lost": failure,
        }  # fmt: skip


def seconds() -> Iterator[Spec]:
    """Seconds of a step of a model of 350 M parameters."""
    for workers, rate, method in itertools.product((16, 64, 256), (1, 10), (*SYNCHRONOUS, "a2cid2")):
        yield {
            "claim": "seconds", "parameters": 350e6, "compute": 0.25, "workers": workers, "method": method,
            "gbit": rate, "delay": 1e-4, "graph": "exponential", "rate": "auto", "momentum": True, "steps": 64,
        }  # fmt: skip


SIMULATED_NUMEL = 100_000  # of the vector that stands for a model of any size


def time_steps(spec: Spec) -> Spec:
    """Measures the simulated seconds of a step of a large model, without its gradients.

    A vector of 100,000 entries stands for it, on links that are slower by the same factor; so every message that is
    proportional to the model takes as long as it would, and delays stay as they are. Gradients are random numbers.
    """
    scale = spec["parameters"] / SIMULATED_NUMEL
    link = Link(round(spec["gbit"] * 1e9 / scale), delay_seconds=spec["delay"])

    def train() -> tuple[float, float]:
        x = nn.Parameter(torch.zeros(SIMULATED_NUMEL))
        optimizer = torch.optim.Adam([x], lr=1e-4)
        model = nn.ParameterList([x])
        with laconic.Worker(model, optimizer, method_of(spec)) as worker:
            torch.manual_seed(worker.rank)
            x.grad = torch.randn_like(x)
            half = spec["steps"] // 2  # methods that adapt to the link have done so by then
            for step in range(spec["steps"]):
                optimizer.step()
                if step + 1 == half:
                    start, waited = worker.comm.now(), worker.meter.total.waited
            steps = spec["steps"] - half
            return (worker.comm.now() - start) / steps, (worker.meter.total.waited - waited) / steps, worker.metrics()

    small, plan.SMALL_NBYTES = plan.SMALL_NBYTES, round(plan.SMALL_NBYTES / scale)  # small at the size that is meant
    try:
        results = laconic.simulate(train, spec["workers"], link=link, compute=spec["compute"])
    finally:
        plan.SMALL_NBYTES = small
    metrics = {name: value for name, value in results[0][2].items() if name in ("period", "bits")}
    means = [sum(result[i] for result in results) / len(results) for i in (0, 1)]
    return spec | {"step_seconds": round(means[0], 5), "waited_seconds": round(means[1], 5), "metrics": metrics}


CLAIMS = {
    "sweep": sweep, "gossip": gossip, "many": many, "speedup": speedup, "lost": lost, "seconds": seconds,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("claims", nargs="+", choices=CLAIMS)
    parser.add_argument("--part", default="0/1", help="0/2 and 1/2: two processes, each half of the runs")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME=VALUE", help="such as task=fashion seed=0")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    only = dict(condition.split("=") for condition in options.only)
    known = [json.loads(text) for text in RECORD.read_text().splitlines()] if RECORD.exists() else []
    for name in options.claims:
        chosen = [spec for spec in CLAIMS[name]() if all(str(spec[key]) == value for key, value in only.items())]
        for spec in chosen[part::parts]:
            if any(spec.items() <= line.items() for line in known):
                continue
            line = time_steps(spec) if name == "seconds" else run(spec)
            with RECORD.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
