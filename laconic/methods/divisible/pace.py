"""Chooses the period, the delay and the quantizer of the background, and whether there is a foreground, from measured
times, the same on all workers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from laconic.comm import Comm
from laconic.forms import Each, Fields, Flag, Form, Real, Whole
from laconic.log import warn

FIRST = 3  # the step in which measuring starts: before, kernels are loaded and connections made
WINDOW = 3  # steps measured at a time
ROUNDS = 2  # windows in a row at the start: the fixed cost of a message shows only once pieces have the right size
INTERVAL = 200  # steps from one window to the next, later
MARGIN = 1.1  # a sweep takes at most period/MARGIN steps of computing, and a message at most delay/MARGIN
# Quantizing and applying may take this share of computing (a shorter period costs more), and so may waiting for the
# foreground (otherwise there is none).
WORK = 0.05
ROOM = 2.0  # the same for choosing a quantizer: a link that is never idle slows computing more than finer codes help
# A shorter period or delay, a finer quantizer or a foreground must need at most this much of what there is to be worth
# a change.
WORTH = 0.8


@dataclass(frozen=True)
class Times:
    """Seconds that a worker has measured in a step."""

    computing: float
    waiting: float  # for an empty message of the foreground, so for the slowest worker too
    latency: float  # of an empty message of the background
    sending: float  # the whole vector with the present quantizer, through all hops, without latency
    working: float  # to quantize and apply the whole vector


NUMBERS = 5  # of `Times`


@dataclass
class Pace:
    """Takes the times of some steps; decides the period, the delay, the quantizer and whether there is a foreground.

    The wanted period is the shortest, between the journey of a piece (its hops, of `delay` steps each) and `first`, in
    which quantizing and applying the whole vector takes at most the share WORK of computing. A coarser quantizer is
    chosen only if the finest one does not fit into half of the wanted period, and a longer period only if the coarsest
    does not fit. The delay is the shortest in which a message of such a period arrives.

    Args:
        comm: agrees on the slowest worker and the slowest link.
        hops: that each piece takes.
        delays: to choose from. Training starts with the first.
        first: the period with which training starts. A slow link makes it longer; costly quantizing never does.
        most: the longest period.
        sizes: bytes of the whole vector with each quantizer, the finest first.
        device: of the tensors that are sent.
        gather: `Replica.gather_slices`, by which the ranks of a node agree.
    """

    comm: Comm
    hops: int
    delays: range
    first: int
    most: int
    sizes: Sequence[float]
    device: torch.device | None = None
    gather: Callable[[Sequence[float]], list[Sequence[float]]] = lambda values: [values]

    period: int = field(init=False)
    delay: int = field(init=False)
    choice: int = field(default=0, init=False)  # which quantizer; training starts with the finest
    has_foreground: bool = field(default=True, init=False)
    samples: list[list[float]] = field(default_factory=list, init=False)  # of `Times`
    next_window: int = field(default=FIRST, init=False)
    rounds: int = field(default=0, init=False)
    has_warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.delay = self.delays[0]
        self.first = min(self.first, self.most)
        self.period = max(self.first, self._least(self.delay))

    def _least(self, delay: int) -> int:
        """Returns the shortest period: a piece must have come back before it is sent again."""
        return min(delay * self.hops, self.most)

    def is_measuring(self, step: int) -> bool:
        """Returns whether to measure in this step: the same answer on all ranks."""
        return step >= self.next_window

    @property
    def decision(self) -> tuple[int, int, int]:
        """How pieces are cut and when they are due."""
        return self.period, self.delay, self.choice

    def add(self, step: int, times: Times) -> None:
        """Adds the measured times of one step."""
        self.samples.append(list(astuple(times)))
        if len(self.samples) < WINDOW:
            return
        medians = [statistics.median(column) for column in zip(*self.samples, strict=True)]
        in_node = [max(column) for column in zip(*self.gather(medians), strict=True)]
        local = torch.tensor(in_node, dtype=torch.float64, device=self.device)
        of_ranks = torch.stack(self.comm.all_gather(local))
        slowest = Times(*of_ranks.amax(0).tolist())
        self.samples = []
        # A barrier costs what workers wait in the mean: the slowest does not wait at all.
        self._decide_foreground(slowest.computing, of_ranks[:, 1].mean().item())
        self._decide(slowest)
        self.rounds += 1
        self.next_window = step + (1 if self.rounds < ROUNDS else INTERVAL)

    @property
    def _is_settled(self) -> bool:
        return self.rounds >= ROUNDS

    def _decide_foreground(self, computing: float, waiting: float) -> None:
        worth = WORTH if self._is_settled and not self.has_foreground else 1.0
        self.has_foreground = waiting <= worth * WORK * computing

    def _decide(self, times: Times) -> None:
        computing, per_byte = max(times.computing, 1e-9), times.sending / self.sizes[self.choice]
        for delay in self.delays:
            choice, needed = self._fit(delay, computing, per_byte, times.working)
            period = min(needed, self.most)
            # On a link that is too slow for the longest period, a longer delay would not help.
            piece = min(per_byte * self.sizes[choice] / (self.hops * period), computing / MARGIN)
            worth = WORTH if self._is_settled and delay < self.delay else 1.0
            if MARGIN * (times.latency + piece) <= worth * delay * (computing + times.working / period):
                break
        self.delay, self.choice = delay, choice
        if needed > self.most and self.rounds >= ROUNDS - 1:
            self._warn(needed, computing, per_byte * self.sizes[choice])
        if needed > self.period or needed <= WORTH * self.period or not self._is_settled:
            self.period = period

    def _fit(self, delay: int, computing: float, per_byte: float, working: float) -> tuple[int, int]:
        """Returns the quantizer and the period that suit a delay."""
        wanted = max(self._least(delay), min(math.ceil(working / (WORK * computing)), self.first))

        def fits(choice: int, margin: float) -> bool:
            return margin * per_byte * self.sizes[choice] <= wanted * computing

        choice = self.choice
        while choice > 0 and fits(choice - 1, ROOM / WORTH if self._is_settled else ROOM):
            choice -= 1
        while choice < len(self.sizes) - 1 and not fits(choice, ROOM):
            choice += 1
        sweep = per_byte * self.sizes[choice]
        return choice, max(wanted, math.ceil(MARGIN * sweep / computing))

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
        names = ("period", "delay", "choice", "has_foreground", "samples", "next_window", "rounds", "has_warned")
        return {name: getattr(self, name) for name in names}

    def form(self, step: int) -> Form:
        """Returns what the state saved after `step` must look like."""
        return Fields(
            {
                "period": Whole(self._least(self.delays[0]), self.most),
                "choice": Whole(0, len(self.sizes) - 1),
                "samples": Each(Each(Real(0), NUMBERS), WINDOW - 1),
                "next_window": Whole(0, max(FIRST, step + INTERVAL)),
                "rounds": Whole(),
                "has_warned": Flag(),
            },
            # Earlier versions had one delay, and always a foreground.
            optional={"delay": Whole(self.delays[0], self.delays[-1]), "has_foreground": Flag()},
        )

    def merge(self, saved: list[dict[str, Any] | None], step: int) -> dict[str, Any]:
        """Returns the state in a run of another number of workers: the last choice until it is measured anew."""
        last = saved[0] or {"period": self.first, "choice": 0}
        delay = min(max(last.get("delay", 1), self.delays[0]), self.delays[-1])
        return {
            "period": min(max(last["period"], self._least(delay)), self.most),
            "delay": delay,
            "choice": min(last["choice"], len(self.sizes) - 1),
            "has_foreground": last.get("has_foreground", True),
            "samples": [],
            "next_window": step + FIRST,
            "rounds": 0,
            "has_warned": False,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.delay, self.has_foreground = self.delays[0], True
        self.__dict__.update(saved)
        # Checkpoints of versions that measured less: that window starts again.
        if any(len(sample) < NUMBERS for sample in self.samples):
            self.samples = []
