"""Which entries travel when, and what is in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.comm.coded_mean import CodedMean, PlainMean, Transfer
from laconic.forms import Choice, Fields, Form, Plain, Row, Whole

GRAIN = 2048  # entries; quantizers have blocks of this length, and vectors are read fastest where these begin


def next_piece(start: int, d: int, period: int) -> slice:
    """Returns the 1/period of d entries that begins at `start`, in whole grains where that adds little.

    >>> next_piece(0, d=10, period=4), next_piece(9, d=10, period=4)
    (slice(0, 3, None), slice(9, 10, None))
    """
    length = -(-d // max(period, 1))
    if length >= 16 * GRAIN:
        length = -(-length // GRAIN) * GRAIN
    return slice(start, min(start + length, d))


def foreground_block(step: int, d: int, ratio: int) -> slice:
    """Returns ⌈d/ratio⌉ consecutive entries (fewer at the end of the vector), the same on all workers.

    Every entry has its turn once in ⌈d/length⌉ ≤ ratio steps. Blocks of consecutive steps are far apart, so that none
    follows the background around.

    >>> [foreground_block(step, d=4, ratio=2) for step in (0, 1)]
    [slice(0, 2, None), slice(2, 4, None)]
    """
    length = -(-d // ratio)
    blocks = -(-d // length)
    stride = max(1, round(0.618 * blocks))
    while math.gcd(stride, blocks) > 1:
        stride += 1
    start = step * stride % blocks * length
    return slice(start, min(start + length, d))


def overlap(one: slice, other: slice) -> bool:
    return bool(max(one.start, other.start) < min(one.stop, other.stop))


@dataclass
class Flight:
    """One piece under way: a transfer for each vector that travels (moves, and gradients if these are corrected)."""

    piece: slice
    due: int  # the step in which its next message is waited for
    means: Sequence[CodedMean | PlainMean]
    transfers: list[Transfer]
    answered: int = 0

    def hops_left(self, hops: int) -> bool:
        return self.answered < hops - 1

    def answer(self) -> None:
        self.answered += 1
        for mean, transfer in zip(self.means, self.transfers, strict=True):
            mean.answer(transfer)

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.pending.wait()

    def receive(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the average and this worker's contribution, for each vector."""
        pairs = zip(self.means, self.transfers, strict=True)
        return [(mean.receive(transfer), mean.own(transfer)) for mean, transfer in pairs]

    def state_dict(self) -> dict[str, Any]:
        return {
            "piece": [self.piece.start, self.piece.stop],
            "due": self.due,
            "answered": self.answered,
            "codes": [None if mean.compressor is None else str(mean.compressor) for mean in self.means],
            "transfers": [transfer.state_dict() for transfer in self.transfers],
        }

    @staticmethod
    def form(d: int, step: int, delay: int, hops: int, codes: Sequence[tuple[str | None, ...]]) -> Form:
        """Returns what a saved flight must look like, but for its messages, which `check_saved` of its means checks.

        Args:
            d: the number of entries of the model.
            step: the step after which it was saved.
            delay: the most steps until its next message is due.
            hops: that its messages take.
            codes: for each vector that travels, the compressors that it may have been encoded with.
        """
        return Fields(
            {
                "piece": Row((Whole(0, d - 1), Whole(1, d))),
                "due": Whole(step + 1, step + delay),
                "answered": Whole(0, hops - 1),
                "codes": Row(tuple(Choice(choices) for choices in codes)),
                "transfers": Row((Plain(),) * len(codes)),
            }
        )

    @classmethod
    def restore(cls, saved: dict[str, Any], means: Sequence[CodedMean | PlainMean], device: torch.device) -> Flight:
        transfers = [mean.restore(one, device) for mean, one in zip(means, saved["transfers"], strict=True)]
        return cls(slice(*saved["piece"]), saved["due"], means, transfers, saved["answered"])
