"""Synchronous data-parallel training: one model, the mean of all workers' gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers import Optimize, build_model, flat, loss


def allreduce(optimize: Optimize, workers: int, steps: int) -> list[Tensor]:
    """Returns x after every step (the same on all workers)."""
    model = build_model()
    optimizer = optimize(model)
    path = []
    for step in range(steps):
        losses = torch.stack([loss(model, worker, step) for worker in range(workers)])
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        path.append(flat(model))
    return path
