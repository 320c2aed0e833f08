"""A2CiD2: asynchronous gossip with one neighbour at a time, accelerated by a continuous momentum.

Each worker runs local steps and, in the background, averages its parameters x with those of one neighbour at a time. A
second vector x̃ gives the averaging a momentum. With local steps −γg at the times of N and exchanges with neighbour j at
the times of M_j:

    dx = η(x̃ − x)dt − γg dN − ½ Σ_j (x − x_j) dM_j        dx̃ = η(x − x̃)dt − γg dN − α̃ Σ_j (x − x_j) dM_j

The implementation stores δ = x̃ − x instead of x̃. Local steps do not change δ, and mixing over a time Δ is x += cδ,
δ *= 1 − 2c with c = ½(1 − e^(−2ηΔ)). Both vectors are stored up to scalar factors, so mixing only updates these
factors; the vectors are touched when x is needed. Clocks count ∫η dt, so the two ends of an exchange may have different
η. They must only agree on the clock value and on α̃.

References:
    Nabli, Belilovsky, Oyallon, "A2CiD2: Accelerating Asynchronous Communication in Decentralized Deep Learning",
    NeurIPS 2023, arXiv 2306.08289.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from laconic.comm import Dialogue, Gossip
from laconic.comm.finite import check_gossip
from laconic.forms import Real, Whole
from laconic.method import Method, Replica, check_count, check_flag, check_number, mean_of, state
from laconic.methods.gossip_foreground import draw_matchings, run_dialogue
from laconic.methods.gossip_rate import WINDOW, RateWatch, due_exchanges
from laconic.topology import TOPOLOGIES, Topology, named

MAX_RATE = 1000.0  # exchanges per step; more are a typing error, and would never end
MIN_SCALE = 1e-3  # the factor of δ is folded into the vector below this, before it loses precision
MIN_PIECE_NUMEL = 1 << 15  # an exchange sends x in pieces of at least this many entries
MAX_EXCHANGE_STEPS = 16  # local steps after which an exchange with `rate="auto"` ends, with only a part of x


def mixing(elapsed: float) -> tuple[float, float]:
    """Returns c and 1 − 2c for mixing over `elapsed` = ηΔ: x moves by cδ, and δ shrinks to (1 − 2c)δ."""
    return -math.expm1(-2 * elapsed) / 2, math.exp(-2 * elapsed)


@dataclass
class A2CiD2(Method):
    """Averages parameters between pairs of neighbours in the background, with momentum.

    Each exchange sends 4d + 40 bytes each way, for d parameters, and 4 for each piece. The module docstring has the
    equations.

    Args:
        topology: who exchanges with whom: `"ring"`, `"exponential"`, `"complete"`, `"torus"`, or a
            `laconic.topology.Topology` of all workers.
        rate: exchanges per gradient step and worker. `"auto"` makes as many as the link allows, at most about one; the
            momentum follows the measured rate. On a slow link an exchange is of a part of x only. With a number,
            exchanges are due at random, as a Poisson process. Workers answer requests at any time, so a slow worker may
            make more.
        momentum: False gives plain asynchronous pairwise gossip.
        background: False makes the exchanges between steps, along random matchings that are the same on all workers.
            This is deterministic and synchronous; it is meant for tests.
        slack: with a fixed `rate`, training waits once this many steps' exchanges are due and not made. `"auto"`
            never waits.

    A checkpoint of another number of workers: as at the end of training, x is mixed to the latest clock and averaged;
    all workers start from that mean, with δ = 0 (mean(δ) is 0) and no exchange owed.

    Example:
        >>> import torch, laconic
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with laconic.Worker(model, optimizer, laconic.A2CiD2(topology="ring")) as worker:
        ...     model(torch.ones(2)).sum().backward()
        ...     optimizer.step()
        >>> worker.step
        1

    References:
        Nabli, Belilovsky, Oyallon, "A2CiD2: Accelerating Asynchronous Communication in Decentralized Deep Learning",
        NeurIPS 2023, arXiv 2306.08289.
    """

    paper: ClassVar[str] = "arXiv 2306.08289"

    topology: str | Topology = "ring"
    rate: float | Literal["auto"] = "auto"
    momentum: bool = True
    background: bool = True
    slack: int = 8

    # The current x is `_local_x` + pending + pending_mix · delta, and the current δ is scale · delta.
    delta: Tensor = state(merge="method")  # (d)
    scale: float = state(0.0, form=Real(0, 1), merge="method")
    pending: Tensor = state(merge="method")  # (d) changes of x by exchanges that the model does not contain yet
    pending_mix: float = state(0.0, merge="method")  # the same for mixing, as a multiple of delta
    # ∫η dt of this worker; an exchange advances it to the later of both clocks.
    clock: float = state(0.0, form=Real(0), merge="method")
    mixed_until: float = state(0.0, form=Real(0), merge="method")  # the clock value up to which x and δ are mixed
    steps: int = state(0, form=Whole(), merge="method")
    # Exchanges per step, measured here and averaged with the peers'.
    measured_rate: float = state(0.0, form=Real(0), merge="mean")
    requested: int = state(0, form=Whole(), merge="method")  # exchanges that should have been made by now
    # With background=False: exchanges per worker that are still to be made.
    backlog: float = state(0.0, form=Real(-1, 0), merge="same")
    exchanges: int = state(0, form=Whole(), merge="method")
    # Local steps made during the last exchange; at first a guess.
    exchange_steps: int = state(16, form=Whole(1), merge="method")

    partners: Counter[int] = field(init=False, repr=False, compare=False, default_factory=Counter)  # exchanges by peer
    _x: Tensor = field(init=False, repr=False, compare=False)
    _local_x: Tensor = field(init=False, repr=False, compare=False)  # _x, or a copy while consensus() uses _x
    _send_buffer: Tensor = field(init=False, repr=False, compare=False)  # (d + 1)
    _positions: dict[int, int] = field(init=False, repr=False, compare=False, default_factory=dict)  # see `exchange`
    _watch: RateWatch = field(init=False, repr=False, compare=False)
    _pending_slices: list[slice] = field(init=False, repr=False, compare=False, default_factory=list)  # nonzero there
    _exchanging: bool = field(init=False, repr=False, compare=False, default=False)
    _rank: int = field(init=False, repr=False, compare=False)
    _graph: Topology = field(init=False, repr=False, compare=False)  # of the workers that are left
    _gossip: Gossip | None = field(init=False, repr=False, compare=False, default=None)
    _resumed_exchanges: int = field(init=False, repr=False, compare=False, default=0)  # from before this Gossip

    def __post_init__(self) -> None:
        if isinstance(self.topology, str):
            if self.topology not in TOPOLOGIES:
                named(self.topology, 1)  # raises, suggesting similar names
        elif not isinstance(self.topology, Topology):
            raise ValueError(f"topology must be a name or a laconic.topology.Topology, not {self.topology!r}")
        if self.rate != "auto":
            check_number('rate (exchanges per step, or "auto")', self.rate, most=MAX_RATE, above=0)
        check_flag("momentum", self.momentum)
        check_flag("background", self.background)
        check_count("slack", self.slack)

    def setup(self, worker: Replica) -> None:
        size = worker.comm.size
        self._graph = named(self.topology, size) if isinstance(self.topology, str) else self.topology
        if self._graph.nodes != tuple(range(size)):
            raise ValueError(
                f"topology must have the nodes 0 to {size - 1}, one for each of {size} workers, not {self._graph.nodes}"
            )
        self._rank = worker.comm.rank
        self._x, self._local_x, self._send_buffer = worker.x, worker.x, worker.x.new_empty(worker.x.numel() + 1)
        self._watch = RateWatch(self._rank, worker.x.numel() * worker.x.element_size())
        self.delta = torch.zeros_like(worker.x)
        self.pending = torch.zeros_like(worker.x)
        if self.background and size > 1:
            self._gossip = worker.comm.gossip(self._graph, self.exchange)

    def after_step(self, worker: Replica) -> None:
        if worker.comm.size == 1:
            return
        if self._gossip is None:
            # All ranks raise here, and not only those that would exchange with a rank whose x is not finite.
            worker.comm.mean(torch.where(worker.x.isfinite().all(), 0.0, math.nan).reshape(1))
            self._finish_step()
            self.backlog += 1.0 if self.rate == "auto" else self.rate
            pairs, self.backlog = draw_matchings(self._graph, self.backlog, worker.generator)
            for pair in pairs:
                if worker.comm.rank in pair:
                    run_dialogue(worker.comm, self.exchange, peer=sum(pair) - worker.comm.rank, device=worker.x.device)
                    self._apply_pending()
            return
        with self._gossip:
            self._graph = self._gossip.topology
            self._finish_step()
        self._request_exchanges(self._gossip, worker)

    def pause(self, worker: Replica) -> None:
        if self._gossip is not None:
            check_gossip(
                self._x, self._rank, self.steps
            )  # now: else the average of all models would fail, and with it all workers
            with self._gossip:
                # consensus() may overwrite x with the averaged model. Exchanges go on and must not send that.
                self._local_x = self._x.clone()

    def drain(self, worker: Replica) -> None:
        if self._gossip is None:
            return
        self._gossip.close()
        self._graph = self._gossip.topology
        # At a common clock value the mean of x is exactly the mean of x₀ and of all local steps.
        self._mix(max(worker.comm.meet("the end of gossip", self.clock)))
        self._apply_pending()

    def reset(self, worker: Replica) -> None:
        if self._gossip is not None:
            self._gossip.pause()  # until the next step
            worker.comm.meet("reset()")
        self.delta.zero_()
        self.pending.zero_()
        self.scale, self.pending_mix, self.backlog = 0.0, 0.0, 0.0
        self._pending_slices, self._local_x = [], self._x
        self._positions.clear()

    def common(self, worker: Replica) -> Literal["nothing", "step"]:
        return "nothing" if self.background else "step"

    def unsliceable(self) -> None:
        return None

    def changed_outside(self) -> str | None:
        if not self.background:
            return None
        return (
            "exchanges with other workers go on meanwhile, so the mean of all models would not become what they were "
            "changed to"
        )

    def metrics(self) -> dict[str, float]:
        """Returns counts of exchanges, `bits` per entry and the `period`: steps for an exchange of all of x.

        `exchanges_per_step` is in units of all of x. `smallest_edge_share` is that of the neighbour met least often,
        relative to equal shares: 1 if all were met equally often, 0 if one was never met.
        """
        neighbours, partners = self._graph.neighbours(self._rank), self.partners.copy()
        by_peer = {f"exchanges_with_{peer}": float(partners[peer]) for peer in sorted({*neighbours, *partners})}
        made = sum(partners[peer] for peer in neighbours)
        share = min(partners[peer] for peer in neighbours) * len(neighbours) / made if made else 0.0
        rate = {"exchanges": float(self.exchanges), "exchanges_per_step": self.measured_rate}
        period = 1 / self.measured_rate if self.measured_rate > 0 else math.nan
        common = {"period": period, "bits": 8.0 * self._x.element_size()}
        return {**common, **rate, "smallest_edge_share": share, **by_peer}

    # The paper's three rules: exchange, local step, mixing. Each acts on every coordinate independently, and a local
    # step moves x and x̃ equally. So x may be sent in pieces, and be read while the optimizer runs or some local steps
    # later. The mean is preserved as long as both ends are mixed to the same clock value and use the difference of
    # what was actually sent.

    def exchange(self, peer: int) -> Dialogue:
        """Averages x, or a part of it, with a peer; both ends run this generator.

        Both ends agree on a clock value, mix to it, send their x, and move by exactly opposite differences. They do not
        mix again until the exchange is over. x is sent in as many pieces as an exchange of all of x takes steps, each
        with its current values, and each difference is applied when it arrives; otherwise differences would be as old
        as the exchange is long.

        With `rate="auto"` the exchange ends once either end has made `MAX_EXCHANGE_STEPS` local steps. The rest of x is
        left unchanged at both ends, and the next exchange with this peer begins there: `_positions` has the entry.

        Yields:
            The tensors to send; the peer's tensors come back. Each piece is followed by the steps made so far.
        """
        steps_before, d = self.steps, self._x.numel()
        mine = torch.tensor(
            [self.clock, self._alpha_tilde(), self.measured_rate, self.exchange_steps, self._positions.get(peer, 0)],
            dtype=torch.float64,
        )
        self._exchanging = True
        try:
            theirs = yield mine
            now, _, _, exchange_steps, position = torch.maximum(mine, theirs).tolist()
            alpha_tilde = (mine[1].item() + theirs[1].item()) / 2
            self.clock = max(self.clock, now)
            self._mix(now)
            if alpha_tilde != 0.5:  # with α̃ = ½, δ does not change
                self._rescale()
            exchanged = 0
            for piece in self._pieces(int(exchange_steps), int(position)):
                sent = self._current_x(piece)
                steps = min(self.steps - steps_before, MAX_EXCHANGE_STEPS)
                message = self._send_buffer[: sent.numel() + 1]
                message[-1] = steps
                received = yield message
                steps = max(steps, int(received[-1].item()))
                difference = sent.sub_(received[:-1].to(sent.device, non_blocking=True))
                self._move(piece, difference, -0.5, 0.5 - alpha_tilde)
                exchanged += sent.numel()
                if self.rate == "auto" and steps >= MAX_EXCHANGE_STEPS:
                    break
        finally:
            self._exchanging = False
        self._positions[peer] = (int(position) + exchanged) % d
        share = exchanged / d
        self.exchange_steps = max(1, round((self.steps - steps_before) / share))
        self.measured_rate += (theirs[2].item() - mine[2].item()) / 2 + share * self._rate_gain()
        self.exchanges += 1
        self.partners[peer] += 1

    def _finish_step(self) -> None:
        """Advances the clock by one local step, mixes, and applies the pending changes to the model."""
        self.clock += self._eta()
        self.steps += 1
        self.measured_rate *= 1 - self._rate_gain()
        if not self._exchanging:
            self._mix(self.clock)
        self._apply_pending()

    def _mix(self, now: float) -> None:
        """Mixes x and δ up to the clock value `now`, by changing scalars only."""
        c, shrinking = mixing(now - self.mixed_until)
        self.pending_mix += c * self.scale
        self.scale *= shrinking
        self.mixed_until = now

    def _rescale(self) -> None:
        """Folds the factors into the vectors if δ's factor is small."""
        if self.scale >= MIN_SCALE:
            return
        if self.pending_mix:
            self.pending.add_(self.delta, alpha=self.pending_mix)
            self._pending_slices.append(slice(None))
        self.delta.mul_(self.scale)
        self.pending_mix, self.scale = 0.0, 1.0

    def _move(self, piece: slice, difference: Tensor, x_factor: float, delta_factor: float) -> None:
        """Adds x_factor · difference to a piece of the current x, and delta_factor · difference to that of δ."""
        in_delta = delta_factor / self.scale if delta_factor else 0.0
        self.pending[piece].add_(difference, alpha=x_factor - self.pending_mix * in_delta)
        self._pending_slices.append(piece)
        if in_delta:
            self.delta[piece].add_(difference, alpha=in_delta)

    def _pieces(self, count: int, start: int) -> Iterator[slice]:
        """Yields about `count` pieces of x, from the entry `start` to the end and on from the beginning."""
        d = self._x.numel()
        length = math.ceil(d / max(1, min(count, d // MIN_PIECE_NUMEL)))
        for begin, end in ((start, d), (0, start)):
            for first in range(begin, end, length):
                yield slice(first, min(first + length, end))

    def _current_x(self, piece: slice) -> Tensor:
        """Returns a piece of the current x, at the beginning of the send buffer."""
        out = self._send_buffer[: self._x[piece].numel()]
        if self._pending_slices:
            torch.add(self._local_x[piece], self.pending[piece], out=out)
        else:
            out.copy_(self._local_x[piece])
        return out.add_(self.delta[piece], alpha=self.pending_mix) if self.pending_mix else out

    def _apply_pending(self) -> None:
        """Adds the pending changes to the model; only between steps, never during a forward or backward pass."""
        for piece in self._pending_slices:
            self._x[piece].add_(self.pending[piece])
            self.pending[piece].zero_()
        if self.pending_mix:
            self._x.add_(self.delta, alpha=self.pending_mix)
        self._pending_slices, self.pending_mix, self._local_x = [], 0.0, self._x

    # The graph's constants at the current rate. η is proportional to the rate; α̃ does not depend on it.

    def _eta(self) -> float:
        if not self.momentum or self._graph.size == 1:
            return 0.0
        return self._graph.constants(self._current_rate()).eta

    def _alpha_tilde(self) -> float:
        return self._graph.constants().alpha_tilde if self.momentum else 0.5

    def _current_rate(self) -> float:
        return max(self.measured_rate, 1e-6) if self.rate == "auto" else self.rate

    def _rate_gain(self) -> float:
        """Returns the weight of the latest step in `measured_rate`: a plain mean at first, then a moving average."""
        return 1 / min(max(1, self.steps), WINDOW)

    # When to exchange.

    def _request_exchanges(self, gossip: Gossip, worker: Replica) -> None:
        self._watch.add_step(worker.comm.now())
        if self.rate == "auto":
            # Missed exchanges are not accumulated, except for one, so that the request can become urgent.
            patience = 2
            self.requested = min(self.requested + 1, self.exchanges + patience)
        else:
            patience = max(2, math.ceil(self.rate * self.slack / 2))
            self.requested += due_exchanges(self.rate, self._rank, worker.step)
        total = self.requested - self._resumed_exchanges
        gossip.seek(total, urgently=total - patience + 1)
        if self.rate != "auto":
            # Training waits only for exchanges that are urgent by now: others might never be made.
            required = total - max(patience - 1, math.ceil(self.rate * self.slack))
            if gossip.exchanges < required:
                start = worker.comm.now()
                gossip.wait(required)
                self._watch.add_wait(worker.comm.now() - start)
        self._watch.check(None if self.rate == "auto" else self.rate, self.measured_rate, worker.comm.now())

    def check_state(self, saved: Any, step: int) -> None:
        super().check_state(saved, step)
        if saved["mixed_until"] > saved["clock"]:
            raise ValueError(f"method.mixed_until must be at most clock={saved['clock']}, not {saved['mixed_until']}")

    def merge(self, saved: list[dict[str, Any]], worker: Replica) -> tuple[Tensor, dict[str, Any]]:
        """Every worker starts from mean(x) at the latest clock, with δ = 0 and no exchange owed.

        This is what `drain` and the average at the end do. At a common clock value mean(δ) is 0, so nothing is lost.
        Exchanges that were under way are dropped by both of their ends, which keeps the mean.
        """
        _, merged = super().merge(saved, worker)
        states = [one["method"] for one in saved]
        now = max(one["clock"] for one in states)
        xs = []
        for whole, one in zip(saved, states, strict=True):
            mix = one["pending_mix"] + mixing(now - one["mixed_until"])[0] * one["scale"]
            xs.append(whole["x"].double() + one["pending"].double() + mix * one["delta"].double())
        x = mean_of(xs).to(saved[0]["x"].dtype)
        exchanges = max(one["exchanges"] for one in states)
        return x, merged | {
            "delta": torch.zeros_like(x),
            "pending": torch.zeros_like(x),
            "scale": 0.0,
            "pending_mix": 0.0,
            "clock": now,
            "mixed_until": now,
            "steps": max(one["steps"] for one in states),
            "exchanges": exchanges,
            "requested": exchanges,
            "exchange_steps": max(one["exchange_steps"] for one in states),
        }

    def state_dict(self) -> dict[str, Any]:
        if self._gossip is not None:
            # Paused until the next step: otherwise an exchange could be in one rank's checkpoint and not in its peer's.
            self._gossip.pause()
        return super().state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if self._gossip is not None:
            self._gossip.pause()
        super().load_state_dict(saved)
        self._local_x, self._pending_slices = self._x, [slice(None)]
        self._resumed_exchanges = self.exchanges - (self._gossip.exchanges if self._gossip is not None else 0)
