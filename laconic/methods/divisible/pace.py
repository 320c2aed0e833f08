"""Chooses the period and the quantizer of the background from measured times, the same on all workers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from laconic.comm import Comm
from laconic.forms import Each, Fields, Flag, Form, Real, Whole
from laconic.log import warn

FIRST = 3  # the step in which measuring starts: before, kernels are loaded and connections made
WINDOW = 3  # steps measured at a time
NUMBERS = 3  # that a step adds: seconds of computing, sending and working
ROUNDS = 2  # windows in a row at the start: the fixed cost of a message shows only once pieces have the right size
INTERVAL = 200  # steps from one window to the next, later
MARGIN = 1.1  # a sweep takes at most period/MARGIN steps of computing
WORK = 0.05  # quantizing and applying may take this share of computing; a shorter period costs more
ROOM = 2.0  # the same for choosing a quantizer: a link that is never idle slows computing more than finer codes help
WORTH = 0.8  # a shorter period or a finer quantizer must be at most this much of the present one to be worth a change


@dataclass
class Pace:
    """Takes the seconds of computing, of sending and of own work, measured in some steps; decides the period and the
    quantizer.

    The wanted period is the shortest, between `least` and `first`, in which quantizing and applying the whole vector
    takes at most the share WORK of computing. A coarser quantizer is chosen only if the finest one does not fit into
    half of the wanted period, and a longer period only if the coarsest does not fit.

    Args:
        comm: agrees on the slowest worker and the slowest link.
        least: the shortest period.
        first: the period with which training starts. Own work never makes it longer, a slow link does.
        most: the longest period.
        sizes: bytes of the whole vector with each quantizer, the finest first.
    """

    comm: Comm
    least: int
    first: int
    most: int
    sizes: Sequence[float]
    device: torch.device | None = None

    period: int = field(init=False)
    choice: int = field(default=0, init=False)  # which quantizer; training starts with the finest
    samples: list[list[float]] = field(default_factory=list, init=False)  # [computing, sending, working], seconds
    next_window: int = field(default=FIRST, init=False)
    rounds: int = field(default=0, init=False)
    has_warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.least, self.first = min(self.least, self.most), min(self.first, self.most)
        self.period = self.first

    def is_measuring(self, step: int) -> bool:
        """Returns whether to measure in this step: the same answer on all ranks."""
        return step >= self.next_window

    def add(self, step: int, computing: float, sending: float, working: float) -> None:
        """Adds one step's measured seconds; `sending` and `working` (quantizing and applying) are for the whole vector
        with the present quantizer."""
        self.samples.append([computing, sending, working])
        if len(self.samples) < WINDOW:
            return
        medians = [statistics.median(column) for column in zip(*self.samples, strict=True)]
        local = torch.tensor(medians, dtype=torch.float64, device=self.device)
        computing, sending, working = torch.stack(self.comm.all_gather(local)).amax(0).tolist()
        self.samples = []
        self._decide(computing, sending / self.sizes[self.choice], working)
        self.rounds += 1
        self.next_window = step + (1 if self.rounds < ROUNDS else INTERVAL)

    def _decide(self, computing: float, seconds_per_byte: float, working: float) -> None:
        is_settled = self.rounds >= ROUNDS
        computing = max(computing, 1e-9)
        wanted = min(max(self.least, math.ceil(working / (WORK * computing))), self.first)

        def fits(choice: int, margin: float) -> bool:
            return margin * seconds_per_byte * self.sizes[choice] <= wanted * computing

        while self.choice > 0 and fits(self.choice - 1, ROOM / WORTH if is_settled else ROOM):
            self.choice -= 1
        while self.choice < len(self.sizes) - 1 and not fits(self.choice, ROOM):
            self.choice += 1
        sweep = seconds_per_byte * self.sizes[self.choice]
        needed = max(wanted, math.ceil(MARGIN * sweep / computing))
        if needed > self.most and self.rounds >= ROUNDS - 1:
            self._warn(needed, computing, sweep)
        if needed > self.period or needed <= WORTH * self.period or not is_settled:
            self.period = min(needed, self.most)

    def _warn(self, needed: int, computing: float, sweep: float) -> None:
        if not self.has_warned and self.comm.rank == 0:
            warn(
                f"the link is too slow for max_period={self.most}: sending the model takes {sweep:.3g} s and computing "
                f"a step {computing:.3g} s, so the background needs a period of {needed}; steps will wait for the "
                f"network. Raise max_period, or use larger batches",
                stacklevel=2,
            )
        self.has_warned = True

    def state_dict(self) -> dict[str, Any]:
        names = ("period", "choice", "samples", "next_window", "rounds", "has_warned")
        return {name: getattr(self, name) for name in names}

    def form(self, step: int) -> Form:
        """Returns what the state saved after `step` must look like."""
        return Fields(
            {
                "period": Whole(self.least, self.most),
                "choice": Whole(0, len(self.sizes) - 1),
                "samples": Each(Each(Real(0), NUMBERS), WINDOW - 1),
                "next_window": Whole(0, max(FIRST, step + INTERVAL)),
                "rounds": Whole(),
                "has_warned": Flag(),
            }
        )

    def merge(self, saved: list[dict[str, Any] | None], step: int) -> dict[str, Any]:
        """Returns the state in a run of another number of workers: the last choice until it is measured anew."""
        last = saved[0] or {"period": self.first, "choice": 0}
        return {
            "period": min(max(last["period"], self.least), self.most),
            "choice": min(last["choice"], len(self.sizes) - 1),
            "samples": [],
            "next_window": step + FIRST,
            "rounds": 0,
            "has_warned": False,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        # Checkpoints of versions that did not measure work: that window starts again.
        complete = all(len(sample) == NUMBERS for sample in saved["samples"])
        self.__dict__.update(saved if complete else saved | {"samples": []})
