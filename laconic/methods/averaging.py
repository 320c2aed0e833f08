"""A round of periodic averaging: all workers take the mean of their parameters, and learn how far apart they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from laconic.anchor import lay_anchor, move_anchor, squared_distance
from laconic.compress import Compressor
from laconic.method import Method, Replica, state
from laconic.methods.coded_mean import coded_mean, shard_slices

Moments = Literal["local", "averaged"]
# A difference of two squared distances that is smaller than this part of them is nothing but rounding.
ROUNDING = 8 * torch.finfo(torch.float32).eps
# The anchor moves when x̄ has left it by this many S: near enough for three digits of S, and seldom.
DRIFT = 1000.0


@dataclass
class Averaging(Method):
    """What the methods that average parameters now and then have in common; they differ in when.

    S = mean ‖x_i − x̄‖², the variance among workers before the round, is mean ‖x_i − c‖² − ‖x̄ − c‖² for any point c that
    all share. With c far away all digits cancel; here it is the `anchor`, x after some earlier round in half the bytes.
    Of ‖x_i − c‖² only what the steps since then have added travels: fewer digits to lose in fp32.

    With a compressor the anchor is exact, and the code of x_i − anchor + residual_i travels.
    """

    rounds: int = state(0)
    steps_since_round: int = state(0)
    variance: float | None = state()  # S of the last round; None before the first
    mean_variance: float = state(0.0)  # over all steps so far, each with the S of the round that ended it
    anchor: Tensor = state()
    offset: float = state(0.0)  # ‖x − anchor‖² when the anchor was laid
    residual: Tensor | None = state()  # what the codes of this worker have failed to say
    shard_residual: Tensor | None = state()  # the same of the codes of the mean of its shard

    def prepare(self, worker: Replica, compressor: Compressor | None) -> None:
        if compressor is None:
            self.anchor, self.offset = lay_anchor(worker.x)
            return
        self.anchor = worker.x.to(torch.promote_types(worker.x.dtype, torch.float32), copy=True)
        self.residual = torch.zeros_like(self.anchor)
        mine = shard_slices(self.anchor.numel(), worker.comm.size)[worker.comm.rank]
        self.shard_residual = torch.zeros_like(self.anchor[mine])

    def average(self, worker: Replica, moments: Moments, compressor: Compressor | None) -> float:
        """The round. Afterwards x is bit-identical on all ranks; S, which it returns, is the same number there."""
        steps, self.steps_since_round = self.steps_since_round, 0
        self.rounds += 1
        if worker.comm.size == 1:
            worker.comm.mean(worker.x, out=worker.x)  # changes nothing, and raises if x is not finite
            self.variance = 0.0
            return 0.0
        S, distance = self._take_mean(worker) if compressor is None else self._take_coded_mean(worker, compressor)
        self.variance = S if ROUNDING * distance < S else 0.0
        self.mean_variance += (self.variance - self.mean_variance) * steps / worker.step
        if moments == "averaged":
            for vector in worker.moments().values():
                worker.comm.mean(vector, out=vector)
        return self.variance

    def _take_mean(self, worker: Replica) -> tuple[float, float]:
        """S, and the squared distance it is a difference of."""
        own = squared_distance(worker.x, self.anchor) - self.offset
        mean = mean_with_scalar(worker, own)
        distance = squared_distance(worker.x, self.anchor)
        drift = distance - self.offset
        S = mean - drift
        if drift > DRIFT * S:
            self.offset = move_anchor(worker.x, self.anchor)
        return S, distance

    def _take_coded_mean(self, worker: Replica, compressor: Compressor) -> tuple[float, float]:
        """The same for d_i = x_i − anchor in codes. S is off by what the codes fail to say of the mean of d_i."""
        difference = worker.x - self.anchor
        own = torch.tensor([squared_norm(difference)], dtype=torch.float64, device=difference.device)
        everyones_norms = coded_mean(
            worker.comm,
            difference,
            compressor,
            step=self.rounds,
            rider=own.view(torch.uint8),
            residual=self.residual,
            shard_residual=self.shard_residual,
        )
        self.anchor += difference
        worker.x.copy_(self.anchor)
        mean = torch.stack(everyones_norms).view(torch.float64).mean().item()
        of_mean = squared_norm(difference)
        return mean - of_mean, of_mean

    def metrics(self) -> dict[str, float]:
        if self.variance is None:
            return {}
        return {"rounds": float(self.rounds), "variance": self.variance, "mean_variance": self.mean_variance}


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


def squared_norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2


def check_compressor(compressor: object) -> None:
    if compressor is not None and not isinstance(compressor, Compressor):
        raise ValueError(f"compressor must be None or a compressor such as Uniform(4), not {compressor!r}")
