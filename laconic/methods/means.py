"""Means of pieces of vectors on their way, as they are or coded: what `Divisible` sends in the background.

Codes do not add, so no all-reduce takes their mean. Either all send their codes to all; or every rank owns a part of
each piece, all send it their codes of that part, and it sends all the code of the average: less to send from three
workers on, but two messages, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from laconic.comm import Comm
from laconic.compress import Compressor, encode_with_feedback
from laconic.methods.carried import Carried, Codes
from laconic.methods.pieces import Layout, Piece


class Mean(Protocol):
    layout: Layout
    messages: int  # about one piece, one after the other

    def send(self, piece: Piece, vectors: Sequence[Carried]) -> None:
        """Start."""

    def receive(self, piece: Piece, vectors: Sequence[Carried]) -> bool:
        """Wait for the message on its way. True when the means are in place, false when one more message was sent."""

    def said(self, piece: Piece, owner: int, start: int, stop: int) -> Tensor:
        """This rank's share in the mean of the first vector: entries start to stop of an owner's part."""


class PlainMean:
    messages = 1

    def __init__(self, comm: Comm, d: int) -> None:
        self.layout = Layout(d, 1)
        self._comm = comm

    def send(self, piece: Piece, vectors: Sequence[Carried]) -> None:
        taken = [vector.take(piece, piece.parts[0]) for vector in vectors]
        piece.sent = [taken[0] if len(taken) == 1 else torch.cat(taken)]
        piece.pending = self._comm.mean_async(piece.sent[0])
        piece.messages = 1

    def receive(self, piece: Piece, vectors: Sequence[Carried]) -> bool:
        means, own = (message.chunk(len(vectors)) for message in (piece.wait(), piece.sent[0]))
        for i, vector in enumerate(vectors):
            vector.put(piece, piece.parts[0], means[i], own[i])
        return True

    def said(self, piece: Piece, owner: int, start: int, stop: int) -> Tensor:
        return piece.sent[0][start:stop]


class Coders:
    """A compressor for each vector of a piece; their codes follow one another in a message."""

    def __init__(self, compressors: Sequence[Compressor], rank: int, device: torch.device) -> None:
        self._compressors = [compressor.for_rank(rank) for compressor in compressors]
        self._asked, self._rank, self._device = list(compressors), rank, device

    @property
    def first(self) -> Compressor:
        """As it was asked for."""
        return self._asked[0]

    def with_first(self, compressor: Compressor) -> Coders:
        return Coders([compressor, *self._asked[1:]], self._rank, self._device)

    def nbytes(self, numel: int) -> int:
        return sum(compressor.nbytes(numel) for compressor in self._compressors)

    def encode(self, vectors: Sequence[Carried], piece: Piece, part: slice) -> Tensor:
        numel = part.stop - part.start
        message = torch.empty(self.nbytes(numel), dtype=torch.uint8, device=self._device)
        for vector, (compressor, code) in zip(vectors, self.find(message, numel), strict=True):
            try:
                vector.encode(piece, part, compressor, code)
            except ValueError as error:  # an entry is not finite
                where = f"NaN or infinity on rank {self._rank}"
                raise FloatingPointError(f"background at step {piece.step}: {where} ({error})") from error
        return message

    def find(self, message: Tensor, numel: int) -> Iterator[tuple[Compressor, Tensor]]:
        """The compressor of each vector, and its code's place in the message."""
        start = 0
        for compressor in self._compressors:
            stop = start + compressor.nbytes(numel)
            yield compressor, message[start:stop]
            start = stop

    def settle(
        self,
        vectors: Sequence[Carried],
        piece: Piece,
        part: slice,
        messages: Sequence[Tensor],
        weights: Sequence[float],
        own: int,
    ) -> None:
        numel = part.stop - part.start
        found = zip(*(self.find(message, numel) for message in messages), strict=True)
        for vector, by_message in zip(vectors, found, strict=True):
            codes = Codes(by_message[0][0], [code for _, code in by_message], weights, own, piece.step)
            vector.settle(piece, part, codes)

    def said(self, piece: Piece, owner: int, start: int, stop: int) -> Tensor:
        numel = piece.parts[owner].stop - piece.parts[owner].start
        compressor, code = next(self.find(piece.sent[owner], numel))
        return compressor.decode_part(code, numel, start, stop, step=piece.step)


class MeanOfCodes(Mean):
    def __init__(self, comm: Comm, layout: Layout, coders: Coders) -> None:
        self.layout, self._comm = layout, comm
        self.coders = coders  # to be changed when nothing is on its way

    def said(self, piece: Piece, owner: int, start: int, stop: int) -> Tensor:
        return self.coders.said(piece, owner, start, stop)


class GatheredMean(MeanOfCodes):
    """Everyone's codes to everyone: n/2 times the bytes of `OwnersMean`, half the way, and nothing is coded twice."""

    messages = 1

    def __init__(self, comm: Comm, d: int, coders: Coders) -> None:
        super().__init__(comm, Layout(d, 1), coders)

    def send(self, piece: Piece, vectors: Sequence[Carried]) -> None:
        piece.sent = [self.coders.encode(vectors, piece, piece.parts[0])]
        piece.pending = self._comm.all_gather_async(piece.sent[0])
        piece.messages = 1

    def receive(self, piece: Piece, vectors: Sequence[Carried]) -> bool:
        # In the order of ranks, so that all have the same bits.
        n = self._comm.size
        self.coders.settle(vectors, piece, piece.parts[0], piece.wait(), [1 / n] * n, self._comm.rank)
        return True


class OwnersMean(MeanOfCodes):
    """`residuals`: of each vector, what this rank as the owner of its row has not yet passed on (row)."""

    messages = 2

    def __init__(self, comm: Comm, d: int, coders: Coders) -> None:
        super().__init__(comm, Layout(d, comm.size), coders)
        self.residuals: list[Tensor] = []

    def send(self, piece: Piece, vectors: Sequence[Carried]) -> None:
        piece.sent = [self.coders.encode(vectors, piece, part) for part in piece.parts]
        piece.pending = self._comm.all_to_all_async(piece.sent)
        piece.messages = 1

    def receive(self, piece: Piece, vectors: Sequence[Carried]) -> bool:
        if piece.messages == 1:
            self._pass_on(piece, vectors, piece.wait())
            return False
        for part, message, own in zip(piece.parts, piece.wait(), piece.sent, strict=True):
            self.coders.settle(vectors, piece, part, [message, own], [1.0, 0.0], 1)
        return True

    def _pass_on(self, piece: Piece, vectors: Sequence[Carried], received: list[Tensor]) -> None:
        """As the owner: the code of the mean of what all have sent, to all."""
        own, row = piece.parts[self._comm.rank], self._comm.rank * self.layout.row
        numel, longest = own.stop - own.start, max(part.stop - part.start for part in piece.parts)
        # Rows end at different columns, and a gather takes messages of one length.
        message = received[0].new_zeros(self.coders.nbytes(longest))
        by_vector = list(zip(*(self.coders.find(codes, numel) for codes in received), strict=True))
        if not self.residuals:
            self.residuals = [
                torch.zeros(self.layout.row, dtype=torch.float32, device=message.device) for _ in by_vector
            ]
        places = self.coders.find(message, numel)
        for vector, sent, (compressor, code), residual in zip(vectors, by_vector, places, self.residuals, strict=True):
            mean = residual.new_zeros(numel)
            for coder, said in sent:
                coder.decode_add(said, mean, 1 / len(received), step=piece.step)
            unsaid = residual[own.start - row : own.stop - row]
            unit = vector.unit(piece, own)
            if unit is None:
                encode_with_feedback(compressor, mean, unsaid, step=piece.step, out=code)
            else:
                in_units = torch.where(unit > 0, unsaid / unit, 0.0)
                encode_with_feedback(compressor, mean.where(unit > 0, 0.0), in_units, step=piece.step, out=code)
                unsaid.copy_(torch.where(unit > 0, in_units * unit, unsaid))
        piece.pending = self._comm.all_gather_async(message)
        piece.messages = 2
