"""Makes the models of all ranks equal: from rank 0 at the start, by averaging for `consensus()` and at the end."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.comm import Comm
from laconic.flat import FlatParameters


@torch.no_grad()
def copy_from_rank_0(comm: Comm, model: nn.Module, flat: FlatParameters) -> None:
    """Overwrites trained parameters, frozen parameters and buffers with those of rank 0."""
    if comm.size == 1:
        return
    comm.broadcast(flat.x, out=flat.x)
    trained = {id(p) for p in flat.parameters}
    for tensor in [*(p.data for p in model.parameters() if id(p) not in trained), *model.buffers()]:
        tensor.copy_(comm.broadcast(tensor))


@torch.no_grad()
def average_model(comm: Comm, model: nn.Module, x: Tensor, trainers: list[int], members: list[int]) -> None:
    """Averages the trained parameters and the floating-point buffers in place; copies all other buffers.

    Args:
        comm: the channel to average over.
        model: the model, whose buffers are averaged.
        x: the trained parameters (d).
        trainers: the ranks that train. The others' buffers, such as running statistics, do not count.
        members: the ranks that take part; more than `trainers` if a rank is a server without data.
    """
    if comm.size == 1:
        return
    if comm.can_lose_members:
        x.copy_(comm.mean(x))  # a failed attempt may still be writing to its result
    else:
        comm.mean(x, out=x)
    weight = len(members) / len(trainers) if comm.rank in trainers else 0.0
    floating = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if floating:
        _average_buffers(comm, floating, weight)
    for buffer in model.buffers():
        if not buffer.is_floating_point():
            buffer.copy_(comm.broadcast(buffer, root=trainers[0]))


def _average_buffers(comm: Comm, buffers: list[Tensor], weight: float) -> None:
    flat = torch.cat([buffer.double().reshape(-1) for buffer in buffers])
    # An attention mask of −inf has no mean: an entry that is not finite on every rank stays as it is on each.
    finite = flat.isfinite()
    both = torch.cat([weight * flat.where(finite, 0.0), finite.double()])
    mean, finite_share = comm.mean(both).chunk(2)
    averaged = mean.where(finite_share > 1 - 1e-9, flat)
    parts = torch.split(averaged, [buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))
