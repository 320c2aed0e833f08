"""Finds NaNs and infinities, and the ranks that they come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def check_gossip(x: Tensor, rank: int, step: int) -> None:
    """Raises a FloatingPointError if parameters that gossip is about to send are not finite."""
    if not is_finite(x):
        raise FloatingPointError(
            f"rank {rank}: the parameters contain NaN or infinity after step {step}, so this worker has left the "
            f"gossip; lower the learning rate or clip gradients, and resume from a checkpoint"
        )


def all_finite(x: Tensor) -> Tensor:
    """Returns whether no entry is NaN or infinite, as a tensor on x's device: the host does not wait for it."""
    return torch.tensor(is_finite(x)) if x.device.type == "cpu" else torch.isfinite(x).all()


def check_late(comm: Comm, mean: Tensor, finite_here: Tensor) -> None:
    """Raises for a mean that is not finite, as `raise_not_finite`: at once, or on a device when the next step begins.

    Args:
        comm: the channel of the mean.
        mean: the same on all ranks, so either all of them raise or none does.
        finite_here: whether this rank's input was finite.
    """
    step = comm.meter.step

    def act(values: Sequence[float]) -> None:
        if not values[0]:
            raise_not_finite(comm, bool(finite_here), step)

    comm.late.read(all_finite(mean), act)


def raise_not_finite(comm: Comm, finite_here: bool, step: int) -> NoReturn:
    """Raises for a mean that is not finite. All ranks call it, since all have the same mean.

    Args:
        comm: the channel of the mean.
        finite_here: whether this rank's input was finite.
        step: of the mean.

    Raises:
        FloatingPointError: names the ranks whose input was not finite.
    """
    finite = comm.meet("a mean that is not finite", finite_here)
    culprits = [str(rank) for rank, is_fine in zip(comm.members, finite, strict=True) if not is_fine]
    where = f"on rank {', '.join(culprits)}" if culprits else "in the sum, though finite on every rank"
    raise_together(comm, FloatingPointError(f"mean at step {step}: NaN or infinity {where}"))


def raise_together(comm: Comm, error: Exception) -> NoReturn:
    """Raises an error that all ranks raise, after they have learned of it at a meeting.

    If the rank that holds the job's store left with the error at once, others might not have read it yet, and would
    report that rank instead.
    """
    with suppress(PeerError):  # whoever cannot read the store any more knows the error already
        comm.meet("an error of all ranks")
    raise error
