"""Warns if workers keep moving in different directions, which means that their data is not iid."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.log import warn

SAMPLE = 2048  # the last entries of the model: a classifier's head, where different labels show first
SWEEPS = 32  # observed before deciding: momentum alone keeps differences alive for some ten steps
PERSISTENT = 0.5  # share of the squared differences that lasts


class DifferenceWatch:
    """Observes the difference between the average move and this worker's, sweep by sweep, in a few entries.

    On iid data differences are noise: their sum over N sweeps has about N times the square of one, or a few times that
    because momentum repeats them. On non-iid data they repeat themselves, and their sum has N² times that.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sum = torch.zeros(0)
        self._squares, self._sweeps = torch.zeros((), dtype=torch.float64), 0

    def add(self, step: int, is_last_piece: bool, average: Tensor, own: Tensor) -> None:
        """Adds one piece; only the last piece of a sweep counts. Warns once, after `SWEEPS` of them."""
        if not is_last_piece or self._sweeps >= SWEEPS:
            return
        difference = average[-SAMPLE:].double() - own[-SAMPLE:].double()
        if len(self._sum) != len(difference):  # the first sweep, or the period has changed
            self._sum, self._squares, self._sweeps = torch.zeros_like(difference), difference.new_zeros(()), 0
        self._sum += difference
        self._squares += difference.square().sum()
        self._sweeps += 1
        if self._sweeps == SWEEPS and self.persistence() > PERSISTENT:
            warn(
                f"rank {self._rank}, step {step}: workers have moved in different directions for {SWEEPS} sweeps, so "
                f"their data seems to be non-iid. Divisible(corrected=True) is meant for that; or shuffle the data "
                f"over workers with a DistributedSampler",
                stacklevel=2,
            )

    def persistence(self) -> float:
        """Returns ‖Σ difference‖² / (N·Σ ‖difference‖²): 1 if all differences are equal, about 1/N if independent."""
        total = self._sweeps * float(self._squares)
        return float(self._sum.square().sum()) / total if total > 0 else 0.0
