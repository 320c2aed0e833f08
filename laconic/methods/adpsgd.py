"""ADPSGD: workers average their parameters periodically, more often while they drift apart faster.

Jiang and Agrawal, "Adaptive Periodic Averaging: A Practical Approach to Reducing Communication in Distributed
Learning", arXiv 2007.06134. (Not AD-PSGD, the asynchronous gossip of Lian et al.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from laconic.compress import Compressor
from laconic.forms import Form, Real, Whole
from laconic.method import Replica, check_choice, check_count, check_number, state
from laconic.methods.averaging import Averaging, Moments, check_compressor

CALIBRATION_ROUNDS = 10  # where the length of the training is not known


@dataclass
class ADPSGD(Averaging):
    """Averages the parameters with a period that follows the variance S among workers, so that S / γ stays constant.

    During calibration the period is `initial_period`, and C becomes the mean of S / γ, where γ is the learning rate.
    After that, each round compares S with γC:

        S < low · γC   →  period + 1
        S > high · γC  →  period − 1

    Where S, γ or C is 0 there is nothing to compare, and the period stays. The learning rate must be the same on all
    ranks.

    With the defaults there are never more rounds than with `LocalSGD(8)`, however long the training is.

    Args:
        initial_period: steps between two rounds of averaging until the end of calibration.
        total_steps: length of the training; only the default of `calibration` depends on it.
        warmup: steps at the start with a round after each. It should cover a warm-up of the learning rate.
        calibration: steps after the warm-up; by default a quarter of `total_steps`, or 10 rounds if that is not given.
            It lasts at least until the first round with γ > 0.
        low: below low · γC the period grows by one.
        high: above high · γC it shrinks by one. `low=0, high=math.inf` makes the period constant.
        min_period: the period shrinks to this, `initial_period` by default. A smaller one keeps S / γ constant also
            where S / γ grows after the calibration, and then sends more.
        max_period: bound of the period, which a learning rate that goes to 0 would increase forever.
        moments: `"averaged"` also averages the optimizer's state (momentum, Adam's m and v), uncompressed.
        moments_every: rounds between two averages of the optimizer's state.
        compressor: quantizes what is sent, with error feedback; such as `Uniform(4)`.

    Bytes per round and worker: 2(n−1)/n · (4d + 4), and 2(n−1)/n · 4d for each state vector in rounds that
    average these. With a compressor, 2(n−1)/n quantized vectors (as n separate parts) and 8(n−1) bytes instead of the
    first term.

    A checkpoint of another number of workers: all start from mean(x) with the same period, C and anchor. With a
    compressor, every worker gets the mean of the residuals, and the owners' residuals are cut anew, so that what is
    still to be sent is kept. No messages are in flight between steps.

    >>> import torch, laconic
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.Worker(model, optimizer, laconic.ADPSGD(initial_period=2)) as worker:
    ...     for _ in range(5):
    ...         model(torch.ones(3)).backward()
    ...         optimizer.step()
    >>> worker.method.period
    2
    """

    paper: ClassVar[str] = "arXiv 2007.06134"

    initial_period: int = 8
    total_steps: int | None = None
    warmup: int = 0
    calibration: int | None = None
    low: float = 0.7
    high: float = 1.3
    min_period: int | None = None
    max_period: int = 64
    moments: Moments = "local"
    compressor: Compressor | None = None
    moments_every: int = 1

    period: int = state(0, merge="same")
    C: float = state(0.0, form=Real(0), merge="same")  # the mean of S / γ over the rounds of calibration
    samples: int = state(0, form=Whole(), merge="same")  # the number of these rounds

    def __post_init__(self) -> None:
        check_count("initial_period", self.initial_period)
        check_count("warmup", self.warmup, least=0)
        check_count("max_period", self.max_period)
        for name in ("total_steps", "calibration", "min_period"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_number("low", self.low, least=0)
        if not (isinstance(self.high, float) and self.high == math.inf):
            check_number("high", self.high)
        if not self.low < self.high:
            raise ValueError(f"low must be at least 0 and less than high={self.high!r}, not {self.low!r}")
        if self.min_period is not None and self.min_period > self.initial_period:
            raise ValueError(f"min_period must be at most initial_period={self.initial_period}, not {self.min_period}")
        if self.initial_period > self.max_period:
            raise ValueError(f"initial_period must be at most max_period={self.max_period}, not {self.initial_period}")
        check_choice("moments", self.moments, ("local", "averaged"))
        check_count("moments_every", self.moments_every)
        check_compressor(self.compressor)
        self.period = self.initial_period

    def setup(self, worker: Replica) -> None:
        self.prepare(worker, self.compressor)

    def state_forms(self, step: int) -> dict[str, Form]:
        bounds = {"period": Whole(self._least, self.max_period), "steps_since_round": Whole(0, self.max_period - 1)}
        return super().state_forms(step) | bounds

    def sends(self, worker: Replica) -> bool:
        return self._is_due(worker.step + 1, self.steps_since_round + 1)

    def _is_due(self, step: int, since_round: int) -> bool:
        return since_round >= (1 if step <= self.warmup else self.period)

    def after_step(self, worker: Replica) -> None:
        self.steps_since_round += 1
        if not self._is_due(worker.step, self.steps_since_round):
            return
        step, lr = worker.step, worker.lr

        def then(S: float) -> None:
            if step > self.warmup:
                before = self.period
                self.adapt(S, lr, step)
                if self.period != before:
                    self.require_one_period(worker, lr, step)

        self.average(worker, self.moments, self.compressor, self.moments_every, then)

    def require_one_period(self, worker: Replica, lr: float, step: int) -> None:
        """Raises if ranks disagree on the new period.

        S is the same everywhere, but each rank reads its own learning rate. If that differs, the periods may differ
        too, and rounds would average different steps. So a rank that changes its period meets the others; a rank that
        does not come is named in the error.
        """
        notes = worker.comm.meet("a new period", [self.period, lr])
        if any(note != notes[0] for note in notes):
            names = map(worker.comm.name_of, worker.comm.members)
            rates = ", ".join(f"{rate:g} on rank {name}" for name, (_, rate) in zip(names, notes, strict=True))
            raise ValueError(
                f"the learning rate must be the same on all ranks at step {step}, not {rates}: "
                f"a scheduler must see the same values on all ranks"
            )

    def adapt(self, S: float, lr: float, step: int) -> None:
        """Chooses the next period. Ranks that disagree would hang, so nothing here may come from one rank alone."""
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
            self.period = max(self.period - 1, self._least)

    @property
    def _least(self) -> int:
        return self.initial_period if self.min_period is None else self.min_period

    @property
    def calibration_end(self) -> int:
        """Returns the last step of calibration."""
        if self.calibration is not None:
            return self.warmup + self.calibration
        rounds = CALIBRATION_ROUNDS * self.initial_period
        return self.warmup + (rounds if self.total_steps is None else self.total_steps // 4)

    def metrics(self) -> dict[str, float]:
        return {"period": float(self.period)} | super().metrics()
