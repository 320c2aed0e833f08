"""Adaptive periodic averaging as one loop: the variance among the models decides when they are averaged."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.helpers import Optimize, build_model, flat, train_step
from tests.oracles.local_sgd import average


@dataclass
class History:
    x: list[list[Tensor]] = field(default_factory=list)  # for each step, x of each worker
    period: list[int] = field(default_factory=list)  # after each step
    rounds: list[int] = field(default_factory=list)  # the steps, counted from 1, that ended with a round
    variance: list[float] = field(default_factory=list)  # at each round


def adpsgd(
    optimize: Optimize,
    workers: int,
    steps: int,
    lr_at: dict[int, float],
    initial_period: int,
    warmup: int,
    calibration: int,
    low: float,
    high: float,
    min_period: int,
    max_period: int,
) -> History:
    """Trains all workers. `lr_at` maps a step to the learning rate from that step on."""
    models = [build_model() for _ in range(workers)]
    optimizers = [optimize(model) for model in models]
    history, period, count, ratios = History(), initial_period, 0, []
    for step in range(1, steps + 1):
        for worker in range(workers):
            for group in optimizers[worker].param_groups:
                group["lr"] = lr_at.get(step, group["lr"])
            train_step(models[worker], optimizers[worker], worker, step - 1)
        count += 1
        if count == (1 if step <= warmup else period):
            count = 0
            lr = optimizers[0].param_groups[0]["lr"]
            stacked = torch.stack([flat(model) for model in models]).double()
            variance = (stacked - stacked.mean(0)).square().sum(1).mean().item()
            for copies in zip(*(model.parameters() for model in models), strict=True):
                average([copy.data for copy in copies])
            if warmup < step <= warmup + calibration:
                ratios.append(variance / lr)
            elif step > warmup:
                target = lr * sum(ratios) / len(ratios)
                if variance < low * target:
                    period = min(max_period, period + 1)
                elif variance > high * target:
                    period = max(min_period, period - 1)
            history.rounds.append(step)
            history.variance.append(variance)
        history.x.append([flat(model) for model in models])
        history.period.append(period)
    return history
