"""Means of pieces of vectors on their way, as they are or coded: what `Divisible` sends in the background.

Codes do not add, so no all-reduce takes their mean. Either all send their codes to all; or every rank owns a part of
each piece, all send it their codes of that part, and it sends all the code of the average: less to send from three
workers on, but two messages, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class GatheredMean:
    """Everyone's codes to everyone: n/2 times the bytes of `OwnersMean`, half the way, and nothing is coded twice."""

    messages = 1

    def __init__(self, comm: Comm, d: int, compressor: Compressor) -> None:
        self.layout = Layout(d, 1)
        self._comm, self._compressor = comm, compressor.for_rank(comm.rank)

    def send(self, piece: Piece) -> None:
        codes = [encode(self._compressor, given, piece.step, self._comm.rank) for given in piece.given]
        piece.pending = self._comm.all_gather_async(torch.cat(codes))
        piece.messages = 1

    def receive(self, piece: Piece) -> list[Tensor]:
        means = [torch.zeros_like(given) for given in piece.given]
        for message in piece.wait():  # in the order of ranks, so that all have the same bits
            for code, mean in zip(message.chunk(len(means)), means, strict=True):
                self._compressor.decode_add(code, mean, 1 / self._comm.size, step=piece.step)
        return means


class OwnersMean:
    """`residuals`: of each vector, what this rank as the owner of its row has not yet passed on (row)."""

    messages = 2

    def __init__(self, comm: Comm, d: int, compressor: Compressor) -> None:
        self.layout = Layout(d, comm.size)
        self.residuals: list[Tensor] = []
        self._comm, self._compressor = comm, compressor.for_rank(comm.rank)

    def send(self, piece: Piece) -> None:
        codes: list[list[Tensor]] = [[] for _ in piece.parts]  # by owner, then vector
        for vector in piece.given:
            for owner, (_, given) in enumerate(piece.split(vector)):
                codes[owner].append(encode(self._compressor, given, piece.step, self._comm.rank))
        piece.pending = self._comm.all_to_all_async([torch.cat(code) for code in codes])
        piece.messages = 1

    def receive(self, piece: Piece) -> list[Tensor] | None:
        if piece.messages == 1:
            self._pass_on(piece, piece.wait())
            return None
        means = [torch.empty_like(given) for given in piece.given]
        for k, mean in enumerate(means):
            for message, (_, part) in zip(piece.wait(), piece.split(mean), strict=True):
                code = self._code(message, k, part.numel())
                self._compressor.decode(code, part.numel(), step=piece.step, out=part)
        return means

    def _pass_on(self, piece: Piece, received: list[Tensor]) -> None:
        """As the owner: the code of the mean of what all have sent, to all."""
        own = piece.parts[self._comm.rank]
        length, row = own.stop - own.start, self._comm.rank * self.layout.row
        # Rows end at different columns, and a gather takes messages of one length.
        message = received[0].new_zeros(len(piece.given) * self._compressor.nbytes(max(piece.lengths)))
        for k in range(len(piece.given)):
            mean = torch.zeros(length, dtype=torch.float32, device=message.device)
            for codes in received:
                code = self._code(codes, k, length)
                self._compressor.decode_add(code, mean, 1 / len(received), step=piece.step)
            if k == len(self.residuals):
                self.residuals.append(mean.new_zeros(self.layout.row))
            residual = self.residuals[k][own.start - row : own.stop - row]
            out = self._code(message, k, length)
            encode_with_feedback(self._compressor, mean, residual, step=piece.step, out=out)
        piece.pending = self._comm.all_gather_async(message)
        piece.messages = 2

    def _code(self, message: Tensor, k: int, length: int) -> Tensor:
        """The code of vector k in a message about `length` coordinates."""
        nbytes = self._compressor.nbytes(length)
        return message[k * nbytes : (k + 1) * nbytes]


def encode(compressor: Compressor, given: Tensor, step: int, rank: int) -> Tensor:
    """The code of `given`, which becomes what the code says of it."""
    try:
        code = compressor.encode(given, step=step)
    except ValueError as error:  # an entry is not finite
        raise FloatingPointError(f"background at step {step}: NaN or infinity on rank {rank} ({error})") from error
    compressor.decode(code, given.numel(), step=step, out=given)
    return code
