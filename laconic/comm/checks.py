"""Checks of the arguments that several implementations of `Comm` share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_lengths(chunks: Sequence[Tensor], lengths: Sequence[int] | None, place: int, size: int) -> list[int]:
    """Returns how many entries an all_to_all receives from each rank.

    Args:
        chunks: what is sent to each rank.
        lengths: as the caller gave them; by default all as the chunk at `place`.
        place: of this worker among the members.
        size: the number of members.
    """
    if len(chunks) != size:
        raise ValueError(f"all_to_all takes one chunk for each of {size} ranks, not {len(chunks)}")
    own = chunks[place].numel()
    if lengths is None:
        return [own] * size
    if len(lengths) != size:
        raise ValueError(f"all_to_all takes one length for each of {size} ranks, not {len(lengths)}")
    if lengths[place] != own:
        raise ValueError(
            f"lengths[{place}] must be the length {own} of the chunk to this rank itself, not {lengths[place]}"
        )
    return list(lengths)


def check_buffers(
    received: Tensor, sent: Tensor, received_lengths: Sequence[int], sent_lengths: Sequence[int], place: int, size: int
) -> None:
    """Raises if the buffers of an all_to_all do not fit their lengths. `place`, `size`: as in `check_lengths`."""
    for name, buffer, lengths in (("received", received, received_lengths), ("sent", sent, sent_lengths)):
        if len(lengths) != size:
            raise ValueError(f"{name}_lengths must have one length for each of {size} ranks, not {len(lengths)}")
        if sum(lengths) != buffer.numel():
            raise ValueError(f"{name} must have {sum(lengths)} entries, the sum of its lengths, not {buffer.numel()}")
        if buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(f"{name} must be a contiguous vector, not of shape {tuple(buffer.shape)}")
    if received_lengths[place] != sent_lengths[place]:
        raise ValueError(
            f"received_lengths[{place}] must be the length {sent_lengths[place]} of what this rank sends to itself, "
            f"not {received_lengths[place]}"
        )


def contiguous_copy(x: Tensor, out: Tensor | None) -> Tensor:
    """Returns a contiguous copy of x that a collective may work in: `out` if it is given, which may be x itself."""
    if out is None:
        return x.clone(memory_format=torch.contiguous_format)
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, not of strides {out.stride()}")
    if out is not x:
        out.copy_(x)
    return out
