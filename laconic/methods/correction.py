"""Gradients corrected by news of the mean gradient, which travel in the background."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.method import Replica
from laconic.methods.carried import Carried, Codes
from laconic.methods.pieces import Piece
from laconic.methods.ranges import Ranges, seen_from


class Correction(Carried):
    """Gradients corrected by the stale mean gradient, so that workers with different data move alike.

    The idea of SCAFFOLD (Karimireddy et al., arXiv 1910.06378): g + (mean of what all had − what this worker had).
    """

    def __init__(self, worker: Replica) -> None:
        self.total = torch.zeros_like(worker.x)  # of the own gradients since they were last sent (d)
        self.shift = torch.zeros_like(worker.x)  # mean of all − own, as last known (d)
        self.sent = Ranges([[worker.x.numel(), 0]])  # the step in which they last were
        self._totals, self._shifts = worker.views(self.total), worker.views(self.shift)

    def before_step(self, worker: Replica) -> None:
        for gradient, total, shift in zip(worker.gradients(), self._totals, self._shifts, strict=True):
            if gradient is not None:
                total += gradient
                gradient += shift

    def take(self, piece: Piece, part: slice) -> Tensor:
        total = self.total[part]
        mean = torch.empty_like(total)
        for run, last in self.sent.within(part):
            here = seen_from(run, part)
            torch.div(total[here], piece.step - last, out=mean[here])
        self.sent.raise_to(part, piece.step)
        total.zero_()
        return mean

    def put(self, piece: Piece, part: slice, mean: Tensor, own: Tensor) -> None:
        torch.sub(mean, own, out=self.shift[part])

    def settle(self, piece: Piece, part: slice, codes: Codes) -> None:
        codes.settle(self.shift[part])

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "shift": self.shift, "sent": self.sent.entries}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.total.copy_(saved["total"])
        self.shift.copy_(saved["shift"])
        self.sent.entries = saved["sent"]
