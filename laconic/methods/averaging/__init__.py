"""Periodic averaging: all workers replace their parameters by the mean, and learn the variance among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from laconic.comm.coded_mean import CodedMean, split
from laconic.compress import Compressor, bits_per_entry
from laconic.forms import Choice, Form, Maybe, Real, Whole
from laconic.method import DIFFERENCE, Method, Replica, kernels_of, state
from laconic.methods.averaging.anchor import LARGE, make_anchor, move_anchor, squared_distance

Moments = Literal["local", "averaged"]
Note = Callable[[float, float], None]
# S is a difference of two squared distances; below this fraction of them it is rounding error and counts as 0.
ROUNDING = 8 * torch.finfo(torch.float32).eps
# The anchor moves once ‖x̄ − anchor‖² has grown by more than this multiple of S: rare, and keeps three digits of S.
DRIFT = 1000.0


@dataclass
class Averaging(Method):
    """The base of the methods that average parameters periodically; they differ in when.

    In a round, x becomes x̄ = mean x_i, and S = mean ‖x_i − x̄‖², the variance among workers just before, is measured.
    For any point c that all workers share, S = mean ‖x_i − c‖² − ‖x̄ − c‖². With c far from x all digits cancel, so c is
    the `anchor`: x after an earlier round, in half the bytes. Only what the steps since then have added to ‖x_i − c‖²
    is sent, which loses fewer digits in fp32.

    With a compressor the anchor is x after the last round, exactly, and x_i − anchor is sent quantized, with error
    feedback.
    """

    rounds: int = state(0, form=Whole(), merge="same")
    steps_since_round: int = state(0, form=Whole(), merge="same")
    variance: float | None = state(form=Maybe(Real(0)), merge="same")  # S of the last round; None before the first
    # Over all steps so far, each with the S of the round that ended it.
    mean_variance: float = state(0.0, form=Real(0), merge="same")
    anchor: Tensor = state(merge="same")
    offset: float = state(0.0, form=Real(0), merge="same")  # ‖x − anchor‖² when the anchor was made or moved
    residual: Tensor | None = state(merge="mean")  # quantization error of this worker's messages
    _moved_offset: Tensor | None = field(init=False, repr=False, compare=False, default=None)  # until the host reads it
    # Quantization error of the averages that this rank sends as an owner.
    owner_residual: Tensor | None = state(merge="method")

    def kernels(self, numel: int, workers: int) -> set[str]:
        compressor = self.settings().get("compressor")
        if compressor is None:
            return {"anchor"} if numel >= LARGE else set()
        return kernels_of(compressor, DIFFERENCE) if workers > 1 else set()

    def prepare(self, worker: Replica, compressor: Compressor | None) -> None:
        """Allocates the state; called in `setup`."""
        # x travels in fp32 at least: see `mean_with_scalar`.
        self._bits = max(32.0, 8.0 * worker.x.element_size()) if compressor is None else bits_per_entry(compressor)
        if compressor is None:
            self.anchor, offset = make_anchor(worker.x)
            self._set_offset([float(offset)])
            return
        self.anchor = worker.x.to(torch.promote_types(worker.x.dtype, torch.float32), copy=True)
        parts = split(0, self.anchor.numel(), owners=range(worker.comm.size))
        self.residual = torch.zeros_like(self.anchor)
        self.owner_residual = self.anchor.new_zeros(parts[worker.comm.rank].numel)
        self._mean = CodedMean(
            worker.comm,
            parts,
            compressor,
            residual=self.residual,
            owner_residual=self.owner_residual,
            name="parameter change",
        )

    def average(
        self,
        worker: Replica,
        moments: Moments,
        compressor: Compressor | None,
        moments_every: int = 1,
        then: Callable[[float], None] = lambda S: None,
    ) -> None:
        """Runs a round. Afterwards x is bit-identical on all ranks, and so is S.

        Args:
            worker: this replica.
            moments: whether the optimizer's state is averaged too.
            compressor: of what is sent.
            moments_every: rounds from one average of the optimizer's state to the next.
            then: called with S as soon as the host knows it: at once, or on a device when the next step begins.
        """
        steps, self.steps_since_round = self.steps_since_round, 0
        self.rounds += 1
        if worker.comm.size == 1:
            worker.comm.mean(worker.x, out=worker.x)  # changes nothing, and raises if x is not finite
            self.variance = 0.0
            then(0.0)
            return
        share = steps / worker.step

        def note(*of_x: float) -> None:
            S, distance = map(sum, zip(*worker.gather_slices(of_x), strict=True))  # squares add up over the slices of x
            self.variance = S if ROUNDING * distance < S else 0.0
            self.mean_variance += (self.variance - self.mean_variance) * share
            then(self.variance)

        if compressor is None:
            self._average_exactly(worker, note)
        else:
            self._average_quantized(worker, note)
        if moments == "averaged" and self.rounds % moments_every == 0:
            for vector in worker.moments().values():
                worker.mean(vector, out=vector)

    def _average_exactly(self, worker: Replica, note: Note) -> None:
        """Averages x. `note` gets S, and the larger of the squared distances that S is the difference of."""
        offset = self.offset if self._moved_offset is None else self._moved_offset
        mean = mean_with_scalar(worker, squared_distance(worker.x, self.anchor) - offset)
        numbers = torch.stack([mean.double(), squared_distance(worker.x, self.anchor)])

        def act(values: Sequence[float]) -> None:
            mean, distance = values
            drift = distance - self.offset
            S = mean - drift
            if drift > DRIFT * S:
                self._moved_offset = move_anchor(worker.x, self.anchor)
                worker.comm.late.read(self._moved_offset, self._set_offset)
            note(S, distance)

        worker.comm.late.read(numbers, act)

    def _set_offset(self, values: Sequence[float]) -> None:
        (self.offset,), self._moved_offset = values, None

    def _average_quantized(self, worker: Replica, note: Note) -> None:
        """Does the same by quantized differences. S contains the quantization error of their mean."""
        difference = worker.x - self.anchor
        squares = worker.comm.all_gather_async(squared_norm(difference).reshape(1))
        self._mean.average(difference, step=self.rounds, counted=worker.counted, out=difference)
        self.anchor += difference
        worker.x.copy_(self.anchor)
        gathered = squares.wait()
        mean = torch.cat([gathered[rank] for rank in worker.counted]).mean()
        numbers = torch.stack([mean, squared_norm(difference)])
        worker.comm.late.read(numbers, lambda values: note(values[0] - values[1], values[1]))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self._moved_offset = None

    def state_forms(self, step: int) -> dict[str, Form]:
        without = {name: Choice((None,)) for name in ("residual", "owner_residual") if getattr(self, name) is None}
        return super().state_forms(step) | without

    def merge(self, saved: list[dict[str, Any]], worker: Replica) -> tuple[Tensor, dict[str, Any]]:
        """Every worker starts from mean(x) in the middle of the period in which the others were.

        With a compressor, anchor + mean(residual) + owner residuals is kept: every worker gets the mean residual, and
        the owners' residuals, end to end, are cut anew.
        """
        x, merged = super().merge(saved, worker)
        if self.owner_residual is not None:
            whole = torch.cat([one["method"]["owner_residual"] for one in saved])
            mine = split(0, whole.numel(), owners=range(worker.comm.size))[worker.comm.rank]
            merged["owner_residual"] = whole[mine.start : mine.stop]
        return x, merged

    def reset(self, worker: Replica) -> None:
        self.steps_since_round = 0
        if self.residual is None or self.owner_residual is None:
            self._set_offset([float(move_anchor(worker.x, self.anchor))])
            return
        self.anchor.copy_(worker.x)
        self.residual.zero_()
        self.owner_residual.zero_()

    def common(self, worker: Replica) -> Literal["nothing", "x"]:
        return "x" if self.rounds and self.steps_since_round == 0 else "nothing"

    def reference(self) -> Tensor | None:
        return None if self.residual is None else self.anchor

    def unsliceable(self) -> None:
        return None

    def sent_until(self, worker: Replica) -> int:
        return worker.step - self.steps_since_round

    def metrics(self) -> dict[str, float]:
        """Returns `bits` per entry, `rounds` so far, the `variance` of the last one and the `mean_variance`."""
        return {
            "bits": self._bits,
            "rounds": float(self.rounds),
            "variance": self.variance if self.variance is not None else math.nan,
            "mean_variance": self.mean_variance if self.rounds else math.nan,
        }


def mean_with_scalar(worker: Replica, scalar: Tensor) -> Tensor:
    """Replaces x by its mean over workers, and returns the mean of `scalar`, in a single all-reduce.

    A model in 16-bit floats travels in fp32: its own dtype would leave two digits of the scalar.
    """
    both = worker.x_and_scalar
    message = both if torch.finfo(both.dtype).bits >= 32 else both.float()
    message[-1] = scalar
    worker.mean(message, out=message)
    if message is not both:
        both.copy_(message)
    return message[-1]


def squared_norm(vector: Tensor) -> Tensor:
    """Returns ‖vector‖² as a scalar on its device, for which the host does not wait."""
    norm: Tensor = torch.linalg.vector_norm(vector, dtype=torch.float64)
    return norm.square()


def check_compressor(compressor: object) -> None:
    if compressor is not None and not isinstance(compressor, Compressor):
        raise ValueError(f"compressor must be None or a compressor such as Uniform(4), not {compressor!r}")
