"""Gradients corrected by stale news of the mean gradient, so that workers with different data move alike.

The idea of SCAFFOLD (Karimireddy et al., arXiv 1910.06378): g + (mean of what all had − what this worker had).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.compress import Compressor
from laconic.method import Replica
from laconic.methods.carried import Carried


class Correction(Carried):
    """Sums a worker's own gradients, gives the mean since the last time for sending, and adds what came of it."""

    def __init__(self, worker: Replica, row: int) -> None:
        self.total = torch.zeros_like(worker.x)  # of the own gradients since they were last sent (d)
        self.shift = torch.zeros_like(worker.x)  # mean of all − own, as last known (d)
        self._views = [worker.views(vector) for vector in (self.total, self.shift)]
        # Columns in the order in which their turn comes, as [how many, the step they were last sent in].
        self._turns = [[row, 0]]
        self._ages: list[tuple[int, int]] = []  # of what is being taken: columns, and the steps of which it is the sum

    def correct(self, worker: Replica) -> None:
        for gradient, total, shift in zip(worker.gradients(), *self._views, strict=True):
            if gradient is not None:
                total += gradient
                gradient += shift

    def begin(self, columns: int, step: int) -> None:
        """The next `columns` of each part are about to be taken."""
        self._ages = [(number, step - last) for number, last in self._pass(columns, step)]

    def take(self, part: slice) -> Tensor:
        """The mean own gradient since these coordinates were last taken."""
        total = self.total[part]
        mean = torch.empty_like(total)
        first = 0
        for columns, age in self._ages:
            torch.div(total[first : first + columns], age, out=mean[first : first + columns])
            first += columns
        total.zero_()
        return mean

    def put(self, part: slice, mean: Tensor, own: Tensor) -> None:
        torch.sub(mean, own, out=self.shift[part])

    def settle(
        self,
        part: slice,
        compressor: Compressor,
        codes: Sequence[Tensor],
        weights: Sequence[float],
        own: int,
        step: int,
    ) -> None:
        compressor.settle(codes, weights, own, self.shift[part], step=step)

    def _pass(self, columns: int, step: int) -> list[list[int]]:
        """The turns of the next columns: how many, and the step they were last sent in."""
        passed, left = [], columns
        while left:
            number, last = self._turns.pop(0)
            taken = min(number, left)
            passed.append([taken, last])
            left -= taken
            if taken < number:
                self._turns.insert(0, [number - taken, last])
        self._turns.append([columns, step])
        return passed

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "shift": self.shift, "turns": self._turns}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.total.copy_(saved["total"])
        self.shift.copy_(saved["shift"])
        self._turns = saved["turns"]
