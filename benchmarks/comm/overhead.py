"""Overhead of `laconic.Worker`: against a plain loop, against DDP on loopback, and at import.

    python benchmarks/comm/overhead.py

Figures are medians over interleaved rounds. In each round every variant makes a few steps in the same processes, so
that other load on the machine affects all of them equally.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic

SIZES = {"1.9 M": [784, 1024, 1024, 10], "20 M": [784, 4096, 4096, 10]}


@dataclass
class NoCommunication(laconic.Method):
    """Does nothing, so that only the worker's overhead remains."""


def build(widths: list[int]) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, batch: int = 64) -> float:
    """Returns the seconds per step."""
    x, y = torch.randn(batch, 784), torch.randint(10, (batch,))
    start = time.perf_counter()
    for _ in range(number):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - start) / number


def worker_against_plain_loop(size: str, rounds: int) -> float:
    torch.set_num_threads(1)
    bare, joined = build(SIZES[size]), build(SIZES[size])
    bare_optimizer = torch.optim.SGD(bare.parameters(), lr=1e-3)
    joined_optimizer = torch.optim.SGD(joined.parameters(), lr=1e-3)
    ratios = []
    with laconic.Worker(joined, joined_optimizer, NoCommunication()):
        for variant in (bare, joined):
            steps(variant, bare_optimizer if variant is bare else joined_optimizer, 2)
        for i in range(rounds):
            pair = [(bare, bare_optimizer), (joined, joined_optimizer)]
            seconds = {id(model): steps(model, optimizer, 4) for model, optimizer in (pair if i % 2 else pair[::-1])}
            ratios.append(seconds[id(joined)] / seconds[id(bare)])
    return statistics.median(ratios)


def allreduce_against_ddp(size: str, rounds: int) -> tuple[float, float, float]:
    """Returns, in each of two workers, the ratio of times per step, and those of AllReduce and DDP in ms."""
    ours = build(SIZES[size])
    our_optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    with laconic.Worker(ours, our_optimizer, laconic.AllReduce()):
        theirs = build(SIZES[size])
        wrapped = DistributedDataParallel(theirs)
        theirs_optimizer = torch.optim.SGD(theirs.parameters(), lr=1e-3)
        pair = [(ours, our_optimizer), (wrapped, theirs_optimizer)]
        for model, optimizer in pair:
            steps(model, optimizer, 3)
        seconds: list[list[float]] = [[], []]
        for i in range(rounds):
            for j in (0, 1) if i % 2 else (1, 0):
                dist.barrier()
                seconds[j].append(steps(*pair[j], number=3))
    ratio = statistics.median([a / b for a, b in zip(*seconds, strict=True)])
    return ratio, 1e3 * statistics.median(seconds[0]), 1e3 * statistics.median(seconds[1])


def import_seconds(rounds: int) -> float:
    """Returns how much longer `import torch, laconic` takes than `import torch`, as a difference of minima."""

    def once(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    pairs = [(once("import torch"), once("import torch, laconic")) for _ in range(rounds)]
    return min(both for _, both in pairs) - min(torch_only for torch_only, _ in pairs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print("| figure | target | 1.9 M parameters | 20 M parameters |\n|---|---|---|---|")
    bare = [f"{laconic.spawn(worker_against_plain_loop, 1, size, rounds)[0]:.3f}" for size in SIZES]
    print(f"| worker with an empty method / plain loop | ≤ 1.03 | {' | '.join(bare)} |")
    cells = []
    for size in SIZES:
        ratio, ours, theirs = laconic.spawn(allreduce_against_ddp, 2, size, rounds)[0]
        cells.append(f"{ratio:.3f} ({ours:.0f} / {theirs:.0f} ms)")
    print(f"| AllReduce / DDP, 2 workers, loopback | ≤ 1.2 | {' | '.join(cells)} |")
    print(f"\nimport laconic adds {import_seconds(7):.2f} s to import torch (target: 0.3 s).")
