"""DiLoCo and streaming DiLoCo as one loop: torch's SGD is the outer optimizer of each fragment."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from laconic.compress import Compressor
from tests.helpers import Optimize, build_model, flat, train_step


def diloco(
    optimize: Optimize,
    workers: int,
    steps: int,
    period: int,
    outer_lr: float,
    outer_momentum: float,
    sent_at: list[int],
    delay: int,
    mixing: float | Literal["steps"],
    compressor: Compressor | None = None,
    decay: float = 1.0,
) -> list[list[Tensor]]:
    """Returns, for each step, x of each worker.

    Args:
        sent_at: for each of the equal fragments, the step of a period, counted from 1, in which it is sent.
        compressor: of what each worker sends, with error feedback; every worker averages what all have sent.
        decay: of the quantization error, from one message to the next.
    """
    models = [build_model() for _ in range(workers)]
    optimizers = [optimize(model) for model in models]
    d, p = len(flat(models[0])), len(sent_at)
    cuts = [slice(i * d // p, (i + 1) * d // p) for i in range(p)]
    theta = [flat(models[0])[cut].requires_grad_() for cut in cuts]
    outer = [
        torch.optim.SGD([fragment], lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
        for fragment in theta
    ]
    residuals = torch.zeros(workers, d)
    path, in_flight = [], []
    for step in range(1, steps + 1):
        for worker in range(workers):
            train_step(models[worker], optimizers[worker], worker, step - 1)
        x = torch.stack([flat(model) for model in models])
        for i, cut in enumerate(cuts):
            if (step - sent_at[i]) % period == 0 and step >= sent_at[i]:
                sent = theta[i].detach() - x[:, cut]
                if compressor is not None:
                    wanted = sent + decay * residuals[:, cut]
                    sent = torch.stack([compressor.decode(compressor.encode(one), len(one)) for one in wanted])
                    residuals[:, cut] = wanted - sent
                in_flight.append((step + delay, i, sent.mean(dim=0), x[:, cut].clone()))
        for due, i, gradient, sent_x in list(in_flight):
            if due == step:
                theta[i].grad = gradient
                outer[i].step()
                mine, agreed = x[:, cuts[i]], theta[i].detach()
                mixed = mine - sent_x + agreed if mixing == "steps" else mixing * mine + (1 - mixing) * agreed
                x[:, cuts[i]] = mixed
        for model, row in zip(models, x, strict=True):
            vector_to_parameters(row.clone(), model.parameters())
        path.append(list(x))
    return path
