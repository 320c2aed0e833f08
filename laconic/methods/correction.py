"""Gradients corrected by stale news of the mean gradient, so that workers with different data move alike.

The idea of SCAFFOLD (Karimireddy et al., arXiv 1910.06378): g + (mean of what all had − what this worker had).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.method import Replica


class Correction:
    """Sums a worker's own gradients, gives the mean since the last time for sending, and adds what came of it."""

    def __init__(self, worker: Replica, row: int) -> None:
        self.total = torch.zeros_like(worker.x)  # of the own gradients since they were last sent (d)
        self.shift = torch.zeros_like(worker.x)  # mean of all − own, as last known (d)
        self._views = [worker.views(vector) for vector in (self.total, self.shift)]
        # Columns in the order in which their turn comes, as [how many, the step they were last sent in].
        self._turns = [[row, 0]]

    def correct(self, worker: Replica) -> None:
        for gradient, total, shift in zip(worker.gradients(), *self._views, strict=True):
            if gradient is not None:
                total += gradient
                gradient += shift

    def take(self, parts: list[slice], step: int) -> Tensor:
        """The mean own gradient of the next columns since they were last taken."""
        lengths = [part.stop - part.start for part in parts]
        mean = torch.cat([self.total[part] for part in parts])
        turns = self._pass(lengths[0], step)
        for part, own in zip(parts, torch.split(mean, lengths), strict=True):
            self.total[part] = 0
            first = 0
            for columns, last in turns:
                own[first : first + columns] /= step - last
                first += columns
        return mean

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
