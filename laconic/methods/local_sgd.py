"""Periodic averaging (local SGD, also CPSGD): workers step alone and average their parameters every `period` steps.

Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.compress import Compressor
from laconic.method import Replica, check_choice, check_count
from laconic.methods.averaging import Averaging, Moments, check_compressor


@dataclass
class LocalSGD(Averaging):
    """The mean of the parameters every `period` steps: ADPSGD with a period that stays.

    `moments="averaged"` also averages the optimizer's state (momentum, Adam's m and v) in each round.
    `compressor` and the bytes are as in ADPSGD.
    """

    paper: ClassVar[str] = "arXiv 1805.09767"

    period: int = 8
    moments: Moments = "local"
    compressor: Compressor | None = None

    def __post_init__(self) -> None:
        check_count("period", self.period)
        check_choice("moments", self.moments, ("local", "averaged"))
        check_compressor(self.compressor)

    def setup(self, worker: Replica) -> None:
        self.prepare(worker, self.compressor)

    def after_step(self, worker: Replica) -> None:
        self.steps_since_round += 1
        if self.steps_since_round == self.period:
            self.average(worker, self.moments, self.compressor)
