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


def efficient_adam_ahead(
    build: Callable[[], nn.Module],
    optimize: Optimize,
    workers: list[int],
    steps: int,
    quantize_up: Callable[[Tensor], Tensor],
    quantize_down: Callable[[Tensor], Tensor],
    delay: int,
) -> tuple[list[list[Tensor]], Tensor]:
    """Returns x of each worker after every step, and x of all workers when everything has arrived."""
    models = [build() for _ in workers]
    optimizers = [optimize(model) for model in models]
    base = flat(models[0])
    e = [torch.zeros_like(base) for _ in workers]
    e_server = torch.zeros_like(base)
    in_flight: list[tuple[Tensor, list[Tensor]]] = []  # the mean of a step, and the local steps that it will replace
    path = []
    for step in range(steps):
        received, local_steps = torch.zeros_like(base), []
        for i, worker in enumerate(workers):
            x = flat(models[i])
            train_step(models[i], optimizers[i], worker, step)
            local_steps.append(flat(models[i]) - x)
            p = local_steps[i] + e[i]
            sent = quantize_up(p)
            e[i] = p - sent
            received += sent
        P = received / len(workers) + e_server
        D = quantize_down(P)
        e_server = P - D
        in_flight.append((D, local_steps))
        if len(in_flight) > delay:
            base = base + in_flight.pop(0)[0]
        # In the order of the rows in which the method stores them: another order would round differently.
        rows = sorted(range(step + 1 - len(in_flight), step + 1), key=lambda s: (s + 1) % delay)
        ahead = [in_flight[s - step - 1][1] for s in rows]
        path.append([sum((of_all[i] for of_all in ahead), base) for i in range(len(workers))])
        for model, x in zip(models, path[-1], strict=True):
            torch.nn.utils.vector_to_parameters(x.clone(), model.parameters())
    return path, sum((D for D, _ in in_flight), base)
