"""Divisible communication: wait for little, send the rest while computing.

After Xu & Bai, "Communication-Efficient Distributed Training with Divisible Communication" (ECML PKDD 2023); only the
abstract was at hand: docs/methods/divisible.md says what is stated and what is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from laconic.comm import Comm
from laconic.compress import Compressor, Log, Uniform
from laconic.method import Method, Replica, check_choice, check_count, state, with_tensors
from laconic.methods.carried import Carried, Moment, Moves
from laconic.methods.choice import CODES, LONGEST_COMMON, Choice
from laconic.methods.common import CommonAdam
from laconic.methods.correction import Correction
from laconic.methods.means import Coders, GatheredMean, Mean, MeanOfCodes, OwnersMean, PlainMean
from laconic.methods.pieces import Piece, foreground_block, in_grains

FOREGROUND_CODE = Uniform(bits=8)  # a byte from each to each; what it loses is kept in m
MANY = 8  # workers from which on that is no less than a mean in all bits
GRADIENT_CODE = Log(bits=4)  # gradients spread over powers of ten, where steps of Adam are nearly alike
FEW = 4  # workers up to which a coded mean goes in one hop by default, with n/2 times the bytes of two
SMOOTHING = 0.9  # of the metrics, from step to step


@dataclass
class Divisible(Method):
    """Each worker steps alone; what it did is averaged in two ways: a little of it at once, all of it somewhat later.

    Foreground: in each step another d/ratio of the coordinates are averaged, and everyone waits for that.
    Background: in `period` steps all of them are sent, piece by piece, on a channel of their own. A piece's mean is
    applied a fixed number of steps later, for which nobody waits as long as the link keeps up.

    Args:
        ratio: R; the foreground message is ⌈d/R⌉ long.
        period: H, steps in which the background has sent everything once. "auto" measures computing and the link, and
            takes the shortest that fits. None: no background.
        moments: what the optimizer's state is made of. "common", for Adam and AdamW: m and v are those of the mean
            gradient, a few steps late, and what travels is what gradients add to m. "local": the state is of the
            worker's own gradients, and what travels is how far it has moved. For workers that hold different kinds of
            data and other optimizers, "corrected": of gradients corrected by the stale mean gradient, which travels
            too (in `Log(4)` where there is a compressor); or "averaged": the state itself is averaged in the
            background, which takes no compressor. None: "common" where it can be and the period is at most 8 (32 where
            "auto" has seen that data is unlike), else "local".
        background: a compressor for the background, with error feedback; None sends all bits. "auto": `Uniform(4)`, and
            where the period is "auto" too and the link too slow to send that in half of 4 steps, with "common"
            `Uniform(3)` or `Pick(4)`, with which workers begin; after some steps, what can be sent in a quarter of 4,
            or `Pick(7)`. Picks only as long as workers are not seen to hold unlike data.
        max_period: the longest that "auto" may choose. On a link that is slower than that, steps wait.
        delay: steps from sending a background message to applying it.
        hops: messages, one after the other, that a mean of codes takes: 1, all codes to everyone, who has the mean a
            `delay` later; or 2, by way of owners, which needs fewer bytes from three workers on. None: 1 for up to
            four workers, else 2.

    Bytes a step and worker: foreground 2(n−1)/n · 4⌈d/R⌉; background 2(n−1)/n · c·d/H entries of 4 bytes, or with a
    compressor codes of h·d/H entries of each, h = n−1 with one hop and 2(n−1)/n with two; for c = 1 vector ("common",
    "local"), 2 ("corrected") or 1 + those averaged. "common" with codes in one hop has the foreground in 8 bits, about
    (n−1)⌈d/R⌉ bytes, and adds what the step was made with, 8 bytes and 40 for each parameter group.
    """

    paper: ClassVar[str] = "doi 10.1007/978-3-031-43418-1_39"

    ratio: int = 1024
    period: int | Literal["auto"] | None = "auto"
    moments: Literal["common", "local", "corrected", "averaged"] | None = None
    background: Compressor | Literal["auto"] | None = "auto"
    max_period: int = 128
    delay: int = 1
    hops: Literal[1, 2] | None = None

    # The same on all ranks to the last bit (d). With "common", see `CommonAdam`. Else x = x_hat + e + s, where e are
    # this worker's moves that are in no message yet, and s those in a background message. Neither is stored: s is what
    # pieces in flight were given, and e is x − x_hat − s, so that what rounding loses stays in e and is sent later.
    x_hat: Tensor = state()
    column: int = state(0)  # where the next piece begins

    _flying: list[Piece] = field(default_factory=list, init=False, repr=False, compare=False)
    _choice: Choice | None = field(default=None, init=False, repr=False, compare=False)
    _waiting: float = field(default=0.0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("ratio", self.ratio)
        if self.period not in ("auto", None):
            check_count("period", self.period)
        check_choice("moments", self.moments, ("common", "local", "corrected", "averaged", None))
        if self.background not in ("auto", None) and not isinstance(self.background, Compressor):
            raise ValueError(f"background must be a compressor, 'auto' or None, not {self.background!r}")
        if self.period is None and self.moments not in ("local", None):
            raise ValueError(f"moments={self.moments!r} travel in the background, so period must not be None")
        if self.background is not None and self.moments == "averaged":
            raise ValueError(
                f"moments='averaged' needs background=None, not {self.background!r}: Adam's v does not survive coding; "
                f"moments='corrected' takes any compressor"
            )
        check_count("max_period", self.max_period)
        check_count("delay", self.delay)
        check_choice("hops", self.hops, (1, 2, None))
        if self.background is None and self.hops == 2:
            raise ValueError("hops=2 is for codes, and background=None has none: a mean in all bits is one all-reduce")

    def setup(self, worker: Replica) -> None:
        comm = worker.comm
        self.x_hat = worker.x.clone()
        self._left: float | None = None  # when the last step was over
        self._mean: Mean | None = None
        self._adam: CommonAdam | None = None
        self._common: CommonAdam | None = None  # the same, as long as it travels instead of the moves
        self._correction: Correction | None = None  # travels with the moves
        if self.period is None or comm.size == 1:
            return
        moments = self._resolve_moments(worker)
        if moments == "common":
            self._common = self._adam = CommonAdam(worker, self.x_hat)
        if moments == "corrected":
            self._correction = Correction(worker)
        if self.period == "auto":
            journey, is_common = self._journey(comm.size), self._common is not None
            self._choice = Choice(comm, worker.x, self.background, journey, self.max_period, is_common=is_common)
        channel, code = comm.channel("background"), self._code()
        if code is None:
            self._mean = PlainMean(channel, worker.x.numel())
        else:
            of_gradient = [GRADIENT_CODE] if self._correction is not None else []
            coders = Coders([code, *of_gradient], comm.rank, worker.x.device)
            self._mean = (GatheredMean if self._hops(comm.size) == 1 else OwnersMean)(channel, worker.x.numel(), coders)

    def _code(self) -> Compressor | None:
        """Of the background, now."""
        if self.background == "auto":
            return CODES[0] if self._choice is None else self._choice.compressor
        return self.background

    def _hops(self, workers: int) -> int:
        return 1 if self.background is None else self.hops or (1 if workers <= FEW else 2)

    def _journey(self, workers: int) -> int:
        """Steps from sending a piece to its mean."""
        return self.delay * self._hops(workers)

    def _resolve_moments(self, worker: Replica) -> str:
        unfit = CommonAdam.unfit(worker.optimizer)
        journey = self._journey(worker.comm.size)
        period = self.period if isinstance(self.period, int) else self.max_period
        if unfit is None and period < journey:
            unfit = f"needs a period of at least the {journey} steps that a piece is on its way, not {period}"
        if self.moments == "common" and unfit is not None:
            raise ValueError(f"moments='common' {unfit}")
        is_long = self.period != "auto" and period > LONGEST_COMMON
        moments = self.moments or ("common" if unfit is None and not is_long else "local")
        own = [moments, CommonAdam.settings(worker.optimizer) if moments == "common" else ""]
        notes = worker.comm.meet("the moments of Divisible", own)
        for what, values in zip(("moments", "settings of the optimizer"), zip(*notes, strict=True), strict=True):
            if len(set(values)) > 1:
                raise ValueError(f"{what} must be the same on all ranks, and are {'; '.join(values)}")
        return moments

    def before_step(self, worker: Replica) -> None:
        if self._common is not None:
            self._common.before_step()
        if self._correction is not None:
            self._correction.before_step(worker)

    def after_step(self, worker: Replica) -> None:
        comm = worker.comm
        if comm.size == 1:
            return
        computed = comm.now()
        if self._common is not None:
            self._common.after_step()
        block = foreground_block(worker.step, worker.x.numel(), self.ratio)
        finish = self._foreground(worker, block)
        if self._mean is not None:
            self._receive(worker, self._mean, worker.step)
        finish()
        if self._mean is not None:
            choice, common = self._choice, self._common
            if choice is not None and common is not None and choice.follow_data(worker.step, common.steering):
                self._follow(worker, self._mean, choice)
            self._send(worker, self._mean)
            if choice is not None and choice.is_measuring(worker.step):
                self._measure(worker, self._mean, choice, computed)
        if self._common is not None:
            self._common.leave()
        self._note_waiting(comm)

    def drain(self, worker: Replica) -> None:
        while self._mean is not None and self._flying:
            self._receive(worker, self._mean, max(piece.due for piece in self._flying))
        if self._common is not None:
            self._common.leave()

    def metrics(self) -> dict[str, float]:
        """`period` now, and `bits` of an entry in the background; `backlog`, the pieces sent and not yet applied;
        `waiting`, the share of a step's time."""
        code = self._code()
        bits = 32.0 if code is None else round(8 * code.nbytes(1 << 20) / (1 << 20), 1)
        return {
            "period": float(self._period()),
            "bits": bits if self.period is not None else 0.0,
            "backlog": float(len(self._flying)),
            "waiting": self._waiting,
        }

    def moves(self, worker: Replica) -> Moves:
        """What this worker has moved and told nobody."""
        return Moves(worker.x, self.x_hat, self._in_flight)

    def _in_flight(self, wanted: slice) -> Iterator[tuple[slice, Tensor]]:
        """s within these coordinates, where something of them is on its way."""
        for piece in self._flying:
            for owner, part in enumerate(piece.parts):
                start, stop = max(part.start, wanted.start), min(part.stop, wanted.stop)
                if start < stop and self._mean is not None:
                    yield slice(start, stop), self._mean.said(piece, owner, start - part.start, stop - part.start)

    def _carried(self, worker: Replica) -> list[Carried]:
        if self._common is not None:
            return [self._common]
        vectors: list[Carried] = [self.moves(worker)]
        if self.moments == "averaged":
            moments = worker.moments()
            if not moments:
                raise ValueError("moments='averaged' is for an optimizer that has some, and this one has none")
            vectors += [Moment(name, vector) for name, vector in moments.items()]
        if self._correction is not None:
            vectors.append(self._correction)
        return vectors

    def _foreground(self, worker: Replica, block: slice) -> Callable[[], None]:
        """Begin, and give what is to be done at the end. What has come in the background is seen to in between, while
        others are on their way; it is not sent in between, where it would be in the foreground's way."""
        workers = worker.comm.size
        if self._common is not None and self.background is not None and self._hops(workers) == 1 and workers < MANY:
            return self._common.tell(block, FOREGROUND_CODE)
        if self._common is not None:
            self._common.meet(block)
        else:
            moves = self.moves(worker)
            e = moves.residual(block)
            moves.move(block, worker.comm.mean(e), e)
        return lambda: None

    def _send(self, worker: Replica, mean: Mean) -> None:
        """The next piece: its e becomes s, so that nothing is sent twice. One message a step starts, new or second."""
        every = min(mean.messages, self._period())
        if worker.step % every:
            return
        row = mean.layout.row
        stop = min(self.column + in_grains(-(-row * every // self._period())), row)
        piece = Piece(mean.layout.parts(self.column, stop), worker.step, worker.step + self.delay)
        if self._common is not None and any(piece.overlaps(other) for other in self._flying):
            return  # a short sweep: what it has gained is known when the piece before is there
        self.column = stop % row
        mean.send(piece, self._carried(worker))
        self._flying.append(piece)

    def _receive(self, worker: Replica, mean: Mean, step: int) -> None:
        """Whatever is due by this step: a fixed step, never "if it is there", for all ranks must do the same."""
        flying, self._flying = self._flying, []
        for piece in flying:
            if piece.due > step:
                self._flying.append(piece)
            elif not mean.receive(piece, self._carried(worker)):
                piece.due += self.delay
                self._flying.append(piece)

    def _period(self) -> int:
        if self._choice is not None:
            return self._choice.period
        return self.period if isinstance(self.period, int) else 0

    def _measure(self, worker: Replica, mean: Mean, choice: Choice, computed: float) -> None:
        """Wait for the messages on their way now, to see how long they take. They are applied when they are due."""
        comm = worker.comm
        started = [piece for piece in self._flying if piece.due == worker.step + self.delay]
        if not started:
            return
        times = [comm.now()]
        for piece in self._flying:
            piece.wait()
        times.append(comm.now())
        # What the shortest message takes is no matter of the period, and the next foreground message takes as long.
        comm.mean(worker.x.new_zeros(1))
        times.append(comm.now())
        transfer = max(0.0, (times[1] - times[0]) - (times[2] - times[1]))
        if self._left is not None:
            columns = sum(piece.parts[0].stop - piece.parts[0].start for piece in started)
            choice.add(worker.step, computed - self._left, transfer * mean.messages * mean.layout.row / columns)
        self._follow(worker, mean, choice)

    def _follow(self, worker: Replica, mean: Mean, choice: Choice) -> None:
        """With other moments or another code, if that is what the period asks for."""
        if self.moments is None and self._common is not None and choice.is_too_long_for_common(worker.step):
            # From here on "local": own steps since the common vectors were made are moves like any others.
            self.drain(worker)
            self._common = None
            if isinstance(mean, OwnersMean):
                mean.residuals = []  # they are of gains
            choice.look_no_more()
        if isinstance(mean, MeanOfCodes) and mean.coders.first != self._code():
            self.drain(worker)  # with the old one
            self._recode()

    def _recode(self) -> None:
        code = self._code()
        if code is not None and isinstance(self._mean, MeanOfCodes):
            self._mean.coders = self._mean.coders.with_first(code)

    def _note_waiting(self, comm: Comm) -> None:
        now = comm.now()
        if self._left is not None:
            share = comm.meter.last_step.seconds() / max(now - self._left, 1e-9)
            self._waiting = SMOOTHING * self._waiting + (1 - SMOOTHING) * share
        self._left = now

    def state_dict(self) -> dict[str, Any]:
        """Waits for the messages on their way, and saves what they bring; when it is applied does not change."""
        return {
            **super().state_dict(),
            "flying": [piece.state_dict() for piece in self._flying],
            "residuals": self._mean.residuals if isinstance(self._mean, OwnersMean) else [],
            **({} if self._adam is None else {"common": [self._common.state_dict()] if self._common else []}),
            "correction": self._correction.state_dict() if self._correction is not None else None,
            "pace": self._choice.state_dict() if self._choice is not None else None,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        own = dict(saved)
        # They work on these themselves, and a checkpoint is read into main memory.
        flying, residuals = with_tensors([own.pop("flying"), own.pop("residuals")], lambda t: t.to(self.x_hat.device))
        self._flying = [Piece.from_state_dict(piece) for piece in flying]
        correction, pace, common = own.pop("correction"), own.pop("pace"), own.pop("common", [])
        if isinstance(self._mean, OwnersMean):
            self._mean.residuals = residuals
        self._common = self._adam if common else None
        if self._common is not None:
            self._common.load_state_dict(*common)
        if self._correction is not None:
            self._correction.load_state_dict(correction)
        if self._choice is not None:
            self._choice.load_state_dict(pace)
            self._recode()
        self._left = None  # what was between is no computing
        super().load_state_dict(own)
