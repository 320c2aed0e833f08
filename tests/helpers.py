"""A small problem that every worker sees differently, and a loop like a user's."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

import laconic

Optimize = Callable[[nn.Module], torch.optim.Optimizer]


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def build_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    """What worker `worker` sees in its step `step`: the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(8, 6, generator=generator) + 0.3 * worker
    return x, x[:, :2].sin() + 0.1 * torch.randn(8, 2, generator=generator)


def loss(model: nn.Module, worker: int, step: int) -> Tensor:
    x, y = batch(worker, step)
    return nn.functional.mse_loss(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


OPTIMIZERS: dict[str, Optimize] = {"sgd": sgd, "adam": adam}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    loss(model, worker, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(method: laconic.Method, optimize: Optimize, steps: int) -> list[Tensor]:
    """x after every step, and last the x after leaving the worker."""
    model = build_model(seed=rank())  # each rank its own: the worker must make them equal
    optimizer = optimize(model)
    path = []
    with laconic.Worker(model, optimizer, method) as worker:
        for step in range(steps):
            train_step(model, optimizer, worker.rank, step)
            path.append(worker.x.clone())
    return [*path, worker.x.clone()]


def train_alone(optimize: Optimize, steps: int) -> list[Tensor]:
    """The bare loop of one worker, without laconic."""
    model = build_model()
    optimizer = optimize(model)
    path = []
    for step in range(steps):
        train_step(model, optimizer, 0, step)
        path.append(flat(model))
    return [*path, flat(model)]
