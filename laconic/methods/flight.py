"""A piece of x under way: its messages, when they are waited for, and what of it is saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.comm.coded_mean import CodedMean, PlainMean, Transfer
from laconic.forms import Choice, Fields, Form, Plain, Row, Whole


@dataclass
class Flight:
    """One piece under way: a transfer for each vector that travels."""

    piece: slice
    due: int  # the step in which its next message is waited for
    means: Sequence[CodedMean | PlainMean]
    transfers: list[Transfer]
    answered: int = 0

    @property
    def has_hops_left(self) -> bool:
        return self.answered < self.means[0].hops - 1

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

    @staticmethod
    def agreed(saved: dict[str, Any], hops: int) -> dict[str, Any]:
        """Returns what is the same on all ranks of a saved flight: of its messages only those of the last hop."""
        is_last = saved["answered"] == hops - 1
        return {**saved, "transfers": [one["arrived"] if is_last else None for one in saved["transfers"]]}

    @classmethod
    def restore(cls, saved: dict[str, Any], means: Sequence[CodedMean | PlainMean], device: torch.device) -> Flight:
        transfers = [mean.restore(one, device) for mean, one in zip(means, saved["transfers"], strict=True)]
        return cls(slice(*saved["piece"]), saved["due"], means, transfers, saved["answered"])
