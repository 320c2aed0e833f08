"""ADPSGD: workers average their parameters as often as the variance among them asks.

Jiang and Agrawal, "Adaptive Periodic Averaging: A Practical Approach to Reducing Communication in Distributed
Learning", arXiv 2007.06134. (Not AD-PSGD, the asynchronous gossip of Lian et al.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.compress import Compressor
from laconic.method import Replica, check_choice, check_count, state
from laconic.methods.averaging import Averaging, Moments, check_compressor


@dataclass
class ADPSGD(Averaging):
    """Rounds of averaging whose period follows the variance S among workers, so that S / γ stays what it was.

    While calibrating, the period is `initial_period`, and C becomes the mean of S / γ, γ the learning rate. After that
    each round compares S with γC: below `low` · γC the period grows by one, above `high` · γC it shrinks by one. Where
    S, γ or C is 0 there is nothing to compare, and the period stays. The learning rate must be the same on all ranks.

    Args:
        initial_period: steps between rounds until the end of calibration.
        total_steps: of the whole training; only the default of `calibration` depends on it.
        warmup: steps at the start with a round after each. Let it cover a warm-up of the learning rate.
        calibration: steps after the warm-up; by default a quarter of `total_steps`, or 200 where that is not given. It
            lasts until the first round with γ > 0 at least.
        low, high: bounds of S / γC, between which the period stays. 0 and `inf` make it constant.
        max_period: a learning rate that goes to 0 would drive the period up without end.
        moments: `"averaged"` also averages the optimizer's state (momentum, Adam's m and v) in each round.
        compressor: of the differences that travel, with error feedback; such as `Uniform(4)`.

    Bytes a round and worker: 2(n−1)/n · (4d + 4), and 2(n−1)/n · 4d for each averaged state vector. With a compressor
    2(n−1)/n of its code (n codes, one of each n-th of the vector) and 8(n−1), instead of the first term.
    """

    paper: ClassVar[str] = "arXiv 2007.06134"

    initial_period: int = 4
    total_steps: int | None = None
    warmup: int = 0
    calibration: int | None = None
    low: float = 0.7
    high: float = 1.3
    max_period: int = 64
    moments: Moments = "local"
    compressor: Compressor | None = None

    period: int = state(0)
    C: float = state(0.0)  # the mean of S / γ while calibrating
    samples: int = state(0)  # rounds that C is the mean of

    def __post_init__(self) -> None:
        check_count("initial_period", self.initial_period)
        check_count("warmup", self.warmup, least=0)
        check_count("max_period", self.max_period)
        for name in ("total_steps", "calibration"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if not 0 <= self.low < self.high:
            raise ValueError(f"low must be at least 0 and less than high={self.high!r}, not {self.low!r}")
        if self.initial_period > self.max_period:
            raise ValueError(f"initial_period must be at most max_period={self.max_period}, not {self.initial_period}")
        check_choice("moments", self.moments, ("local", "averaged"))
        check_compressor(self.compressor)
        self.period = self.initial_period

    def setup(self, worker: Replica) -> None:
        self.prepare(worker, self.compressor)

    def after_step(self, worker: Replica) -> None:
        self.steps_since_round += 1
        if self.steps_since_round < (1 if worker.step <= self.warmup else self.period):
            return
        S = self.average(worker, self.moments, self.compressor)
        if worker.step > self.warmup:
            self.adapt(S, worker.lr, worker.step)

    def adapt(self, S: float, lr: float, step: int) -> None:
        """The next period. Ranks hang if they differ in it: nothing here may come from one rank alone."""
        if step <= self.calibration_end or self.samples == 0:
            if lr > 0:
                self.samples += 1
                self.C += (S / lr - self.C) / self.samples
            return
        target = lr * self.C
        if S == 0 or target == 0:
            return
        if self.low * target > S:
            self.period = min(self.period + 1, self.max_period)
        elif self.high * target < S:
            self.period = max(self.period - 1, 1)

    @property
    def calibration_end(self) -> int:
        """The last step of calibration."""
        if self.calibration is not None:
            return self.warmup + self.calibration
        return self.warmup + (200 if self.total_steps is None else self.total_steps // 4)

    def metrics(self) -> dict[str, float]:
        return {"period": float(self.period)} | super().metrics()
