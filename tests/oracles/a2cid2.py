"""A2CiD2 in one loop over all workers, with x and x̃ as in the paper; exchanges along random matchings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.topology import Topology
from tests.helpers import Optimize, build_model, flat, train_step


def a2cid2(
    optimize: Optimize, graph: Topology, steps: int, rate: float, momentum: bool, seed: int = 0
) -> list[list[Tensor]]:
    """Returns x of each worker after each step: [step][worker]."""
    n, edges = graph.size, graph.edges
    constants = graph.constants(rate)
    eta = constants.eta if momentum else 0.0
    alpha_tilde = constants.alpha_tilde if momentum else 0.5
    models = [build_model() for _ in range(n)]
    optimizers = [optimize(model) for model in models]
    x = [flat(model) for model in models]
    x_tilde = [vector.clone() for vector in x]
    generator = torch.Generator().manual_seed(seed)
    backlog, path = 0.0, []
    for step in range(steps):
        for i in range(n):
            before = x[i]
            write_parameters(models[i], before)
            train_step(models[i], optimizers[i], i, step)
            local_step = flat(models[i]) - before
            x[i], x_tilde[i] = x[i] + local_step, x_tilde[i] + local_step
            c = 0.5 * (1 - math.exp(-2 * eta))
            x[i], x_tilde[i] = x[i] + c * (x_tilde[i] - x[i]), x_tilde[i] - c * (x_tilde[i] - x[i])
        backlog += rate
        while backlog > 0:
            free = set(range(n))
            for index in torch.randperm(len(edges), generator=generator).tolist():
                i, j = edges[index]
                if i in free and j in free:
                    free -= {i, j}
                    difference = x[i] - x[j]
                    x[i], x[j] = x[i] - difference / 2, x[j] + difference / 2
                    x_tilde[i] = x_tilde[i] - alpha_tilde * difference
                    x_tilde[j] = x_tilde[j] + alpha_tilde * difference
            backlog -= (n - len(free)) / n
        path.append(list(x))
    return path


def write_parameters(model: torch.nn.Module, vector: Tensor) -> None:
    offset = 0
    for parameter in model.parameters():
        parameter.data.copy_(vector[offset : offset + parameter.numel()].view_as(parameter))
        offset += parameter.numel()
