"""Divisible communication as one loop over all workers, with e and s of every worker written out.

With a compressor, as when all codes go to everyone in one hop.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.compress import Compressor, Log
from tests.helpers import Optimize, build_model, flat, loss


def foreground_blocks(d: int, ratio: int) -> list[range]:
    """In the order of their turns, beginning with step 0: every k-th block, k near the golden section of their number
    and with no common divisor."""
    length = -(-d // ratio)
    blocks = [range(d)[i : i + length] for i in range(0, d, length)]
    stride = max(1, round(0.618 * len(blocks)))
    while len({stride * i % len(blocks) for i in range(len(blocks))}) < len(blocks):
        stride += 1
    return [blocks[stride * i % len(blocks)] for i in range(len(blocks))]


def divisible(
    optimize: Optimize,
    workers: int,
    steps: int,
    ratio: int,
    period: int | None,
    delay: int,
    moments: str = "local",
    background: Compressor | None = None,
) -> list[list[Tensor]]:
    """For each step, x of each worker."""

    def said(vector: Tensor, by: Compressor | None = background) -> Tensor:
        return vector if background is None or by is None else by.decode(by.encode(vector), len(vector))

    models = [build_model() for _ in range(workers)]
    optimizers = [optimize(model) for model in models]
    x = [flat(model) for model in models]
    d = len(x[0])
    blocks = foreground_blocks(d, ratio)
    pieces = [list(range(d)[i : i + -(-d // period)]) for i in range(0, d, -(-d // period))] if period else []
    e = [torch.zeros(d) for _ in range(workers)]
    s = [torch.zeros(d) for _ in range(workers)]
    g = [torch.zeros(d) for _ in range(workers)]  # sum of the own gradients since they were last sent
    last = torch.zeros(d)  # the step in which they were
    shift = [torch.zeros(d) for _ in range(workers)]
    flying: list[tuple[int, list[int], list[Tensor], list[dict[str, Tensor]]]] = []
    path = []
    for step in range(1, steps + 1):
        for i in range(workers):
            loss(models[i], i, step - 1).backward()
            if moments == "corrected":
                g[i] += torch.cat([p.grad.reshape(-1) for p in models[i].parameters()])
                for p, part in zip(models[i].parameters(), split(shift[i], models[i]), strict=True):
                    p.grad += part
            optimizers[i].step()
            optimizers[i].zero_grad()
            moved = flat(models[i])
            e[i] += moved - x[i]
            x[i] = moved

        block = blocks[step % len(blocks)]
        mean = torch.stack([e[i][list(block)] for i in range(workers)]).mean(0)
        for i in range(workers):
            x[i][list(block)] += mean - e[i][list(block)]
            e[i][list(block)] = 0

        if flying and flying[0][0] + delay == step:
            _, piece, sent, snapshots = flying.pop(0)
            mean = torch.stack(sent).mean(0)
            for i in range(workers):
                x[i][piece] += mean - sent[i]
                s[i][piece] -= sent[i]
                for name, snapshot in snapshots[i].items():
                    average = torch.stack([other[name] for other in snapshots]).mean(0)
                    if name == "gradient":
                        shift[i][piece] = average - snapshot
                        continue
                    now = moment(models[i], optimizers[i], name)
                    new = now[piece] + average - snapshot
                    if name == "exp_avg_sq":
                        new = torch.maximum(new, 0.1 * torch.maximum(now[piece], average))
                    now[piece] = new
                    set_moment(models[i], optimizers[i], name, now)

        if pieces:
            piece = pieces[(step - 1) % len(pieces)]
            sent = [said(e[i][piece]) for i in range(workers)]
            names = moment_names(optimizers[0]) if moments == "averaged" else []
            snapshots = [
                {name: moment(models[i], optimizers[i], name)[piece] for name in names} for i in range(workers)
            ]
            if moments == "corrected":
                snapshots = [{"gradient": said(g[i][piece] / (step - last[piece]), Log(4))} for i in range(workers)]
            last[piece] = step
            for i in range(workers):
                g[i][piece] = 0
                s[i][piece] += sent[i]
                e[i][piece] -= sent[i]
            flying.append((step, piece, sent, snapshots))

        for i in range(workers):
            nn.utils.vector_to_parameters(x[i].clone(), models[i].parameters())
        agreed = [x[i] - e[i] - s[i] for i in range(workers)]
        assert all(torch.allclose(a, agreed[0], atol=1e-5) for a in agreed)
        path.append([own.clone() for own in x])
    return path


def moment_names(optimizer: torch.optim.Optimizer) -> list[str]:
    state = next(iter(optimizer.state.values()))
    return sorted(name for name, value in state.items() if isinstance(value, Tensor) and value.dim() > 0)


def moment(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> Tensor:
    return torch.cat([optimizer.state[p][name].reshape(-1) for p in model.parameters()])


def set_moment(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, value: Tensor) -> None:
    for p, part in zip(model.parameters(), split(value, model), strict=True):
        optimizer.state[p][name] = part.clone()


def split(vector: Tensor, model: nn.Module) -> list[Tensor]:
    parameters = list(model.parameters())
    parts = vector.split([p.numel() for p in parameters])
    return [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
