"""Means of pieces of vectors on their way, as they are or coded: what `Divisible` sends in the background.

Codes do not add, so no all-reduce takes their mean. Either all send their codes to all; or every rank owns a part of
each piece, all send it their codes of that part, and it sends all the code of the average: less to send from three
workers on, but two messages, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic.comm import Comm, Pending
from laconic.comm.solo import Arrived
from laconic.compress import Compressor, encode_with_feedback


@dataclass(frozen=True)
class Layout:
    """A vector (d) as `owners` rows, each `row` long but the last ones; a piece is a range of columns of all rows.

    So each owner has the same coordinates whatever the pieces are.
    """

    d: int
    owners: int

    @property
    def row(self) -> int:
        return -(-self.d // self.owners)

    def parts(self, start: int, stop: int) -> list[slice]:
        """Columns start to stop of each row, as slices of the vector; empty where a row has ended."""
        ends = [min((owner + 1) * self.row, self.d) for owner in range(self.owners)]
        return [
            slice(min(owner * self.row + start, end), min(owner * self.row + stop, end))
            for owner, end in enumerate(ends)
        ]


@dataclass
class Piece:
    """The same coordinates of some vectors, on their way to becoming their mean."""

    parts: list[slice]  # the coordinates, by owner
    step: int  # in which it was sent
    due: int  # the step in which the message on its way is waited for
    given: list[Tensor]  # of each vector, this rank's share in the mean, part after part
    messages: int = 0  # sent so far
    pending: Pending[Any] | None = None

    @property
    def lengths(self) -> list[int]:
        return [part.stop - part.start for part in self.parts]

    def split(self, vector: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """A vector over this piece, with the coordinates of each part."""
        return zip(self.parts, torch.split(vector, self.lengths), strict=True)

    def wait(self) -> Any:
        assert self.pending is not None
        return self.pending.wait()

    def state_dict(self) -> dict[str, Any]:
        """With what the message on its way will bring: waits for it, but leaves the piece as it is."""
        return {
            "parts": [[part.start, part.stop] for part in self.parts],
            "step": self.step,
            "due": self.due,
            "given": self.given,
            "messages": self.messages,
            "received": self.wait(),
        }

    @classmethod
    def from_state_dict(cls, saved: dict[str, Any]) -> Piece:
        parts = [slice(start, stop) for start, stop in saved["parts"]]
        rest = {name: saved[name] for name in ("step", "due", "given", "messages")}
        return cls(parts, **rest, pending=Arrived(saved["received"]))


class Mean(Protocol):
    layout: Layout
    messages: int  # about one piece, one after the other

    def send(self, piece: Piece) -> None:
        """Start. May change `given` into what a coarser message can carry."""

    def receive(self, piece: Piece) -> list[Tensor] | None:
        """Wait for the message on its way: the means of the vectors, or None when another message had to be sent."""


class PlainMean:
    messages = 1

    def __init__(self, comm: Comm, d: int) -> None:
        self.layout = Layout(d, 1)
        self._comm = comm

    def send(self, piece: Piece) -> None:
        piece.pending = self._comm.mean_async(piece.given[0] if len(piece.given) == 1 else torch.cat(piece.given))
        piece.messages = 1

    def receive(self, piece: Piece) -> list[Tensor]:
        return list(piece.wait().split(sum(piece.lengths)))


class Coders:
    """A compressor for each vector of a piece; their codes follow one another in a message."""

    def __init__(self, compressors: Sequence[Compressor], rank: int) -> None:
        self._compressors = [compressor.for_rank(rank) for compressor in compressors]
        self._rank = rank

    def nbytes(self, length: int) -> int:
        return sum(compressor.nbytes(length) for compressor in self._compressors)

    def encode(self, vectors: Sequence[Tensor], step: int) -> Tensor:
        """Their codes. The vectors become what the codes say of them."""
        codes = []
        for compressor, vector in zip(self._compressors, vectors, strict=True):
            try:
                codes.append(compressor.encode(vector, step=step))
            except ValueError as error:  # an entry is not finite
                where = f"NaN or infinity on rank {self._rank}"
                raise FloatingPointError(f"background at step {step}: {where} ({error})") from error
            compressor.decode(codes[-1], vector.numel(), step=step, out=vector)
        return torch.cat(codes)

    def find(self, message: Tensor, vectors: Sequence[Tensor]) -> Iterator[tuple[Compressor, Tensor, Tensor]]:
        """Each vector with its compressor, and its code's place in the message."""
        start = 0
        for compressor, vector in zip(self._compressors, vectors, strict=True):
            stop = start + compressor.nbytes(vector.numel())
            yield compressor, message[start:stop], vector
            start = stop


class GatheredMean:
    """Everyone's codes to everyone: n/2 times the bytes of `OwnersMean`, half the way, and nothing is coded twice."""

    messages = 1

    def __init__(self, comm: Comm, d: int, coders: Coders) -> None:
        self.layout = Layout(d, 1)
        self._comm, self._coders = comm, coders

    def send(self, piece: Piece) -> None:
        piece.pending = self._comm.all_gather_async(self._coders.encode(piece.given, piece.step))
        piece.messages = 1

    def receive(self, piece: Piece) -> list[Tensor]:
        means = [given.new_zeros(given.shape, dtype=torch.float32) for given in piece.given]
        for message in piece.wait():  # in the order of ranks, so that all have the same bits
            for coder, code, mean in self._coders.find(message, means):
                coder.decode_add(code, mean, 1 / self._comm.size, step=piece.step)
        return means


class OwnersMean:
    """`residuals`: of each vector, what this rank as the owner of its row has not yet passed on (row)."""

    messages = 2

    def __init__(self, comm: Comm, d: int, coders: Coders) -> None:
        self.layout = Layout(d, comm.size)
        self.residuals: list[Tensor] = []
        self._comm, self._coders = comm, coders

    def send(self, piece: Piece) -> None:
        by_owner = zip(*(torch.split(vector, piece.lengths) for vector in piece.given), strict=True)
        codes = [self._coders.encode(list(parts), piece.step) for parts in by_owner]
        piece.pending = self._comm.all_to_all_async(codes)
        piece.messages = 1

    def receive(self, piece: Piece) -> list[Tensor] | None:
        if piece.messages == 1:
            self._pass_on(piece, piece.wait())
            return None
        means = [torch.empty_like(given) for given in piece.given]
        by_owner = zip(*(torch.split(mean, piece.lengths) for mean in means), strict=True)
        for message, parts in zip(piece.wait(), by_owner, strict=True):
            for coder, code, part in self._coders.find(message, parts):
                coder.decode(code, part.numel(), step=piece.step, out=part)
        return means

    def _pass_on(self, piece: Piece, received: list[Tensor]) -> None:
        """As the owner: the code of the mean of what all have sent, to all."""
        own = piece.parts[self._comm.rank]
        length, row = own.stop - own.start, self._comm.rank * self.layout.row
        means = [given.new_zeros(length, dtype=torch.float32) for given in piece.given]
        for codes in received:
            for coder, code, mean in self._coders.find(codes, means):
                coder.decode_add(code, mean, 1 / len(received), step=piece.step)
        if not self.residuals:
            self.residuals = [mean.new_zeros(self.layout.row) for mean in means]
        # Rows end at different columns, and a gather takes messages of one length.
        message = received[0].new_zeros(self._coders.nbytes(max(piece.lengths)))
        for (coder, code, mean), residual in zip(self._coders.find(message, means), self.residuals, strict=True):
            unsaid = residual[own.start - row : own.stop - row]
            encode_with_feedback(coder, mean, unsaid, step=piece.step, out=code)
        piece.pending = self._comm.all_gather_async(message)
        piece.messages = 2
