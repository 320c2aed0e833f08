"""Efficient-Adam as one loop over all workers: whole vectors, no chunks, no owners, no network."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.helpers import Optimize, flat, train_step


def efficient_adam(
    build: Callable[[], nn.Module],
    optimize: Optimize,
    workers: list[int],
    steps: int,
    quantize_up: Callable[[Tensor], Tensor],
    quantize_down: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Returns x after every step. `workers[i]` is the index of the data that worker i sees."""
    models = [build() for _ in workers]
    optimizers = [optimize(model) for model in models]
    x = flat(models[0])
    e = [torch.zeros_like(x) for _ in workers]
    e_server = torch.zeros_like(x)
    path = []
    for step in range(steps):
        received = torch.zeros_like(x)
        for i, worker in enumerate(workers):
            train_step(models[i], optimizers[i], worker, step)
            p = (flat(models[i]) - x) + e[i]
            sent = quantize_up(p)
            e[i] = p - sent
            received += sent
        P = received / len(workers) + e_server
        D = quantize_down(P)
        e_server = P - D
        x = x + D
        for model in models:
            torch.nn.utils.vector_to_parameters(x.clone(), model.parameters())
        path.append(x)
    return path
