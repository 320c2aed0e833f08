"""Averages of messages that all ranks have saved in flight, for a run with another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from laconic.comm.coded_mean import CodedMean
from laconic.comm.comm import Comm, Pending
from laconic.comm.solo import Arrived


@dataclass(frozen=True)
class _Seat:
    """The place of a rank in the run that saved. As a comm it hands an owner's answer back instead of sending it."""

    rank: int
    size: int

    def all_to_all_async(self, chunks: Sequence[Tensor], *, lengths: Sequence[int]) -> Pending[Tensor]:
        return Arrived(chunks[0])


def seat(rank: int, size: int) -> Comm:
    """Returns a stand-in for the comm of a rank in the run that saved, for a `CodedMean` to decode with."""
    return cast(Comm, _Seat(rank, size))


def average_saved(
    what: str, transfers: Sequence[dict[str, Any]], make: Callable[[Comm], CodedMean], *, answered: bool
) -> Tensor:
    """Returns the average of a message that all ranks saved in flight; owners answer now if they had not.

    Args:
        what: the message, in errors.
        transfers: what each rank has saved.
        make: returns the mean of the rank that a comm stands for, with its owner's residual.
        answered: whether owners had answered.
    """
    answers = []
    for rank, saved in enumerate(transfers):
        mean = make(seat(rank, len(transfers)))
        mean.check_saved(f"{what} of rank {rank}", saved, saved["step"], answered)
        transfer = mean.restore(saved)
        if answered:  # what has arrived is the same on all ranks
            return mean.receive(transfer)
        mean.answer(transfer)
        answers.append(transfer.pending.wait())
    transfer.pending = Arrived(answers)
    return mean.receive(transfer)
