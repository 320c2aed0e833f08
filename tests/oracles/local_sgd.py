"""Local SGD as one loop: several models train alone and are replaced by their mean every `period` steps."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers import Optimize, build_model, flat, train_step


def local_sgd(
    optimize: Optimize, workers: int, steps: int, period: int, moments: str, moments_every: int = 1
) -> list[list[Tensor]]:
    """Returns, for each step, x of each worker."""
    models = [build_model() for _ in range(workers)]
    optimizers = [optimize(model) for model in models]
    path = []
    for step in range(steps):
        for worker in range(workers):
            train_step(models[worker], optimizers[worker], worker, step)
        if (step + 1) % period == 0:
            for copies in zip(*(model.parameters() for model in models), strict=True):
                average([copy.data for copy in copies])
                if moments == "averaged" and (step + 1) % (period * moments_every) == 0:
                    states = [optimizer.state[copy] for optimizer, copy in zip(optimizers, copies, strict=True)]
                    for name, value in states[0].items():
                        if isinstance(value, Tensor) and value.shape == copies[0].shape:
                            average([state[name] for state in states])
        path.append([flat(model) for model in models])
    return path


def average(tensors: list[Tensor]) -> None:
    mean = torch.stack(tensors).mean(dim=0)
    for tensor in tensors:
        tensor.copy_(mean)
