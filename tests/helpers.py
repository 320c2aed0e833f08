"""A small task on which every worker has its own data, and a training loop like a user's."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import laconic

Optimize = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass
class Silent(laconic.Method):
    """Communicates nothing."""


def worker_of(model: nn.Module, timeout: float = 1800.0) -> laconic.Worker:
    """Returns a worker with plain SGD and no communication in its steps."""
    return laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), Silent(), timeout=timeout)


def agreed_x(worker: laconic.Worker) -> Tensor | None:
    """Returns x inside `agreed()`, or None if the method holds no agreed model now."""
    local = worker.x.clone()
    try:
        with worker.agreed():
            found = worker.x.clone()
    except ValueError:
        return None
    assert torch.equal(worker.x, local)
    return found


def rank() -> int:
    """Returns this process's rank; 0 outside of `laconic.spawn`."""
    return int(os.environ.get("RANK", "0"))


def build_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    """Returns the batch of a worker in a step: the same in every process that asks for it."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(8, 6, generator=generator) + 0.3 * worker
    return x, x[:, :2].sin() + 0.1 * torch.randn(8, 2, generator=generator)


def loss(model: nn.Module, worker: int, step: int) -> Tensor:
    x, y = batch(worker, step)
    return nn.functional.mse_loss(model(x), y)


# One parameter after the other, which is the default on the CPU only: all devices then compute the same bits.
def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, foreach=False)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)


OPTIMIZERS: dict[str, Optimize] = {"sgd": sgd, "adam": adam}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    loss(model, worker, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(method: laconic.Method, optimize: Optimize, steps: int) -> list[Tensor]:
    """Trains in this process and returns x after every step, and x after the end of the worker's block."""
    model = build_model(seed=rank())  # another one on each rank: the worker must make them equal
    optimizer = optimize(model)
    path = []
    with laconic.Worker(model, optimizer, method) as worker:
        for step in range(steps):
            train_step(model, optimizer, worker.rank, step)
            path.append(worker.x.clone())
    return [*path, worker.x.clone()]


def train_alone(optimize: Optimize, steps: int) -> list[Tensor]:
    """Trains worker 0 without laconic and returns what `train` returns."""
    model = build_model()
    optimizer = optimize(model)
    path = []
    for step in range(steps):
        train_step(model, optimizer, 0, step)
        path.append(flat(model))
    return [*path, flat(model)]


def unused_port() -> int:
    """Returns a port of 127.0.0.1 that can be bound a moment later.

    It is none of those that the kernel gives to other processes (32768 and up, by default), as port 0 would be.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
