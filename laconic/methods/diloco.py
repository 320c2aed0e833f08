"""DiLoCo and streaming DiLoCo: local steps, then a step of an outer optimizer on the averaged difference.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105, and "Streaming
DiLoCo with overlapping communication", arXiv 2501.18512.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from laconic.comm import Comm
from laconic.comm.coded_mean import CodedMean, GatheredMean, Part, PlainMean, block_of, split
from laconic.comm.saved_mean import average_saved, seat
from laconic.compress import Compressor, TopK, bits_per_entry
from laconic.forms import Choice, Each, Form, Maybe, Real, Whole, form_of
from laconic.method import (
    DIFFERENCE,
    Method,
    Replica,
    check_choice,
    check_count,
    check_number,
    kernels_of,
    mean_of,
    state,
)
from laconic.methods.averaging import Moments, check_compressor, squared_norm
from laconic.methods.flight import Flight

NOTHING = Choice((None,))
NAME = "pseudo-gradient"  # in error messages


@dataclass
class DiLoCo(Method):
    """Runs `period` local steps, then makes an outer Nesterov step on the mean difference of all workers.

    All workers hold the outer parameters θ and the outer momentum b, bit-identical. Every `period` steps

        Δ = mean(θ − x_i) ;   b ← μb + Δ ;   θ ← θ − η(Δ + μb) ;   x_i ← αx_i + (1 − α)θ

    with the outer rate η, the outer momentum μ and the mixing factor α. The local optimizer's state stays local.
    Streaming DiLoCo does this for one fragment of the parameters at a time, and workers continue to compute while a
    fragment travels.

    Args:
        period: H; every entry is sent once in so many steps.
        outer_lr: η, the learning rate of the outer optimizer.
        outer_momentum: μ, its Nesterov momentum; 0 for none. `outer_lr=1, outer_momentum=0` is `LocalSGD`.
        fragments: contiguous parts into which the parameters are cut; they are applied in steps that are spread evenly
            over the period, with the last one at its end.
        delay: steps from sending a fragment to applying its average; less than `period`. 0: workers wait for it.
        mixing: α, the share of a worker's local parameters that an applied fragment keeps. "steps": it keeps the local
            steps that were made while the fragment travelled, and no others: x_i ← θ + x_i − (x_i when it was sent).
            None: 0 where workers wait, else 0.5.
        moments: `"averaged"` also averages the fragment's entries of the optimizer's state (momentum, Adam's m and v)
            when it is sent, in fp32; workers wait for that.
        compressor: quantizes θ − x_i and the mean of it, with error feedback; such as `Uniform(4)`.
        hops: 1: quantized messages go from all to all; 2: through owners, with fewer bytes from three workers on. None:
            1 with `TopK`, as the mean of sparse messages is not sparse, else 2.
        decay: the share of the quantization errors that is kept from one period to the next.

    With `TopK` most of θ − x_i is late or decays, so the outer rate can be larger than 1. This is SparseLoCo without
    waiting: `DiLoCo(4, 2.5, 0.0, fragments=2, delay=2, mixing="steps", compressor=TopK(1/64, bits=1), decay=0.95)`.

    Bytes per period and worker: 2(n−1)/n · 4d, and as much for each averaged state vector. With a compressor, instead
    of the first, 2(n−1)/n quantized vectors (as n separate parts of each fragment), or n−1 with one hop. A single
    worker sends nothing and is the plain optimizer.

    A checkpoint of another number of workers: fragments in flight are applied as at the end of training, all start from
    mean(x) with the same θ and b; every worker gets the mean of the residuals, and the owners' residuals are cut anew.
    From one worker alone, θ is its x and b is 0.

    >>> import torch, laconic
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> with laconic.Worker(model, optimizer, laconic.DiLoCo(period=4, fragments=2, delay=1)) as worker:
    ...     for _ in range(8):
    ...         model(torch.ones(3)).backward()
    ...         optimizer.step()

    References:
        Douillard et al. 2023, https://arxiv.org/abs/2311.08105
        Douillard et al. 2025, https://arxiv.org/abs/2501.18512
        Sarfi et al. 2025 (SparseLoCo), https://arxiv.org/abs/2508.15706
    """

    paper: ClassVar[str] = "arXiv 2311.08105, 2501.18512"

    period: int = 32
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mixing: float | Literal["steps"] | None = None
    moments: Moments = "local"
    compressor: Compressor | None = None
    hops: Literal[1, 2] | None = None
    decay: float = 1.0

    theta: Tensor = state(merge="same")  # the outer parameters θ (d)
    momentum: Tensor = state(merge="same")  # the outer momentum b (d)
    rounds: int = state(0, form=Whole(), merge="same")  # averages of fragments applied so far
    pseudo_gradient: float | None = state(merge="same")  # ‖Δ‖ of the fragment applied last
    residual: Tensor | None = state(merge="mean")  # quantization error of this worker's messages (d)
    # Quantization error of the averages that this rank sends as an owner, fragment by fragment.
    owner_residual: Tensor | None = state(merge="method")

    _flights: list[Flight] = field(default_factory=list, init=False, repr=False, compare=False)
    # θ − x when it was sent, of fragments in flight (d); for mixing="steps"
    _differences: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("period", self.period)
        check_number("outer_lr", self.outer_lr, above=0)
        check_number("outer_momentum", self.outer_momentum, least=0, most=1)
        check_count("fragments", self.fragments)
        check_count("delay", self.delay, least=0)
        if self.fragments > self.period:
            raise ValueError(f"fragments must be at most period={self.period}, one in a step, not {self.fragments}")
        if self.delay >= self.period:
            raise ValueError(
                f"delay must be less than period={self.period}, not {self.delay}: "
                f"a fragment is applied before it is sent again"
            )
        if self.mixing is not None and self.mixing != "steps":
            check_number('mixing (or "steps")', self.mixing, least=0, most=1)
        check_choice("moments", self.moments, ("local", "averaged"))
        check_compressor(self.compressor)
        check_choice("hops", self.hops, (1, 2, None))
        check_number("decay", self.decay, least=0, most=1)
        for name, default in (("hops", None), ("decay", 1.0)):
            value = getattr(self, name)
            if self.compressor is None and value != default:
                raise ValueError(
                    f"{name}={value} is for quantized messages, and compressor=None sends fp32: leave it out"
                )

    def kernels(self, numel: int, workers: int) -> set[str]:
        if workers == 1 or self.compressor is None:
            return set()
        return kernels_of(self.compressor, DIFFERENCE)

    def setup(self, worker: Replica) -> None:
        comm, d = worker.comm, worker.x.numel()
        if self.fragments > d:
            raise ValueError(f"fragments must be at most the number of trained entries, {d}, not {self.fragments}")
        self.theta = worker.x.to(torch.promote_types(worker.x.dtype, torch.float32), copy=True)
        self.momentum = torch.zeros_like(self.theta)
        self._flights = []
        keeps_steps = self.mixing == "steps" and self.delay > 0
        self._differences = torch.zeros_like(self.theta) if keeps_steps else None
        self._pieces = [slice(p.start, p.stop) for p in split(0, d, range(self.fragments))]
        channel = comm.channel("background") if self.delay else comm
        if self.compressor is None:
            self._means: list[CodedMean | PlainMean] = [
                PlainMean(channel, piece.stop - piece.start) for piece in self._pieces
            ]
            return
        self.residual = torch.zeros_like(self.theta)
        owner_residuals: Sequence[Tensor | None] = [None] * self.fragments
        if self._hops == 2:
            owned = [part.numel for part in self._owned(comm.rank, comm.size)]
            self.owner_residual = self.theta.new_zeros(sum(owned))
            owner_residuals = torch.split(self.owner_residual, owned)
        self._means = [
            self._coded_mean(channel, piece, self.residual[piece], owner_residual)
            for piece, owner_residual in zip(self._pieces, owner_residuals, strict=True)
        ]

    def _parts(self, piece: slice, workers: int) -> list[Part]:
        """Returns a fragment's parts, one for each worker to average."""
        assert self.compressor is not None
        return split(piece.start, piece.stop, range(workers), unit=block_of(self.compressor))

    def _owned(self, rank: int, workers: int) -> list[Part]:
        """Returns the part of each fragment that a rank owns."""
        return [self._parts(piece, workers)[rank] for piece in self._pieces]

    def _coded_mean(
        self, comm: Comm, piece: slice, residual: Tensor | None, owner_residual: Tensor | None
    ) -> CodedMean:
        assert self.compressor is not None
        if self._hops == 1:
            return GatheredMean(
                comm, piece.start, piece.stop, self.compressor, residual=residual, decay=self.decay, name=NAME
            )
        return CodedMean(
            comm,
            self._parts(piece, comm.size),
            self.compressor,
            residual=residual,
            owner_residual=owner_residual,
            decay=self.decay,
            name=NAME,
        )

    @property
    def _hops(self) -> int:
        if self.compressor is None:
            return 1
        return self.hops or (1 if isinstance(self.compressor, TopK) else 2)

    def _due(self, step: int) -> int | None:
        """Returns the number of the fragment that is sent in this step, if any: number p, `delay` steps before
        (p + 1)/fragments of each period, where it is applied."""
        into = (step + self.delay - 1) % self.period + 1
        fragment = into * self.fragments // self.period - 1
        return fragment if -(-(fragment + 1) * self.period // self.fragments) == into else None

    def after_step(self, worker: Replica) -> None:
        if worker.comm.size == 1:
            return
        self._advance(worker, worker.step)
        fragment = self._due(worker.step)
        if fragment is None:
            return
        piece, mean = self._pieces[fragment], self._means[fragment]
        kept = None if self._differences is None else self._differences[piece]
        difference = torch.sub(self.theta[piece], worker.x[piece], out=kept)
        transfer = mean.send(difference, step=worker.step, counted=worker.counted)
        self._flights.append(Flight(piece, worker.step + self._first_wait, [mean], [transfer]))
        if self.delay == 0:
            self._advance(worker, worker.step)
        if self.moments == "averaged":
            for vector in worker.moments().values():
                worker.mean(vector[piece], out=vector[piece])

    @property
    def _first_wait(self) -> int:
        """Steps until the first message is waited for: owners average and answer half-way."""
        return -(-self.delay // self._hops)

    def _advance(self, worker: Replica, step: int) -> None:
        """Waits for the messages that are due, and applies the averages that have arrived."""
        flights, self._flights = self._flights, []
        for flight in flights:
            (mean,) = flight.means
            if flight.due <= step and flight.has_hops_left:
                flight.answer()
                flight.due += self.delay - self._first_wait
            if flight.due > step:
                self._flights.append(flight)
                continue
            self.rounds += 1
            x, theta = worker.x[flight.piece], self.theta[flight.piece]
            difference = None if self._differences is None else self._differences[flight.piece]
            average = mean.receive(flight.transfers[0])
            worker.comm.late.read(squared_norm(average), partial(self._note, worker))
            self._outer_step(theta, self.momentum[flight.piece], average)
            self._mix(x, theta, difference, average)

    def _note(self, worker: Replica, squares: Sequence[float]) -> None:
        self.pseudo_gradient = math.sqrt(sum(square for (square,) in worker.gather_slices(squares)))

    def _outer_step(self, theta: Tensor, momentum: Tensor, gradient: Tensor) -> None:
        """Makes one step of SGD with Nesterov momentum, in place; the gradient becomes the step's direction."""
        if self.outer_momentum:
            momentum.mul_(self.outer_momentum).add_(gradient)
            gradient.add_(momentum, alpha=self.outer_momentum)
        theta.sub_(gradient, alpha=self.outer_lr)

    @property
    def _alpha(self) -> float:
        if isinstance(self.mixing, str):
            return 0.0
        return (0.5 if self.delay else 0.0) if self.mixing is None else float(self.mixing)

    def _mix(self, x: Tensor, theta: Tensor, difference: Tensor | None, direction: Tensor) -> None:
        """Sets x after an outer step of θ in this direction; `difference` is θ − x when x was sent."""
        if difference is not None:
            x.sub_(direction, alpha=self.outer_lr).add_(difference)
        elif self._alpha:
            x.mul_(self._alpha).add_(theta, alpha=1 - self._alpha)
        else:
            x.copy_(theta)

    def drain(self, worker: Replica) -> None:
        while self._flights:
            self._advance(worker, max(flight.due for flight in self._flights))

    def reset(self, worker: Replica) -> None:
        for flight in self._flights:
            flight.wait()  # the network may still write to its buffers
        self._flights = []
        self.theta.copy_(worker.x)
        self.momentum.zero_()
        for residual in (self.residual, self.owner_residual):
            if residual is not None:
                residual.zero_()

    def common(self, worker: Replica) -> Literal["nothing", "x"]:
        is_whole = self.fragments == 1 and self.delay == 0 and self._alpha == 0
        return "x" if is_whole and worker.step and worker.step % self.period == 0 else "nothing"

    def reference(self) -> Tensor | None:
        return None if self.compressor is None else self.theta

    def agreed(self, worker: Replica) -> Tensor:
        return self.theta

    def unsliceable(self) -> str | None:
        return None if self.moments == "local" else 'it averages parts of the optimizer\'s state; set moments="local"'

    def sends(self, worker: Replica) -> bool:
        """Owners send too, when they answer. In a node, slices are gathered in a step that sends or applies."""
        step = worker.step + 1
        return self._due(step) is not None or any(flight.due <= step for flight in self._flights)

    def sent_until(self, worker: Replica) -> int:
        """The fragment that comes next was last sent one period before: the others were later."""
        coming = worker.step + 1
        while self._due(coming) is None:
            coming += 1
        return coming - self.period

    def metrics(self) -> dict[str, float]:
        """Returns `period`; `bits` per entry; `rounds`, averages of fragments applied so far; `backlog`, fragments in
        flight; `pseudo_gradient`, the norm of the average applied last."""
        return {
            "period": float(self.period),
            "bits": 32.0 if self.compressor is None else bits_per_entry(self.compressor),
            "rounds": float(self.rounds),
            "backlog": float(len(self._flights)),
            "pseudo_gradient": math.nan if self.pseudo_gradient is None else self.pseudo_gradient,
        }

    # What is saved.

    def state_dict(self) -> dict[str, Any]:
        """Returns everything, with what messages in flight will bring; waits for these."""
        kept = {} if self._differences is None else {"differences": self._differences}
        return super().state_dict() | kept | {"flights": [flight.state_dict() for flight in self._flights]}

    def state_forms(self, step: int) -> dict[str, Form]:
        code = None if self.compressor is None else str(self.compressor)
        flights = Each(Flight.form(self.theta.numel(), step, self.delay, self._hops, [(code,)]), most=self.fragments)
        without = {name: NOTHING for name in ("residual", "owner_residual") if getattr(self, name) is None}
        if self.delay == 0:
            flights = Each(NOTHING, most=0)
        kept = {} if self._differences is None else {"differences": form_of(self._differences)}
        return super().state_forms(step) | without | kept | {"pseudo_gradient": Maybe(Real(0)), "flights": flights}

    def check_state(self, saved: Any, step: int) -> None:
        super().check_state(saved, step)
        pieces = [[piece.start, piece.stop] for piece in self._pieces]
        found = [flight["piece"] for flight in saved["flights"]]
        if any(piece not in pieces or found.count(piece) > 1 for piece in found):
            raise ValueError(f"method.flights must be of different fragments among {pieces}, not of {found}")
        for i, flight in enumerate(saved["flights"]):
            mean = self._means[pieces.index(flight["piece"])]
            where = f"method.flights[{i}].transfers[0]"
            mean.check_saved(where, flight["transfers"][0], step, bool(flight["answered"]))

    def agreed_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        flights = [Flight.agreed(flight, self._hops) for flight in saved["flights"]]
        return super().agreed_state(saved) | {"flights": flights}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        own = dict(saved)
        starts = [piece.start for piece in self._pieces]
        self._flights = [
            Flight.restore(flight, [self._means[starts.index(flight["piece"][0])]], self.theta.device)
            for flight in own.pop("flights")
        ]
        if self._differences is not None:
            self._differences.copy_(own.pop("differences"))
        super().load_state_dict(own)

    def merge(self, saved: list[dict[str, Any]], worker: Replica) -> tuple[Tensor, dict[str, Any]]:
        _, merged = super().merge(saved, worker)
        states, n = [one["method"] for one in saved], len(saved)
        theta, momentum = merged["theta"].clone(), merged["momentum"].clone()
        xs = [one["x"].clone() for one in saved]
        if n == 1:  # one worker alone makes no outer steps: all its way would be taken for a pseudo-gradient
            theta.copy_(xs[0])
            momentum.zero_()
        owner_residual = None
        if self.owner_residual is not None:
            owner_residual = torch.zeros_like(theta)
            for rank, one in enumerate(states):
                owned = self._owned(rank, n)
                for part, values in zip(
                    owned, torch.split(one["owner_residual"], [p.numel for p in owned]), strict=True
                ):
                    owner_residual[part.start : part.stop] = values
        for number, flight in enumerate(states[0]["flights"]):
            piece = slice(*flight["piece"])
            average = self._average_saved(piece, [one["flights"][number] for one in states], owner_residual)
            merged["rounds"] += 1
            merged["pseudo_gradient"] = math.sqrt(squared_norm(average).item())
            self._outer_step(theta[piece], momentum[piece], average)
            for x, one in zip(xs, states, strict=True):
                difference = one["differences"][piece] if "differences" in one else None
                self._mix(x[piece], theta[piece], difference, average)
        if owner_residual is not None and self.owner_residual is not None:
            owned = self._owned(worker.comm.rank, worker.comm.size)
            merged["owner_residual"] = torch.cat([owner_residual[part.start : part.stop] for part in owned])
        kept = {} if self._differences is None else {"differences": torch.zeros_like(theta)}
        return mean_of(xs), merged | kept | {"theta": theta, "momentum": momentum, "flights": []}

    def _average_saved(self, piece: slice, flights: list[dict[str, Any]], owner_residual: Tensor | None) -> Tensor:
        """Returns the average of a fragment that all ranks saved in flight; owners answer now if they had not."""
        transfers = [flight["transfers"][0] for flight in flights]
        if self.compressor is None:
            arrived: Tensor = transfers[0]["arrived"]
            return arrived.clone()
        if owner_residual is None:  # one hop: what has arrived is the same on all ranks
            mean = self._coded_mean(seat(0, len(flights)), piece, None, None)
            mean.check_saved("method.flights", transfers[0], transfers[0]["step"], answered=False)
            return mean.receive(mean.restore(transfers[0]))
        parts, answered = self._parts(piece, len(flights)), bool(flights[0]["answered"])

        def make(comm: Comm) -> CodedMean:
            own = parts[comm.rank]
            return self._coded_mean(comm, piece, None, owner_residual[own.start : own.stop])

        return average_saved("method.flights", transfers, make, answered=answered)
