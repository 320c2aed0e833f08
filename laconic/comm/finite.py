"""Finds NaNs and infinities, and the ranks that they come from."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import NoReturn

import torch
from torch import Tensor

from laconic.comm.comm import Comm, PeerError


def is_finite(x: Tensor) -> bool:
    """Returns whether no entry is NaN or infinite. Reads x once if that is so.

    >>> is_finite(torch.tensor([1.0, 3e38, 3e38]))
    True
    >>> is_finite(torch.tensor([1.0, float("nan")]))
    False
    """
    # A NaN or an infinity always reaches the sum. But the sum of finite entries may overflow: then check each entry.
    if math.isfinite(x.sum().item()):
        return True
    return bool(torch.isfinite(x).all())


def raise_not_finite(comm: Comm, finite_here: bool) -> NoReturn:
    """Raises for a mean that is not finite. All ranks call it, since all have the same mean.

    Args:
        comm: the channel of the mean.
        finite_here: whether this rank's input was finite.

    Raises:
        FloatingPointError: names the ranks whose input was not finite.
    """
    finite = comm.meet("a mean that is not finite", finite_here)
    culprits = [str(rank) for rank, is_fine in zip(comm.members, finite, strict=True) if not is_fine]
    where = f"on rank {', '.join(culprits)}" if culprits else "in the sum, though finite on every rank"
    raise_together(comm, FloatingPointError(f"mean at step {comm.meter.step}: NaN or infinity {where}"))


def raise_together(comm: Comm, error: Exception) -> NoReturn:
    """Raises an error that all ranks raise, after they have learned of it at a meeting.

    If the rank that holds the job's store left with the error at once, others might not have read it yet, and would
    report that rank instead.
    """
    with suppress(PeerError):  # whoever cannot read the store any more knows the error already
        comm.meet("an error of all ranks")
    raise error
