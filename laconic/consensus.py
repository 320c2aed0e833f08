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
def average_model(
    comm: Comm, model: nn.Module, x: Tensor, trainers: list[int], weight: float, *, is_equal: bool
) -> None:
    """Averages the trained parameters and the floating-point buffers in place; copies all other buffers.

    Args:
        comm: the channel to average over.
        model: the model, whose buffers are averaged.
        x: the trained parameters (d).
        trainers: the ranks that train. The others' buffers, such as running statistics, do not count.
        weight: of this rank's buffers, as in `average_tensors`.
        is_equal: whether x is the same on all ranks. Then it is its own mean, which dividing a sum may miss by a bit.
    """
    if comm.size == 1:
        return
    if not is_equal and comm.can_lose_members:
        x.copy_(comm.mean(x))  # a failed attempt may still be writing to its result
    elif not is_equal:
        comm.mean(x, out=x)
    average_tensors(comm, [buffer for buffer in model.buffers() if buffer.is_floating_point()], weight)
    for buffer in model.buffers():
        if not buffer.is_floating_point():
            buffer.copy_(comm.broadcast(buffer, root=trainers[0]))


@torch.no_grad()
def average_tensors(comm: Comm, tensors: list[Tensor], weight: float) -> None:
    """Averages floating-point tensors in place, in fp64; this rank's count `weight` times, and all weights average 1.

    An entry that is not finite on every rank, such as the −inf of an attention mask, stays as it is on each.
    """
    if not tensors or comm.size == 1:
        return
    flat = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
    finite = flat.isfinite()
    both = torch.cat([weight * flat.where(finite, 0.0), finite.double()])
    mean, finite_share = comm.mean(both).chunk(2)
    averaged = mean.where(finite_share > 1 - 1e-9, flat)
    parts = torch.split(averaged, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


def require_same_forms(comm: Comm, tensors: list[Tensor]) -> None:
    """Raises a ValueError on every rank if the ranks' tensors have different shapes or are not of a floating dtype."""
    own = [f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else repr(t) for t in tensors]
    unfit = [not (isinstance(t, Tensor) and t.is_floating_point()) for t in tensors]
    notes = comm.meet("average_()", [own, unfit])
    for rank, (forms, unfit) in zip(comm.members, notes, strict=True):
        if any(unfit):
            raise ValueError(
                f"average_() takes tensors of a floating dtype, not {forms[unfit.index(True)]}, on rank {rank}"
            )
        if forms != notes[0][0]:
            raise ValueError(
                f"average_() takes tensors of the same shapes and dtypes on all ranks, not {notes[0][0]} on rank "
                f"{comm.members[0]} and {forms} on rank {rank}"
            )
