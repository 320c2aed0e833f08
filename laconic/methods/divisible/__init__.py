"""Divisible communication: wait for a small message in a step, and send the rest while computing.

After Xu & Bai, "Distributed Adaptive Optimization with Divisible Communication", ECML PKDD 2023. Only the abstract was
available: docs/methods/divisible.md says what the paper states and what was chosen here.

The files of this folder: this one is the method; `stretch.py` (with `stretch_numba.py`) gives Adam's local steps the
length they have on the mean gradient; `pieces.py` says which entries travel when, `averages.py` how they are averaged;
`pace.py` chooses the period and the delay, from times that `timing.py` measures; `correction.py` is for non-iid data,
`differences.py` warns of it; `saved.py` is for checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from laconic.comm import Comm
from laconic.compress import Compressor, Log, Pick, Uniform, bits_per_entry
from laconic.forms import Form
from laconic.method import DIFFERENCE, Method, Replica, check_choice, check_count, check_flag, kernels_of, state
from laconic.methods.divisible import saved as saved_state
from laconic.methods.divisible.averages import FOREGROUND, BackgroundAverages, ForegroundAverages
from laconic.methods.divisible.correction import Correction
from laconic.methods.divisible.differences import DifferenceWatch
from laconic.methods.divisible.pace import Pace, Times
from laconic.methods.divisible.pieces import foreground_block, next_piece, overlap
from laconic.methods.divisible.stretch import LARGE, Stretch, is_adam
from laconic.methods.divisible.timing import now, time_empty, time_work
from laconic.methods.flight import Flight

# The quantizers of background="auto": the second one only if the link is measured to be too slow for the first.
QUANTIZERS = (Uniform(4), Pick(7))
GRADIENT = Log(4)  # of the correction: gradients spread over powers of ten, where Adam's moves are of one size
# Up to this many workers, quantized messages go from all to all (one hop) by default. Two hops send fewer bytes from
# three workers on, but apply an average a `delay` later and quantize it twice: "auto" takes them where one hop would
# need a period above the usual one.
FEW = 4
# The periods of "auto" on a link that is fast enough; it takes a shorter one where that costs little computing. On
# non-iid data fresh averages are worth more, and fp32 needs no computing.
USUAL_PERIOD, USUAL_PERIOD_CORRECTED = 4, 2
SMOOTHING = 0.9  # of the metric `waiting`, from step to step


@dataclass
class Divisible(Method):
    """Runs local steps on each worker and averages their moves: a small block at once, all others in the background.

    Every worker holds the model x and the agreed model x̂, which is bit-identical on all workers. What it has moved and
    not sent yet is e = x − x̂ − s, where s is what its messages in flight carry. After each local optimizer step:

    1. Foreground: e of the next ⌈d/ratio⌉ entries is averaged, and every worker waits for it; not if these entries are
       in flight, so never at a period of 1, nor if `period` is "auto" and waiting takes more than 5 % of computing.
    2. Background: averages that were sent `delay` steps ago (twice that with two hops) are applied. Then the next
       1/period of all entries is quantized and sent; nobody waits for it. Averages are applied in a fixed step, never
       "when they arrive", so all workers do the same.

    With Adam or AdamW, local steps are stretched before, to the length that Adam would give them on the mean gradient
    of all workers (`stretch.py`).

    Applying an average ē means x̂ += ē and x += ē − (what this worker sent). What quantization leaves out stays in e and
    is sent later (error feedback). So mean(x) = x₀ + Σ mean(local steps) holds at every step, whatever the quantizer.

    Args:
        ratio: R; the foreground message has ⌈d/R⌉ entries. It hardly changes the result (docs).
        period: H, the number of steps in which the background sends every entry once. "auto" measures computing and
            the link, and takes 4 (2 with `corrected` or fp32), a longer period if the link needs it, or a shorter one
            if its quantizing costs at most 5 % of computing. None: no background.
        background: a compressor for the background, or None for fp32. "auto": `Uniform(4)`; if the period is "auto" too
            and the link is too slow for it, `Pick(7)`.
        corrected: adds the difference between the mean gradient and the local gradient, as last known, to local
            gradients (SCAFFOLD). For non-iid data; doubles the bytes of the background.
        max_period: the longest period that "auto" may choose. On a link too slow for that, steps wait.
        delay: steps from sending a background message to applying it. "auto" starts with 1 and, if `period` is "auto"
            too, takes the fewest in which a message arrives, as measured.
        hops: 1: quantized messages go from all to all; 2: through owners, with fewer bytes from three workers on.
            None: 1 for up to four workers, else 2; if the period is "auto", three or four workers also take 2 where
            the link would need a period above 4.

    Bytes per step and worker: foreground (n−1)·code₈(⌈d/R⌉) with one hop, else 2(n−1)/n · 4⌈d/R⌉; background, one hop,
    (n−1)·code(d)/H, two hops 2(n−1)/n · code(d)/H, in fp32 2(n−1)/n · 4d/H.

    A checkpoint of another number of workers: all start from mean(x) after everything in flight, as at the end of
    training, with x̂ = x. Corrections and the measurement of the period start anew.

    >>> import laconic, torch
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> with laconic.Worker(model, optimizer, laconic.Divisible(period=4)) as worker:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(2, 4)).sum().backward()
    ...         optimizer.step()

    References:
        Xu & Bai, Distributed Adaptive Optimization with Divisible Communication, ECML PKDD 2023,
        doi 10.1007/978-3-031-43418-1_39
    """

    paper: ClassVar[str] = "doi 10.1007/978-3-031-43418-1_39"

    ratio: int = 1024
    period: int | Literal["auto"] | None = "auto"
    background: Compressor | Literal["auto"] | None = "auto"
    corrected: bool = False
    max_period: int = 128
    delay: int | Literal["auto"] = "auto"
    hops: Literal[1, 2] | None = None

    x_hat: Tensor = state(merge="same")  # the agreed model (d)
    next_entry: int = state(0, merge="same")  # where the next background piece begins
    # Two hops: what this rank, as an owner, has not passed on (d).
    owner_residual: Tensor | None = state(merge="method")

    _waiting: float = field(default=0.0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("ratio", self.ratio)
        if self.period is not None and self.period != "auto":
            check_count("period", self.period)
        if self.background is not None and self.background != "auto" and not isinstance(self.background, Compressor):
            raise ValueError(f"background must be a compressor, 'auto' or None, not {self.background!r}")
        check_flag("corrected", self.corrected)
        if self.period is None and self.corrected:
            raise ValueError("corrected=True sends gradients in the background, so period must not be None")
        check_count("max_period", self.max_period)
        if self.delay != "auto":
            check_count("delay", self.delay)
        check_choice("hops", self.hops, (1, 2, None))
        if self.background is None and self.hops == 2:
            raise ValueError("hops=2 is for quantized messages, and background=None sends fp32: leave hops out")

    def kernels(self, numel: int, workers: int) -> set[str]:
        if workers == 1:
            return set()
        found = {"stretch"} if numel >= LARGE else set()
        if self.background is None:
            return found
        moves, *gradients = self._codes()
        if self.period is None:
            return found | kernels_of(FOREGROUND, DIFFERENCE)
        if self.period != "auto":
            moves = moves[:1]  # only a measured pace changes the quantizer
        return found | kernels_of(FOREGROUND, DIFFERENCE, *moves, *(code for codes in gradients for code in codes))

    def setup(self, worker: Replica) -> None:
        comm = worker.comm
        self.x_hat = worker.x.to(torch.promote_types(worker.x.dtype, torch.float32), copy=True)
        self._flights: list[Flight] = []
        self._pace: Pace | None = None
        self._stretch: Stretch | None = None
        self._correction: Correction | None = None
        self._sends = False  # whether there is a background
        self._left: float | None = None  # when the last step was over
        self._hop_choices = self._find_hop_choices(comm.size)
        if comm.size == 1:
            return
        self._watch = DifferenceWatch(comm.rank)
        is_quantized = self._hop_choices[0] == 1 and self.background is not None
        self._foreground = ForegroundAverages(comm, is_quantized=is_quantized)
        if any(map(is_adam, worker.optimizers)):
            self._stretch = Stretch(worker)
        if self.period is None:
            return
        self._sends = True
        has_owners = 2 in self._hop_choices
        if has_owners:
            self.owner_residual = torch.zeros_like(self.x_hat)
        if self.corrected:
            self._correction = Correction(worker, has_owners=has_owners)
        residuals = [self.owner_residual, self._correction.owner_residual if self._correction else None]
        self._channel = comm.channel("background")
        self._background = BackgroundAverages(self._channel, residuals)
        if self.period == "auto":
            # The longest slice of the node: all ranks must come to the same decisions.
            d = int(max(numel for (numel,) in worker.gather_slices([worker.x.numel()])))
            codes = [4.0 * d if code is None else float(code.nbytes(d)) for code in self._codes()[0]]
            vectors = {1: comm.size - 1, 2: 2 * (comm.size - 1) / comm.size}  # that a worker sends in a sweep
            sizes = {hops: [vectors[hops] * code for code in codes] for hops in self._hop_choices}
            is_short = self.background is None or self.corrected
            usual = USUAL_PERIOD_CORRECTED if is_short else USUAL_PERIOD
            block = -(-d // self.ratio)
            foreground = vectors[1] * FOREGROUND.nbytes(block) if is_quantized else vectors[2] * 4 * block
            self._pace = Pace(
                comm, self._delays, usual, self.max_period, sizes, foreground, worker.x.device, worker.gather_slices
            )

    def _find_hop_choices(self, workers: int) -> tuple[int, ...]:
        """Returns the hops that messages may take, those with which training starts first."""
        if self.background is None or workers == 1:
            return (1,)
        if self.hops is not None:
            return (self.hops,)
        if workers > FEW:
            return (2,)
        return (1, 2) if self.period == "auto" and workers > 2 else (1,)

    @property
    def _hops(self) -> int:
        return self._hop_choices[0] if self._pace is None else self._pace.hops

    @property
    def _delays(self) -> range:
        """The delays to choose from."""
        if self.delay != "auto":
            return range(self.delay, self.delay + 1)
        return range(1, 1 + (max(1, self.max_period // max(self._hop_choices)) if self.period == "auto" else 1))

    @property
    def _delay(self) -> int:
        return self._delays[0] if self._pace is None else self._pace.delay

    @property
    def _code(self) -> Compressor | None:
        """The quantizer of the background now."""
        if self.background == "auto":
            return QUANTIZERS[0 if self._pace is None else self._pace.choice]
        return self.background

    def _codes(self) -> list[tuple[Compressor | None, ...]]:
        """The quantizers that the background may use, for each vector that travels."""
        moves = QUANTIZERS if self.background == "auto" else (self.background,)
        gradients = None if self.background is None else GRADIENT
        return [moves, (gradients,)] if self.corrected else [moves]

    @property
    def _period(self) -> int:
        if self._pace is not None:
            return self._pace.period
        return self.period if isinstance(self.period, int) else 0

    @property
    def _sweep(self) -> int:
        """Steps from one message of a piece to the next: a piece that is in flight is not sent again."""
        return max(self._period, self._delay * self._hops)

    def before_step(self, worker: Replica) -> None:
        if self._correction is not None:
            self._correction.before_step(worker)

    def after_step(self, worker: Replica) -> None:
        comm = worker.comm
        if comm.size == 1:
            return
        computed = now(comm, self._timed_device(worker))
        waits = self._time_empty(worker) if self._is_measuring(worker) else None
        piece = next_piece(self.next_entry, worker.x.numel(), self._period)
        stretching = 0.0
        if self._stretch is not None:
            self._stretch.count(worker)
            if self._stretches_every_step:
                stretching = self._time_stretch(worker, piece)
        # Averages from the background are applied while the foreground message travels.
        foreground = self._start_foreground(worker)
        working = time_work(comm, self._timed_device(worker), lambda: self._apply_due(worker, worker.step))
        self._finish_foreground(worker, foreground)
        if self._sends and not any(overlap(piece, flight.piece) for flight in self._flights):
            if self._stretch is not None and not self._stretches_every_step:
                stretching = self._time_stretch(worker, piece)
            if waits is not None:
                for flight in self._flights:
                    flight.wait()  # answers on the way would slow down the message that is timed
            working += time_work(comm, self._timed_device(worker), lambda: self._send(worker, piece))
            if waits is not None:
                self._measure(worker, computed, waits, working, stretching)
        self._note_waiting(comm)

    @property
    def _stretches_every_step(self) -> bool:
        return self._pace is None or self._pace.stretches_every_step

    def _time_stretch(self, worker: Replica, piece: slice) -> float:
        """Stretches all entries, or those of a piece. Returns the seconds for all."""
        stretch, every_step, steps = self._stretch, self._stretches_every_step, self._sweep if self._sends else 1
        assert stretch is not None

        def work() -> None:
            stretch.apply(worker, piece, steps, in_every_step=every_step)

        seconds = time_work(worker.comm, self._timed_device(worker), work)
        return seconds if every_step else seconds * worker.x.numel() / (piece.stop - piece.start)

    def _unsent(self, worker: Replica, part: slice) -> Tensor:
        """Returns e = x − x̂ of entries of which nothing is in flight."""
        return worker.x[part] - self.x_hat[part]

    def _apply(self, worker: Replica, part: slice, average: Tensor, own: Tensor) -> None:
        self.x_hat[part] += average
        worker.x[part] += average.sub_(own)

    def _start_foreground(self, worker: Replica) -> Flight | None:
        if self._pace is not None and not self._pace.has_foreground:
            return None
        block = foreground_block(worker.step, worker.x.numel(), self.ratio)
        if any(overlap(block, flight.piece) for flight in self._flights):
            return None  # the background is about to average these entries
        mean = self._foreground.get(block.stop - block.start)
        transfer = mean.send(self._unsent(worker, block), step=worker.step, counted=worker.counted)
        return Flight(block, worker.step, [mean], [transfer])

    def _finish_foreground(self, worker: Replica, flight: Flight | None) -> None:
        if flight is not None:
            ((average, own),) = flight.receive()
            self._apply(worker, flight.piece, average, own)

    def _send(self, worker: Replica, piece: slice) -> None:
        self.next_entry = piece.stop % worker.x.numel()
        vectors, codes = [self._unsent(worker, piece)], [self._code]
        if self._correction is not None:
            vectors.append(self._correction.take(piece, worker.step))
            codes.append(None if self.background is None else GRADIENT)
        means = [self._background.get(piece, code, self._hops, is_move=i == 0) for i, code in enumerate(codes)]
        transfers = [
            mean.send(vector, step=worker.step, counted=worker.counted)
            for mean, vector in zip(means, vectors, strict=True)
        ]
        self._flights.append(Flight(piece, worker.step + self._delay, means, transfers))

    def _apply_due(self, worker: Replica, step: int) -> None:
        flights, self._flights = self._flights, []
        for flight in flights:
            if flight.due > step:
                self._flights.append(flight)
            elif flight.has_hops_left:
                flight.answer()
                flight.due += self._delay
                self._flights.append(flight)
            else:
                (average, own), *gradient = flight.receive()
                has_counted = worker.comm.rank in flight.transfers[0].counted
                if not self.corrected and has_counted:
                    self._watch.add(worker.step, flight.piece.stop == worker.x.numel(), average, own)
                self._apply(worker, flight.piece, average, own)
                if self._correction is not None and has_counted:
                    self._correction.put(flight.piece, *gradient[0])

    def drain(self, worker: Replica) -> None:
        """Applies everything in flight; owners put what they have not passed on into their own model."""
        while self._flights:
            self._apply_due(worker, max(flight.due for flight in self._flights))
        if self.owner_residual is not None:
            worker.x.add_(self.owner_residual, alpha=worker.comm.size)
            self.owner_residual.zero_()

    def reset(self, worker: Replica) -> None:
        for flight in self._flights:
            flight.wait()  # the network may still write to its buffers
        self._flights = []
        self.x_hat.copy_(worker.x)
        self.next_entry = 0
        if self.owner_residual is not None:
            self.owner_residual.zero_()
        if self._correction is not None:
            self._correction.restart(worker.step)
            self._correction.shift.zero_()

    def common(self, worker: Replica) -> Literal["step"]:
        return "step"

    def reference(self) -> Tensor | None:
        return None if self.background is None else self.x_hat

    def agreed(self, worker: Replica) -> Tensor:
        return self.x_hat

    def unsliceable(self) -> None:
        return None

    def sent_until(self, worker: Replica) -> int:
        """A rank's moves are sent piece by piece, in one sweep."""
        return worker.step + 1 - (self.ratio if self.period is None else self._sweep)

    def _is_measuring(self, worker: Replica) -> bool:
        # A rank that has run out of data computes nothing: that would be mistaken for fast computing.
        return self._pace is not None and self._pace.is_measuring(worker.step) and not worker.anyone_done

    def _timed_device(self, worker: Replica) -> torch.device | None:
        """Returns the device that clocks wait for in this step: otherwise they would time the launching of kernels."""
        return worker.x.device if self._is_measuring(worker) else None

    def _time_empty(self, worker: Replica) -> tuple[float, float]:
        """Returns the seconds of an empty message of the foreground, which waits for the slowest worker too, and then
        of one of the background."""
        device = worker.x.device
        quantized = self._foreground.is_quantized
        waiting = time_empty(worker.comm, device, is_quantized=quantized, is_waited_for=True)
        return waiting, time_empty(self._channel, device, is_quantized=self.background is not None, is_waited_for=False)

    def _measure(
        self, worker: Replica, computed: float, waits: tuple[float, float], working: float, stretching: float
    ) -> None:
        """Waits for the messages just sent, to see how long they take. They are applied when they are due."""
        pace, flight, start = self._pace, self._flights[-1], now(worker.comm, worker.x.device)
        assert pace is not None  # only it measures
        flight.wait()
        seconds = worker.comm.now() - start
        if self._left is not None:
            pieces = worker.x.numel() / (flight.piece.stop - flight.piece.start)
            messages, before = pieces * self._hops, pace.decision
            times = Times(computed - self._left, *waits, seconds * messages, working * pieces, stretching, messages)
            pace.add(worker.step, times)
            if pace.decision != before:
                self._recut(worker)

    def _recut(self, worker: Replica) -> None:
        """Pieces, their owners or their delay change: nothing may be left that was cut the old way."""
        self._background.clear()
        self.next_entry = 0  # or the first new sweep would have other pieces than those that follow
        self.drain(worker)  # with one hop all messages are there
        if self._correction is not None:
            self._correction.restart(worker.step)

    def metrics(self) -> dict[str, float]:
        """Returns `period`; `delay`; `hops`; `bits` per entry of the background; `foreground`, 1 or 0; `backlog`, the
        pieces in flight; `waiting`, the share of a step's time; with Adam `stretch`, the mean of ρ."""
        code = self._code
        bits = 32.0 if code is None else bits_per_entry(code)
        found = {
            "period": float(self._period),
            "delay": float(self._delay),
            "hops": float(self._hops),
            "bits": bits if self.period is not None else 0.0,
            "foreground": float(self._pace is None or self._pace.has_foreground),
            "backlog": float(len(self._flights)),
            "waiting": self._waiting,
        }
        if self._stretch is not None:
            found["stretch"] = self._stretch.mean_stretch()
        return found

    def _note_waiting(self, comm: Comm) -> None:
        now = comm.now()
        if self._left is not None:
            share = comm.meter.current_step.seconds() / max(now - self._left, 1e-9)
            self._waiting = SMOOTHING * self._waiting + (1 - SMOOTHING) * share
        self._left = now

    # What is saved; the rules are in saved.py.

    def state_dict(self) -> dict[str, Any]:
        """Returns everything, with what messages in flight will bring; waits for these."""
        return super().state_dict() | saved_state.collect(self)

    def state_forms(self, step: int) -> dict[str, Form]:
        return super().state_forms(step) | saved_state.forms(self, step)

    def check_state(self, saved: Any, step: int) -> None:
        super().check_state(saved, step)
        saved_state.check(self, saved, step)

    def agreed_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        return super().agreed_state(saved) | saved_state.agreed(saved)

    def merge(self, saved: list[dict[str, Any]], worker: Replica) -> tuple[Tensor, dict[str, Any]]:
        return saved_state.merge(self, saved)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved_state.restore(self, saved))
        self._left = None  # the time since the last step was no computing
