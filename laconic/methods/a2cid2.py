"""A2CiD2: gossip with one neighbour at a time that never stops the training, accelerated by a continuous momentum.

Nabli, Belilovsky, Oyallon, "A2CiD2: Accelerating Asynchronous Communication in Decentralized Deep Learning", NeurIPS
2023, arXiv 2306.08289.

    dx = η(x̃ − x)dt − γg dN − ½ Σ_j (x − x_j) dM_j        dx̃ = η(x − x̃)dt − γg dN − α̃ Σ_j (x − x_j) dM_j

Kept here is δ = x̃ − x instead of x̃: the own steps leave it alone, and mixing over a time Δ is x += cδ, δ *= 1 − 2c.
Both are kept up to factors, so that mixing costs no pass over the vectors until x itself must be right.
Clocks are counted in ∫η dt, so the ends of an exchange need not have the same η, only the same moment and the same α̃.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from laconic.comm import Comm, Dialogue, Gossip
from laconic.comm.finite import is_finite
from laconic.method import Method, Replica, check_count, state
from laconic.topology import TOPOLOGIES, Topology, named

MEMORY = 100  # steps over which "auto" measures its rate
SMALL = 1e-3  # δ's factor is brought back to 1 below this
PIECE_NUMEL = 1 << 15  # x is cut into no smaller pieces


def mixing(elapsed: float) -> tuple[float, float]:
    """c and 1 − 2c: over this time on the mixing clock x moves by cδ, and δ shrinks to (1 − 2c)δ."""
    return -math.expm1(-2 * elapsed) / 2, math.exp(-2 * elapsed)


@dataclass
class A2CiD2(Method):
    """Pairwise averaging along the edges of a graph, beside the training.

    Args:
        topology: ring, exponential, complete, torus, or a `laconic.topology.Topology` of the workers.
        rate: exchanges per gradient step and worker. `"auto"`: as many as the link allows, at most one; the momentum
            follows the measured rate. A worker answers whenever it is asked, so a slow one may make more a step.
        momentum: without it, this is plain asynchronous gossip.
        background: False makes the exchanges between the steps, along a random matching that all workers share:
            deterministic, and everyone waits for everyone.
        slack: steps that the training may be ahead of `rate` before it waits for exchanges; `"auto"` never waits.

    Bytes an exchange and worker: 4d + 32.
    """

    paper: ClassVar[str] = "arXiv 2306.08289"

    topology: str | Topology = "ring"
    rate: float | Literal["auto"] = "auto"
    momentum: bool = True
    background: bool = True
    slack: int = 8

    delta: Tensor = state()  # (d) x̃ − x = scale · delta
    scale: float = state(0.0)
    correction: Tensor = state()  # (d) what exchanges and mixing have added to x since the last step boundary is
    drift: float = state(0.0)  # correction + drift · delta
    clock: float = state(0.0)  # this worker's time, ∫η dt; it never falls behind that of a peer it has met
    mixed: float = state(0.0)  # x and δ are mixed up to here
    steps: int = state(0)  # made so far by this worker
    pace: float = state(0.0)  # exchanges a step, as measured here and averaged with the peers
    sought: int = state(0)  # exchanges that should have been made by now
    credit: float = state(0.0)  # the same for matchings: exchanges a worker that are still to be made
    exchanges: int = state(0)  # made so far by this worker
    lasting: int = state(16)  # own steps during the last exchange, or a guess

    partners: Counter[int] = field(init=False, repr=False, compare=False, default_factory=Counter)  # the same, by peer
    _x: Tensor = field(init=False, repr=False, compare=False)
    _own: Tensor = field(init=False, repr=False, compare=False)  # x, or a copy of it while x is lent
    _sent: Tensor = field(init=False, repr=False, compare=False)  # (d)
    _corrected: list[slice] = field(init=False, repr=False, compare=False, default_factory=list)  # the rest is 0
    _exchanging: bool = field(init=False, repr=False, compare=False, default=False)
    _rank: int = field(init=False, repr=False, compare=False)
    _graph: Topology = field(init=False, repr=False, compare=False)
    _gossip: Gossip | None = field(init=False, repr=False, compare=False, default=None)
    _before: int = field(init=False, repr=False, compare=False, default=0)  # exchanges made before this gossip's first

    def __post_init__(self) -> None:
        if isinstance(self.topology, str):
            if self.topology not in TOPOLOGIES:
                named(self.topology, 1)  # raises with the near misses
        elif not isinstance(self.topology, Topology):
            raise ValueError(f"topology must be a name or a laconic.topology.Topology, not {self.topology!r}")
        if self.rate != "auto" and not (isinstance(self.rate, (int, float)) and 0 < self.rate < math.inf):
            raise ValueError(f'rate must be "auto" or more than 0 exchanges a step, not {self.rate!r}')
        for name in ("momentum", "background"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        check_count("slack", self.slack)

    def setup(self, worker: Replica) -> None:
        size = worker.comm.size
        self._graph = named(self.topology, size) if isinstance(self.topology, str) else self.topology
        if self._graph.nodes != tuple(range(size)):
            raise ValueError(f"topology must be of the {size} workers there are, not of {self._graph.size}")
        self._rank = worker.comm.rank
        self._x, self._own, self._sent = worker.x, worker.x, torch.empty_like(worker.x)
        self.delta = torch.zeros_like(worker.x)
        self.correction = torch.zeros_like(worker.x)
        if self.background and size > 1:
            self._gossip = worker.comm.gossip(self._graph, self.exchange)

    def after_step(self, worker: Replica) -> None:
        if worker.comm.size == 1:
            return
        if self._gossip is None:
            self._cross_boundary()
            for pair in self._matchings(worker.generator):
                if worker.comm.rank in pair:
                    converse(worker.comm, self.exchange, peer=sum(pair) - worker.comm.rank)
                    self._settle()
            return
        with self._gossip:
            self._graph = self._gossip.topology
            self._cross_boundary()
        self._seek(self._gossip, worker)

    def pause(self, worker: Replica) -> None:
        if self._gossip is not None:
            with self._gossip:
                self._own = self._x.clone()  # x may be lent; exchanges go on, and must not see the agreed model

    def drain(self, worker: Replica) -> None:
        if self._gossip is None:
            return
        self._gossip.close()
        self._graph = self._gossip.topology
        # At a common time the mean of x is the mean of x₀ and of all own steps, exactly.
        self._mix(max(worker.comm.meet("the end of gossip", self.clock)))
        self._settle()

    def metrics(self) -> dict[str, float]:
        with_whom = {f"exchanges_with_{peer}": float(count) for peer, count in sorted(self.partners.copy().items())}
        return {"exchanges": float(self.exchanges), "exchanges_per_step": self.pace, **with_whom}

    # The paper's three rules. Each is for each coordinate by itself, and an own step moves x and x̃ alike. So x may go
    # in pieces, read while the optimizer is at work or after some more own steps: what counts is that both ends have
    # mixed to the same moment, and use the gap between what was really sent.

    def exchange(self, peer: int) -> Dialogue:
        """Both ends agree on a moment, mix to it, send their x, and move by gaps that are exactly opposite.

        Until the end they mix no further. x goes in as many pieces as the exchange takes steps: each is sent as it is
        then and its gap applied when it comes, or the gaps would be as old as the exchange is long.
        """
        began = self.steps
        mine = torch.tensor([self.clock, self._alpha_tilde(), self.pace, self.lasting], dtype=torch.float64)
        self._exchanging = True
        try:
            theirs = yield mine
            now, _, _, lasting = torch.maximum(mine, theirs).tolist()
            alpha_tilde = (mine[1].item() + theirs[1].item()) / 2
            self.clock = max(self.clock, now)
            self._mix(now)
            if alpha_tilde != 0.5:
                self._rescale()  # else δ stays 0
            for piece in self._pieces(int(lasting)):
                sent = self._current(piece)
                self._require_finite(sent)
                received = yield sent
                self._jump(piece, sent.sub_(received), -0.5, 0.5 - alpha_tilde)
        finally:
            self._exchanging = False
        self.lasting = max(1, self.steps - began)
        self.pace += (theirs[2].item() - mine[2].item()) / 2 + self._gain()
        self.exchanges += 1
        self.partners[peer] += 1

    def _cross_boundary(self) -> None:
        """A gradient step has been made: time goes on by one, and x takes up what came in."""
        self.clock += self._eta()
        self.steps += 1
        self.pace *= 1 - self._gain()
        if not self._exchanging:
            self._mix(self.clock)
        self._settle()

    # x is `_own` + correction + drift · delta, and δ is scale · delta.

    def _mix(self, now: float) -> None:
        c, shrinking = mixing(now - self.mixed)
        self.drift += c * self.scale
        self.scale *= shrinking
        self.mixed = now

    def _rescale(self) -> None:
        if self.scale >= SMALL:
            return
        if self.drift:
            self.correction.add_(self.delta, alpha=self.drift)
            self._corrected.append(slice(None))
        self.delta.mul_(self.scale)
        self.drift, self.scale = 0.0, 1.0

    def _jump(self, piece: slice, by: Tensor, x_factor: float, delta_factor: float) -> None:
        """This piece of x and of δ moves by these multiples of `by`."""
        in_delta = delta_factor / self.scale if delta_factor else 0.0
        self.correction[piece].add_(by, alpha=x_factor - self.drift * in_delta)
        self._corrected.append(piece)
        if in_delta:
            self.delta[piece].add_(by, alpha=in_delta)

    def _pieces(self, count: int) -> list[slice]:
        d = self._x.numel()
        count = max(1, min(count, d // PIECE_NUMEL))
        return [slice(d * i // count, d * (i + 1) // count) for i in range(count)]

    def _current(self, piece: slice) -> Tensor:
        out = self._sent[piece]
        if self._corrected:
            torch.add(self._own[piece], self.correction[piece], out=out)
        else:
            out.copy_(self._own[piece])
        return out.add_(self.delta[piece], alpha=self.drift) if self.drift else out

    def _require_finite(self, sent: Tensor) -> None:
        if not is_finite(sent):
            raise FloatingPointError(
                f"rank {self._rank}: the parameters hold NaN or infinity, so the gossip of this worker has ended"
            )

    def _settle(self) -> None:
        """Between steps: x takes up what came in."""
        for piece in self._corrected:
            self._x[piece].add_(self.correction[piece])
            self.correction[piece].zero_()
        if self.drift:
            self._x.add_(self.delta, alpha=self.drift)
        self._corrected, self.drift, self._own = [], 0.0, self._x

    # The graph's constants at the rate of now. η is proportional to the rate, α̃ does not depend on it.

    def _eta(self) -> float:
        if not self.momentum or self._graph.size == 1:
            return 0.0
        return self._graph.constants(self._rate_now()).eta

    def _alpha_tilde(self) -> float:
        return self._graph.constants().alpha_tilde if self.momentum else 0.5

    def _rate_now(self) -> float:
        return max(self.pace, 1e-6) if self.rate == "auto" else self.rate

    def _gain(self) -> float:
        """The weight of the latest step in `pace`: of all steps alike at first, so that the start is right too."""
        return 1 / min(max(1, self.steps), MEMORY)

    # When to exchange.

    def _seek(self, gossip: Gossip, worker: Replica) -> None:
        if self.rate == "auto":
            # What could not be made in this step is not made up for later; one is, so that a need becomes urgent.
            patience = 2
            self.sought = min(self.sought + 1, self.exchanges + patience)
        else:
            patience = max(2, math.ceil(self.rate * self.slack / 2))
            while self._due(worker.comm.rank, self.sought) <= worker.step:
                self.sought += 1
        gossip.seek(self.sought - self._before, urgently=self.sought - self._before - patience + 1)
        if self.rate != "auto":
            gossip.wait(math.floor(self.rate * (worker.step - self.slack)) - self._before)

    def _due(self, rank: int, k: int) -> float:
        """The step at which this rank's k-th exchange falls due: at random in the k-th interval of length 1/rate."""
        assert self.rate != "auto"
        return (k + random.Random((rank << 40) + k).random()) / self.rate

    def _matchings(self, generator: torch.Generator) -> list[tuple[int, int]]:
        """The pairs that exchange after this step, the same on all ranks: whole random matchings, as the rate asks."""
        pairs: list[tuple[int, int]] = []
        self.credit += 1.0 if self.rate == "auto" else self.rate
        while self.credit > 0:
            taken: set[int] = set()
            for index in torch.randperm(len(self._graph.edges), generator=generator).tolist():
                pair = self._graph.edges[index]
                if taken.isdisjoint(pair):
                    taken.update(pair)
                    pairs.append(pair)
            self.credit -= len(taken) / self._graph.size
        return pairs

    def state_dict(self) -> dict[str, Any]:
        if self._gossip is not None:
            # Until the next step: no exchange may be in one rank's checkpoint and not in its peer's.
            self._gossip.pause()
        return super().state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if self._gossip is not None:
            self._gossip.pause()
        super().load_state_dict(saved)
        self._own, self._corrected = self._x, [slice(None)]
        self._before = self.exchanges - (self._gossip.exchanges if self._gossip is not None else 0)


def converse(comm: Comm, talk: Any, peer: int) -> None:
    """Hold a dialogue now, in the foreground."""
    dialogue: Dialogue = talk(peer)
    sent = next(dialogue)
    while True:
        received = comm.exchange(sent, peer)
        try:
            sent = dialogue.send(received)
        except StopIteration:
            return
