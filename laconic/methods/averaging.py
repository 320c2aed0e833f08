"""A round of periodic averaging: all workers take the mean of their parameters, and learn how far apart they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from laconic.anchor import lay_anchor, move_anchor, squared_distance
from laconic.method import Method, Replica, state

Moments = Literal["local", "averaged"]
# A difference of two squared distances that is smaller than this part of them is nothing but rounding.
ROUNDING = 8 * torch.finfo(torch.float32).eps


@dataclass
class Averaging(Method):
    """What the methods that average parameters now and then have in common; they differ in when.

    S = mean ‖x_i − x̄‖², the variance among workers before the round, is mean ‖x_i − c‖² − ‖x̄ − c‖² for any point c that
    all share. With c far away all digits cancel; here it is the `anchor`, x after the last round in half the bytes. Of
    ‖x_i − c‖² only the part that the workers' steps since then have added travels: less digits to lose in fp32.
    """

    steps_since_round: int = state(0)
    variance: float | None = state()  # S of the last round; None before the first
    anchor: Tensor = state()
    offset: float = state(0.0)  # ‖x − anchor‖² after the last round

    def setup(self, worker: Replica) -> None:
        self.anchor, self.offset = lay_anchor(worker.x)

    def average(self, worker: Replica, moments: Moments) -> float:
        """The round. Afterwards x is bit-identical on all ranks, and S is the same number."""
        self.steps_since_round = 0
        if worker.comm.size == 1:
            worker.comm.mean(worker.x, out=worker.x)  # changes nothing, and raises if x is not finite
            self.variance = 0.0
            return 0.0
        own = squared_distance(worker.x, self.anchor) - self.offset
        mean = mean_with_scalar(worker, own)
        before, after = move_anchor(worker.x, self.anchor)
        S = mean - (before - self.offset)
        self.variance = S if ROUNDING * before < S else 0.0
        self.offset = after
        if moments == "averaged":
            for vector in worker.moments().values():
                worker.comm.mean(vector, out=vector)
        return self.variance

    def metrics(self) -> dict[str, float]:
        return {} if self.variance is None else {"variance": self.variance}


def mean_with_scalar(worker: Replica, scalar: float) -> float:
    """Make x its mean over workers, in one all-reduce with a number; the mean of that.

    A model of 16-bit floats travels in fp32: its own type would leave two digits of the number.
    """
    both = worker.x_and_scalar
    message = both if torch.finfo(both.dtype).bits >= 32 else both.float()
    message[-1] = scalar
    worker.comm.mean(message, out=message)
    if message is not both:
        both.copy_(message)
    return float(message[-1])
