"""A2CiD2: the algebra, the deterministic mode against the oracle, and what real asynchronous processes must keep."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic import topology

D = 40


def step_alone(model: nn.Linear, optimizer: torch.optim.Optimizer, rank: int, step: int) -> Tensor:
    """A step by a gradient that does not depend on x; what it adds to x."""
    gradient = torch.randn(D, generator=torch.Generator().manual_seed(7919 * step + rank))
    (model.weight * gradient).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return -0.1 * gradient


def drift(method: laconic.A2CiD2, steps: int, seconds: float = 0.0, rank_0_takes: int = 1) -> dict[str, object]:
    """Train on random gradients; what the worker moved by itself, and by how much the agreed model moved."""
    model = nn.Linear(D, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.Worker(model, optimizer, method) as worker:
        start, moved = worker.x.clone(), torch.zeros(D)
        for step in range(steps):
            time.sleep(seconds * (rank_0_takes if worker.rank == 0 else 1))  # computing
            moved += step_alone(model, optimizer, worker.rank, step)
    assert isinstance(worker.method, laconic.A2CiD2)
    return {"moved": moved, "agreed": worker.x - start, "partners": worker.method.partners, "meter": worker.meter.total}


def check_conservation(results: list[dict[str, object]]) -> None:
    mean = torch.stack([result["moved"] for result in results]).mean(dim=0)
    for result in results:
        torch.testing.assert_close(result["agreed"], mean, rtol=1e-6, atol=1e-6 * mean.abs().max().item() * 3)


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_the_mean_is_kept_by_asynchronous_processes(workers: int) -> None:
    methods = [laconic.A2CiD2(name, rate=1.0) for name in topology.TOPOLOGIES]
    methods += [laconic.A2CiD2("ring", rate="auto"), laconic.A2CiD2("ring", rate=2, momentum=False)]

    def run() -> list[dict[str, object]]:
        return [drift(method, steps=20, seconds=0.002) for method in methods]

    for method, results in zip(methods, zip(*laconic.spawn(run, workers), strict=True), strict=True):
        check_conservation(list(results))
        made = torch.stack([result["partners"] for result in results])
        assert torch.equal(made, made.T)
        edges = topology.named(method.topology, workers).edges
        for i, j in made.nonzero().tolist():
            assert (min(i, j), max(i, j)) in edges
        assert made.sum(dim=1).min() >= 12
