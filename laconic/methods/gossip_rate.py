"""When exchanges of gossip are due, and a warning if they are not made as often."""

from __future__ import annotations

import random
from dataclasses import dataclass

from laconic.log import warn

WINDOW = 100  # steps over which the rate is measured
SLOW_RATE = 0.02  # exchanges per step, below which `rate="auto"` warns


def due_exchanges(rate: float, rank: int, step: int) -> int:
    """Returns how many exchanges a worker starts to seek in this step: a Poisson process, the same in every run.

    Args:
        rate: the expected number.
        rank: of the worker.
        step: the worker's step.

    >>> [due_exchanges(1.0, rank=0, step=step) for step in range(12)]
    [0, 1, 0, 1, 3, 1, 0, 2, 1, 1, 1, 1]
    """
    rng, due = random.Random((rank << 40) + step), 0
    time = rng.expovariate(rate)
    while time < 1:
        due += 1
        time += rng.expovariate(rate)
    return due


@dataclass
class RateWatch:
    """Warns once if a worker's gossip does not keep up with its training.

    Args:
        rank: of the worker.
        nbytes: of one exchange of all parameters.
    """

    rank: int
    nbytes: int
    start: float | None = None  # when the first step ended
    steps: int = 0
    waits: int = 0  # steps in which training waited
    waited: float = 0.0  # seconds
    has_warned: bool = False

    def add_step(self, now: float) -> None:
        """Counts a step."""
        self.start = now if self.start is None else self.start
        self.steps += 1

    def add_wait(self, seconds: float) -> None:
        """Counts a wait of the training for exchanges."""
        self.waits += 1
        self.waited += seconds

    def check(self, asked: float | None, reached: float, now: float) -> None:
        """Warns if exchanges are too rare, or training waits for them in most steps.

        Args:
            asked: the `rate` that was set; None for "auto".
            reached: exchanges per step in the last `WINDOW` steps.
            now: the time.
        """
        if self.has_warned or self.steps < WINDOW or self.start is None:
            return
        if asked is None and reached < SLOW_RATE:
            text = (
                f'gossip reaches {reached:.2g} exchanges per step, and rate="auto" asks for up to 1: the link is slow '
                f"for exchanges of {self.nbytes / 1e6:.3g} MB, so workers drift apart"
            )
        elif asked is not None and 2 * self.waits > self.steps:
            unhindered = reached * max(0.0, 1 - self.waited / max(1e-9, now - self.start))
            text = (
                f"training waited for gossip in {self.waits} of {self.steps} steps: rate={asked:g} asks for {asked:g} "
                f"exchanges of {self.nbytes / 1e6:.3g} MB per step, and without waiting about {unhindered:.2g} would "
                f'be reached; lower the rate, or set rate="auto"'
            )
        else:
            return
        self.has_warned = True
        warn(f"rank {self.rank}, step {self.steps}: {text}", stacklevel=2)
