"""How many steps a background transfer must span to be hidden: measured, and agreed by all workers."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence

import torch

from laconic.comm import Comm

FIRST = 3  # the step measuring starts in: before, things are loaded, compiled and connected
START = 4  # the period until one is measured: a few steps may wait, where a long one would begin with workers apart
WINDOW = 3  # steps measured at a time
ROUNDS = 2  # windows in a row at the start: a piece's fixed costs show only when pieces have the right size
INTERVAL = 200  # steps from one window to the next, later
MARGIN = 1.1
ROOM = 2.0  # the same for a code: a link that is never idle takes more from computing than finer codes give
AMPLE_ROOM = 4.0  # where all codes are allowed, which is where coarse ones are as good
WORTH = 0.8  # of a period or a code: what less is worth following the measurements for


class Pace:
    """Takes, in some steps, the seconds a worker computed and the seconds a piece took; gives the period.

    `sizes`: what codes to choose from take, the largest first. A smaller one is chosen where one is too large for the
    least period: a long period costs more than coarse codes, which say later what they have left out. The first
    `allowed` of them may be chosen, and until there are measurements the smallest is.
    """

    def __init__(
        self,
        comm: Comm,
        least: int,
        most: int,
        sizes: Sequence[float] = (1.0,),
        allowed: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self.least, self.most = min(least, most), most
        self.allowed = min(allowed, len(sizes))
        self.hoped = len(sizes)  # so many may be allowed yet
        self.code = self.allowed - 1  # its number among the sizes
        self._sizes, self._asked = list(sizes), self.least
        self.period = max(self.least, min(START, most))
        self.samples: list[list[float]] = []  # [seconds of computing, seconds of a full transfer]
        self.measured: list[float] = []  # the same, as last agreed
        self.next_window, self.rounds = FIRST, 0
        self.has_warned = False
        self._comm, self._device = comm, device

    @property
    def is_settled(self) -> bool:
        """Whether the first measurements are over."""
        return self.rounds >= ROUNDS

    def is_measuring(self, step: int) -> bool:
        """The same on all ranks."""
        return step >= self.next_window

    def add(self, step: int, computing: float, transfer: float) -> None:
        """The measured seconds of one step; `transfer` as if the piece had been everything."""
        self.samples.append([computing, transfer])
        if len(self.samples) < WINDOW:
            return
        medians = [statistics.median(column) for column in zip(*self.samples, strict=True)]
        own = torch.tensor(medians, dtype=torch.float64, device=self._device)
        # The slowest worker sets the time of a step, and the slowest link that of a transfer.
        computing, transfer = torch.stack(self._comm.all_gather(own)).amax(0).tolist()
        self.measured = [computing, self._choose(computing, transfer)]
        self._decide(*self.measured)
        self.samples = []
        self.rounds += 1
        self.next_window = step + (1 if self.rounds < ROUNDS else INTERVAL)

    def lower(self, least: int) -> None:
        """Allow shorter periods. On all ranks in the same step."""
        if least < self.least:
            self.least = least
            if self.is_settled:
                self._decide(*self.measured)

    def allow(self, codes: int) -> None:
        """The first so many. On all ranks in the same step."""
        if codes == self.allowed:
            return
        self.hoped = codes if codes < self.allowed else max(codes, self.hoped)
        self.allowed = min(codes, len(self._sizes))
        self.samples = []  # they are of the code before
        if self.is_settled:
            self.measured[1] = self._choose(*self.measured)
            self._decide(*self.measured)
        else:
            self.code = min(self.code, self.allowed - 1)

    def _choose(self, computing: float, transfer: float) -> float:
        """A code, and the seconds that a transfer takes with it."""
        largest = transfer / self._sizes[self.code]
        room = ROOM if self.allowed < len(self._sizes) else AMPLE_ROOM

        def fits(code: int, margin: float) -> bool:
            return margin * largest * self._sizes[code] <= self._asked * computing

        self.code = min(self.code, self.allowed - 1)
        while self.code > 0 and fits(self.code - 1, room / WORTH if self.is_settled else room):
            self.code -= 1
        while self.code < self.allowed - 1 and not fits(self.code, room):
            self.code += 1
        return largest * self._sizes[self.code]

    def _decide(self, computing: float, transfer: float) -> None:
        needed = max(self.least, math.ceil(MARGIN * transfer / max(computing, 1e-9)))
        at_best = MARGIN * transfer * self._sizes[self.hoped - 1] / self._sizes[self.code]
        if at_best > self.most * computing and self.rounds >= ROUNDS - 1 and not self.has_warned:
            self.has_warned = True
            if self._comm.rank == 0:
                warnings.warn(
                    f"the link is too slow for max_period={self.most}: sending everything takes {transfer:.3g} s "
                    f"and computing a step {computing:.3g} s, so the background would need a period of {needed}; "
                    f"steps will wait for it",
                    stacklevel=2,
                )
        # Later, a slightly shorter period is not worth following the noise for.
        if needed > self.period or needed <= WORTH * self.period or not self.is_settled:
            self.period = min(needed, self.most)

    def state_dict(self) -> dict[str, object]:
        names = [
            "period",
            "least",
            "code",
            "allowed",
            "hoped",
            "samples",
            "measured",
            "next_window",
            "rounds",
            "has_warned",
        ]
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, saved: dict[str, object]) -> None:
        self.__dict__.update(saved)
