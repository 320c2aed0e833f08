"""Means of pieces of vectors on their way, as they are or coded: what `Divisible` sends in the background.

Codes do not add, so a coded mean takes two messages. Every rank owns a part of each piece: all send it their codes of
that part, it averages them, and all get the code of the average. What the second coding loses,
the owner adds next time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic.comm import Comm, Pending
from laconic.comm.finite import is_finite
from laconic.comm.solo import Arrived


@runtime_checkable
class Compressor(Protocol):
    def encode(self, x: Tensor) -> Tensor: ...
    def decode(self, code: Tensor, numel: int) -> Tensor: ...
    def nbytes(self, numel: int) -> int: ...


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
    due: int  # the step in which the message on its way is waited for
    given: list[Tensor]  # of each vector, this rank's share in the mean, part after part
    squares: list[bool]  # of each vector: none of it is negative, and it is a square in spirit, as Adam's v
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
            "due": self.due,
            "given": self.given,
            "squares": self.squares,
            "messages": self.messages,
            "received": self.wait(),
        }

    @classmethod
    def from_state_dict(cls, saved: dict[str, Any]) -> Piece:
        parts = [slice(start, stop) for start, stop in saved["parts"]]
        pending = Arrived(saved["received"])
        return cls(parts, saved["due"], saved["given"], saved["squares"], saved["messages"], pending)


class Mean(Protocol):
    layout: Layout

    def send(self, piece: Piece) -> None:
        """Start. May change `given` into what a coarser message can carry."""

    def receive(self, piece: Piece) -> list[Tensor] | None:
        """Wait for the message on its way: the means of the vectors, or None when another message had to be sent."""


class PlainMean:
    def __init__(self, comm: Comm, d: int) -> None:
        self.layout = Layout(d, 1)
        self._comm = comm

    def send(self, piece: Piece) -> None:
        piece.pending = self._comm.mean_async(piece.given[0] if len(piece.given) == 1 else torch.cat(piece.given))
        piece.messages = 1

    def receive(self, piece: Piece) -> list[Tensor]:
        return list(piece.wait().split(sum(piece.lengths)))


class CodedMean:
    """`residual` (row): what this rank, as owner of its row, has not yet passed on of the first vector's mean."""

    def __init__(self, comm: Comm, d: int, compressor: Compressor) -> None:
        self.layout = Layout(d, comm.size)
        self.residual = torch.zeros(self.layout.row)
        self._comm, self._compressor = comm, compressor

    def send(self, piece: Piece) -> None:
        codes: list[list[Tensor]] = [[] for _ in piece.parts]  # by owner, then vector
        for k, square in enumerate(piece.squares):
            if not is_finite(piece.given[k]):
                raise FloatingPointError(
                    f"background at step {self._comm.meter.step}: NaN or infinity on rank {self._comm.rank}"
                )
            for owner, (_, part) in enumerate(piece.split(piece.given[k])):
                code = self._encode(part, square)
                part.copy_(self._decode(code, part.numel(), square))
                codes[owner].append(code)
        piece.pending = self._comm.all_to_all_async([torch.cat(code) for code in codes])
        piece.messages = 1

    def receive(self, piece: Piece) -> list[Tensor] | None:
        if piece.messages == 1:
            self._pass_on(piece, piece.wait())
            return None
        rows = [self._vectors(code, piece, length) for code, length in zip(piece.wait(), piece.lengths, strict=True)]
        return [torch.cat(vector) for vector in zip(*rows, strict=True)]

    def _pass_on(self, piece: Piece, received: list[Tensor]) -> None:
        """As the owner: the code of the mean of what all have sent, to all."""
        own = piece.parts[self._comm.rank]
        length = own.stop - own.start
        first = self._comm.rank * self.layout.row
        residual = self.residual[own.start - first : own.stop - first]
        by_rank = [self._vectors(code, piece, length) for code in received]
        # Rows end at different columns, and a gather takes messages of one length.
        message = torch.zeros(len(piece.given) * self._compressor.nbytes(max(piece.lengths)), dtype=torch.uint8)
        at = 0
        for k, square in enumerate(piece.squares):
            mean = torch.stack([vectors[k] for vectors in by_rank]).mean(0)
            if k == 0:
                mean += residual
            code = self._encode(mean, square)
            if k == 0:
                torch.sub(mean, self._decode(code, length, square), out=residual)
            message[at : at + code.numel()] = code
            at += code.numel()
        piece.pending = self._comm.all_gather_async(message)
        piece.messages = 2

    def _vectors(self, message: Tensor, piece: Piece, length: int) -> list[Tensor]:
        """The vectors in a message about `length` coordinates."""
        nbytes = self._compressor.nbytes(length)
        return [
            self._decode(message[k * nbytes : (k + 1) * nbytes], length, square)
            for k, square in enumerate(piece.squares)
        ]

    def _encode(self, part: Tensor, square: bool) -> Tensor:
        return self._compressor.encode(part.sqrt() if square else part)

    def _decode(self, code: Tensor, length: int, square: bool) -> Tensor:
        part = self._compressor.decode(code, length)
        return part.square_() if square else part
