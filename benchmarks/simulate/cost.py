"""Measures what simulating costs: CPU time of a worker's step beyond its gradient, and memory of a worker.

python benchmarks/simulate/cost.py --workers 64 --steps 50 allreduce local_sgd a2cid2 divisible efficient_adam
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

import torch
from torch import nn

import laconic


def train(method: laconic.Method, steps: int) -> tuple[float, float]:
    """Trains a model of 50,890 parameters. Returns the CPU seconds of its gradients, and its simulated seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if isinstance(method, laconic.EfficientAdam):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + int(os.environ["RANK"]))
    x, y = torch.randn(32, 784), torch.randint(10, (32,))
    gradient_seconds = 0.0
    with laconic.Worker(model, optimizer, method) as worker:
        for _ in range(steps):
            start = time.thread_time()
            nn.functional.cross_entropy(model(x), y).backward()
            gradient_seconds += time.thread_time() - start
            optimizer.step()
            optimizer.zero_grad()
        return gradient_seconds, worker.comm.now()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--link", default="1gbit+10ms")
    options = parser.parse_args()
    n, steps = options.workers, options.steps
    print(
        "| method | workers | steps | wall (s) | ms a worker-step | beyond the gradient | MiB a worker | virtual (s) |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in options.methods:
        method = laconic.METHODS[name]()
        laconic.simulate(train, 2, method, 3)  # loads kernels
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory counts from here
        before = _status("VmRSS")
        cpu, wall = time.process_time(), time.perf_counter()
        results = laconic.simulate(train, n, method, steps, link=options.link, compute=0.03)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        gradients = sum(seconds for seconds, _ in results)
        peak = (_status("VmHWM") - before) / n / 2**20
        each = 1e3 / n / steps
        print(
            f"| {name} | {n} | {steps} | {wall:.1f} | {cpu * each:.2f} | {(cpu - gradients) * each:.2f} | {peak:.2f} "
            f"| {results[0][1]:.2f} |",
            flush=True,
        )
    print(f"peak of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB")


def _status(name: str) -> int:
    """Returns an entry of this process's memory status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
