"""Makes the models of all ranks equal: from rank 0 at the start, by averaging for `consensus()` and at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from laconic.comm import Comm
from laconic.comm.coded_mean import CodedMean, block_of, split
from laconic.flat import FlatParameters
from laconic.method import DIFFERENCE

CHUNK = 1 << 18  # entries that `average_near` sends at a time: 1.5 instead of 2.0 s for 1.86 M at 10 Mbit/s, emulated
NAME = "difference to the agreed model"  # in error messages


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
def average_near(comm: Comm, x: Tensor, reference: Tensor, step: int) -> None:
    """Replaces x by its mean over all ranks, up to rounding x − reference to 4 bits; bit-identical on all ranks.

    Args:
        comm: the channel to average over.
        x: the parameters (d).
        reference: a vector near x that is bit-identical on all ranks (d).
        step: the training step, for error messages.

    Raises:
        FloatingPointError: x is not finite on some rank, which the message names; on every rank.
    """
    unit = block_of(DIFFERENCE)
    chunks = [slice(start, min(start + CHUNK, x.numel())) for start in range(0, x.numel(), CHUNK)]
    means = [
        CodedMean(comm, split(0, chunk.stop - chunk.start, range(comm.size), unit=unit), DIFFERENCE, name=NAME)
        for chunk in chunks
    ]
    # Every chunk is on its way before the first is waited for: encoding and both hops overlap.
    transfers = [mean.send(x[chunk] - reference[chunk], step=step) for mean, chunk in zip(means, chunks, strict=True)]
    for mean, transfer in zip(means, transfers, strict=True):
        mean.answer(transfer)
    for mean, transfer, chunk in zip(means, transfers, chunks, strict=True):
        torch.add(reference[chunk], mean.receive(transfer), out=x[chunk])


def mean_near(of_ranks: Sequence[Tensor], reference: Tensor) -> Tensor:
    """Returns what `average_near` makes of the parameters of all ranks, with the same bits, in one process.

    >>> mean_near([torch.tensor([1.0, 4.0]), torch.tensor([1.0, 2.0])], reference=torch.tensor([1.0, 2.5]))
    tensor([1., 3.])
    """

    def quantized(vector: Tensor) -> Tensor:
        return DIFFERENCE.decode(DIFFERENCE.encode(vector), vector.numel())

    total = torch.zeros_like(reference)
    for x in of_ranks:
        total += quantized(x - reference)
    return reference + quantized(total.div_(len(of_ranks)))


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
