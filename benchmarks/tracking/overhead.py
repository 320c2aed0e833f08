"""What tracking costs: ranges and clocks in each step without a profiler, `metrics()`, and a live view beside training.

python benchmarks/tracking/overhead.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import record_function

import laconic
from laconic.ranges import span

REPEATS = 5
STEPS = 3000


def microseconds(function: Callable[[], object], calls: int = 20000) -> float:
    """Returns the median over repeats of the mean duration of a call."""
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(found)


def alone() -> None:
    model = torch.nn.Linear(100, 10)
    with laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), laconic.AllReduce()) as worker:
        tracking = worker.tracking

        def step() -> None:
            for name in ("before_step", "after_step", "after_hooks"):
                with tracking.verb(name):
                    pass
            tracking.end_step()

        def one_span() -> None:
            with span("example"):
                pass

        def torch_range() -> None:
            with record_function("example"):
                pass

        for name, function in {
            "all of tracking in one step": step,
            "one range": one_span,
            "torch's record_function, for comparison": torch_range,
            "worker.metrics()": worker.metrics,
        }.items():
            print(f"| {name} | {microseconds(function):.2f} |", flush=True)


def together() -> list[tuple[str, float]]:
    """Returns the median step time in µs of AllReduce over two processes, without and with a live view, in turns."""
    found = []
    for turn in range(2 * REPEATS):
        dashboard = 0 if turn % 2 else None
        torch.manual_seed(0)
        model = torch.nn.Linear(100, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with laconic.Worker(model, optimizer, laconic.AllReduce(), dashboard=dashboard) as worker:
            x = torch.randn(16, 100) + worker.rank
            start = time.perf_counter()
            for _ in range(STEPS):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            seconds = time.perf_counter() - start
        found.append(("without" if dashboard is None else "with", seconds / STEPS * 1e6))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| what | µs |\n|---|---|")
    alone()
    steps = laconic.spawn(together, 2)[0]
    for kind in ("without", "with"):
        times = [value for name, value in steps if name == kind]
        spread = f"{min(times):.0f} to {max(times):.0f}"
        print(f"| step of AllReduce, 2 processes, {kind} a live view | {statistics.median(times):.0f} ({spread}) |")
