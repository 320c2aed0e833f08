"""Periodic averaging (local SGD, also CPSGD): workers step alone and average their parameters every `period` steps.

Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from laconic.method import Method, Replica, check_choice, check_count


@dataclass
class LocalSGD(Method):
    """The mean of the parameters every `period` steps.

    `moments="averaged"` also averages the optimizer's state (momentum, Adam's m and v) in each round.
    Bytes a round and worker: 2(n−1)/n · 4d, and as much again for each averaged state vector.
    """

    paper: ClassVar[str] = "arXiv 1805.09767"

    period: int = 8
    moments: Literal["local", "averaged"] = "local"

    def __post_init__(self) -> None:
        check_count("period", self.period)
        check_choice("moments", self.moments, ("local", "averaged"))

    def after_step(self, worker: Replica) -> None:
        if worker.step % self.period:
            return
        worker.comm.mean(worker.x, out=worker.x)
        if self.moments == "averaged":
            for vector in worker.moments().values():
                worker.comm.mean(vector, out=vector)
