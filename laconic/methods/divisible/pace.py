"""Chooses the period, the delay, the hops and the quantizer of the background, and whether there is a foreground, from
measured times, the same on all workers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch

from laconic.comm import Comm
from laconic.forms import Choice, Each, Fields, Flag, Form, Real, Whole
from laconic.log import warn

FIRST = 3  # the step in which measuring starts: before, kernels are loaded and connections made
WINDOW = 3  # steps measured at a time
ROUNDS = 3  # windows in a row at the start: the fixed cost of a message shows only once pieces have the right size
# The period until the first decision. With quarters, workers waited 2.8 s at 10 Mbit/s before they knew the link.
PROBING = 64
INTERVAL = 200  # steps from one window to the next, later
MARGIN = 1.1  # a sweep takes at most period/MARGIN steps of computing, and a message at most delay/MARGIN
# Quantizing and applying may take this share of computing (a shorter period costs more), and so may waiting for the
# foreground (otherwise there is none) and stretching all entries (otherwise a piece at a time is stretched).
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
    sending: float  # the whole vector with the present quantizer, in messages that each wait for the one before
    working: float  # to quantize and apply the whole vector
    stretching: float = 0.0  # the steps of the whole vector
    messages: float = 1.0  # that `sending` counts, through all hops


NUMBERS = 7  # of `Times`


@dataclass
class Pace:
    """Takes the times of some steps; decides the period, delay, hops and quantizer and whether there is a foreground.

    The wanted period is the shortest, between the journey of a piece (its hops, of `delay` steps each) and `usual`, in
    which quantizing and applying the whole vector takes at most the share WORK of computing. A coarser quantizer is
    chosen only if the finest one does not fit into half of the wanted period, and a longer period only if the coarsest
    does not fit. The delay is the shortest in which a message of such a period arrives. Where one hop would need a
    period above `usual`, two hops are taken: they send fewer bytes, but each average arrives a delay later.

    Args:
        comm: agrees on the slowest worker and the slowest link.
        delays: to choose from. Training starts with the first.
        usual: the longest period that costly quantizing leads to; a slow link makes it longer.
        most: the longest period.
        sizes: by the hops to choose from, the preferred ones first: the bytes that a worker sends in a sweep with each
            quantizer, the finest first.
        foreground_nbytes: that a worker sends in a step for the foreground.
        device: of the tensors that are sent.
        gather: `Replica.gather_slices`, by which the ranks of a node agree.
    """

    comm: Comm
    delays: range
    usual: int
    most: int
    sizes: Mapping[int, Sequence[float]]
    foreground_nbytes: float = 0.0
    device: torch.device | None = None
    gather: Callable[[Sequence[float]], list[Sequence[float]]] = lambda values: [values]

    period: int = field(init=False)
    delay: int = field(init=False)
    hops: int = field(init=False)
    choice: int = field(default=0, init=False)  # which quantizer; training starts with the finest
    has_foreground: bool = field(default=True, init=False)
    stretches_every_step: bool = field(default=True, init=False)
    samples: list[list[float]] = field(default_factory=list, init=False)  # of `Times`
    next_window: int = field(default=FIRST, init=False)
    rounds: int = field(default=0, init=False)
    has_warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.delay, self.hops = self.delays[0], next(iter(self.sizes))
        self.usual = min(self.usual, self.most)
        self.period = max(min(PROBING, self.most), self._least(self.hops, self.delay))

    def _least(self, hops: int, delay: int) -> int:
        """Returns the shortest period: a piece must have come back before it is sent again."""
        return min(delay * hops, self.most)

    def is_measuring(self, step: int) -> bool:
        """Returns whether to measure in this step: the same answer on all ranks."""
        return step >= self.next_window

    @property
    def decision(self) -> tuple[int, int, int, int]:
        """How pieces are cut and when they are due."""
        return self.period, self.delay, self.hops, self.choice

    def add(self, step: int, times: Times) -> None:
        """Adds the measured times of one step."""
        self.samples.append(list(astuple(times)))
        if len(self.samples) < WINDOW:
            return
        typical = Times(*(statistics.median(column) for column in zip(*self.samples, strict=True)))
        # Whatever else delays a message, such as a worker that sends it late or a busy core, only makes it seem slower,
        # and may delay an empty message more than the one beside it: so the least of each counts.
        least = Times(*(min(column) for column in zip(*self.samples, strict=True)))
        sending = max(0.0, least.sending - least.latency * typical.messages)
        local_times = astuple(replace(typical, sending=sending))
        in_node = [max(column) for column in zip(*self.gather(local_times), strict=True)]
        local = torch.tensor(in_node, dtype=torch.float64, device=self.device)
        of_ranks = torch.stack(self.comm.all_gather(local))
        slowest = Times(*of_ranks.amax(0).tolist())
        per_byte = slowest.sending / self.sizes[self.hops][self.choice]
        self.samples = []
        self._decide(slowest, per_byte)
        worth = WORTH if self._is_settled and not self.stretches_every_step else 1.0
        self.stretches_every_step = slowest.stretching <= worth * WORK * slowest.computing
        # A barrier costs what workers wait in the mean: the slowest does not wait at all.
        self._decide_foreground(slowest, of_ranks[:, 1].mean().item(), per_byte)
        self.rounds += 1
        self.next_window = step + (1 if self.rounds < ROUNDS else INTERVAL)

    @property
    def _is_settled(self) -> bool:
        return self.rounds >= ROUNDS

    def _decide_foreground(self, times: Times, waiting: float, per_byte: float) -> None:
        """The foreground shares the link with one message of the background."""
        message = self.sizes[self.hops][self.choice] / (self.hops * self.period)
        worth = WORTH if self._is_settled and not self.has_foreground else 1.0
        cost = waiting + per_byte * (self.foreground_nbytes + message)
        self.has_foreground = cost <= worth * WORK * times.computing

    def _decide(self, times: Times, per_byte: float) -> None:
        computing = max(times.computing, 1e-9)
        for hops in self.sizes:
            delay, choice, needed = self._suit(hops, times, computing, per_byte)
            worth = WORTH if self._is_settled and hops < self.hops else 1.0
            room = worth * max(self.usual, self._least(hops, delay)) * computing
            if MARGIN * per_byte * self.sizes[hops][choice] <= room:
                break
        is_other = hops != self.hops
        self.delay, self.hops, self.choice = delay, hops, choice
        if needed > self.most and self.rounds >= ROUNDS - 1:
            self._warn(needed, computing, per_byte * self.sizes[hops][choice])
        if is_other or needed > self.period or needed <= WORTH * self.period or not self._is_settled:
            self.period = min(needed, self.most)

    def _suit(self, hops: int, times: Times, computing: float, per_byte: float) -> tuple[int, int, int]:
        """Returns the delay, the quantizer and the period that suit so many hops; the period may be above `most`."""
        for delay in self.delays:
            choice, needed = self._fit(hops, delay, computing, per_byte, times.working)
            period = min(needed, self.most)
            # On a link that is too slow for the longest period, a longer delay would not help.
            piece = min(per_byte * self.sizes[hops][choice] / (hops * period), computing / MARGIN)
            worth = WORTH if self._is_settled and delay < self.delay else 1.0
            if MARGIN * (times.latency + piece) <= worth * delay * (computing + times.working / period):
                break
        return delay, choice, needed

    def _fit(self, hops: int, delay: int, computing: float, per_byte: float, working: float) -> tuple[int, int]:
        """Returns the quantizer and the period that suit so many hops and a delay."""
        wanted = max(self._least(hops, delay), min(math.ceil(working / (WORK * computing)), self.usual))
        sizes = self.sizes[hops]

        def fits(choice: int, margin: float) -> bool:
            return margin * per_byte * sizes[choice] <= wanted * computing

        choice = self.choice
        while choice > 0 and fits(choice - 1, ROOM / WORTH if self._is_settled else ROOM):
            choice -= 1
        while choice < len(sizes) - 1 and not fits(choice, ROOM):
            choice += 1
        sweep = per_byte * sizes[choice]
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
        names = ("period", "delay", "hops", "choice", "has_foreground", "stretches_every_step")
        return {name: getattr(self, name) for name in (*names, "samples", "next_window", "rounds", "has_warned")}

    def form(self, step: int) -> Form:
        """Returns what the state saved after `step` must look like."""
        return Fields(
            {
                "period": Whole(self._least(min(self.sizes), self.delays[0]), self.most),
                "choice": Whole(0, len(self.sizes[self.hops]) - 1),
                "samples": Each(Each(Real(0), NUMBERS), WINDOW - 1),
                "next_window": Whole(0, max(FIRST, step + INTERVAL)),
                "rounds": Whole(),
                "has_warned": Flag(),
            },
            # Earlier versions had one delay, always a foreground, hops by the number of workers alone, and stretched
            # in every step.
            optional={
                "delay": Whole(self.delays[0], self.delays[-1]),
                "has_foreground": Flag(),
                "stretches_every_step": Flag(),
                "hops": Choice(tuple(self.sizes)),
            },
        )

    def merge(self, saved: list[dict[str, Any] | None], step: int) -> dict[str, Any]:
        """Returns the state in a run of another number of workers: the last choice until it is measured anew."""
        last = saved[0] or {"period": self.usual, "choice": 0}
        delay = min(max(last.get("delay", 1), self.delays[0]), self.delays[-1])
        hops = last["hops"] if last.get("hops") in self.sizes else next(iter(self.sizes))
        return {
            "period": min(max(last["period"], self._least(hops, delay)), self.most),
            "delay": delay,
            "hops": hops,
            "choice": min(last["choice"], len(self.sizes[hops]) - 1),
            "has_foreground": last.get("has_foreground", True),
            "stretches_every_step": last.get("stretches_every_step", True),
            "samples": [],
            "next_window": step + FIRST,
            "rounds": 0,
            "has_warned": False,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.delay, self.hops = self.delays[0], next(iter(self.sizes))
        self.has_foreground = self.stretches_every_step = True
        self.__dict__.update(saved)
        # Checkpoints of versions that measured less: that window starts again.
        if any(len(sample) < NUMBERS for sample in self.samples):
            self.samples = []
