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
from laconic.methods.carried import Carried
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
        taken = [vector.take(span, span.parts[0]) for vector, span in zip(vectors, piece.spans, strict=True)]
        piece.sent = [taken[0] if len(taken) == 1 else torch.cat(taken)]
        piece.pending = self._comm.mean_async(piece.sent[0])
        piece.messages = 1

    def receive(self, piece: Piece, vectors: Sequence[Carried]) -> bool:
        numels = [span.numel(0) for span in piece.spans]
        means, own = (torch.split(message, numels) for message in (piece.wait(), piece.sent[0]))
        for vector, span, mean, share in zip(vectors, piece.spans, means, own, strict=True):
            vector.put(span, span.parts[0], mean, share)
        return True

    def said(self, piece: Piece, owner: int, start: int, stop: int) -> Tensor:
        return piece.sent[0][start:stop]


class Coders:
    """A compressor for each vector of a piece; their codes follow one another in a message."""

    def __init__(self, compressors: Sequence[Compressor], rank: int, device: torch.device) -> None:
        self._compressors = [compressor.for_rank(rank) for compressor in compressors]
        self._rank, self._device = rank, device

    def nbytes(self, piece: Piece, owner: int) -> int:
        numels = [span.numel(owner) for span in piece.spans]
        return sum(compressor.nbytes(n) for compressor, n in zip(self._compressors, numels, strict=True))

    def encode(self, vectors: Sequence[Carried], piece: Piece, owner: int) -> Tensor:
        message = torch.empty(self.nbytes(piece, owner), dtype=torch.uint8, device=self._device)
        found = self.find(message, piece, owner)
        for vector, span, (compressor, code) in zip(vectors, piece.spans, found, strict=True):
            try:
                vector.encode(span, span.parts[owner], compressor, code)
            except ValueError as error:  # an entry is not finite
                where = f"NaN or infinity on rank {self._rank}"
                raise FloatingPointError(f"background at step {span.step}: {where} ({error})") from error
        return message

    def find(self, message: Tensor, piece: Piece, owner: int) -> Iterator[tuple[Compressor, Tensor]]:
        """The compressor of each vector, and its code's place in a message about an owner's part."""
        start = 0
        for compressor, span in zip(self._compressors, piece.spans, strict=True):
            stop = start + compressor.nbytes(span.numel(owner))
            yield compressor, message[start:stop]
            start = stop

    def settle(
        self,
        vectors: Sequence[Carried],
        piece: Piece,
        owner: int,
        messages: Sequence[Tensor],
        weights: Sequence[float],
        own: int,
    ) -> None:
        found = zip(*(self.find(message, piece, owner) for message in messages), strict=True)
        for vector, span, by_message in zip(vectors, piece.spans, found, strict=True):
            codes = [code for _, code in by_message]
            vector.settle(span, span.parts[owner], by_message[0][0], codes, weights, own)

    def said(self, piece: Piece, owner: int, start: int, stop: int) -> Tensor:
        compressor, code = next(self.find(piece.sent[owner], piece, owner))
        span = piece.spans[0]
        return compressor.decode_part(code, span.numel(owner), start, stop, step=span.step)


class GatheredMean:
    """Everyone's codes to everyone: n/2 times the bytes of `OwnersMean`, half the way, and nothing is coded twice."""

    messages = 1

    def __init__(self, comm: Comm, d: int, coders: Coders) -> None:
        self.layout = Layout(d, 1)
        self.said = coders.said
        self._comm, self._coders = comm, coders

    def send(self, piece: Piece, vectors: Sequence[Carried]) -> None:
        piece.sent = [self._coders.encode(vectors, piece, 0)]
        piece.pending = self._comm.all_gather_async(piece.sent[0])
        piece.messages = 1

    def receive(self, piece: Piece, vectors: Sequence[Carried]) -> bool:
        # In the order of ranks, so that all have the same bits.
        n = self._comm.size
        self._coders.settle(vectors, piece, 0, piece.wait(), [1 / n] * n, self._comm.rank)
        return True


class OwnersMean:
    """`residuals`: of each vector, what this rank as the owner of its row has not yet passed on (row)."""

    messages = 2

    def __init__(self, comm: Comm, d: int, coders: Coders) -> None:
        self.layout = Layout(d, comm.size)
        self.said = coders.said
        self.residuals: list[Tensor] = []
        self._comm, self._coders = comm, coders

    def send(self, piece: Piece, vectors: Sequence[Carried]) -> None:
        piece.sent = [self._coders.encode(vectors, piece, owner) for owner in range(self.layout.owners)]
        piece.pending = self._comm.all_to_all_async(piece.sent)
        piece.messages = 1

    def receive(self, piece: Piece, vectors: Sequence[Carried]) -> bool:
        if piece.messages == 1:
            self._pass_on(piece, piece.wait())
            return False
        for owner, (message, own) in enumerate(zip(piece.wait(), piece.sent, strict=True)):
            self._coders.settle(vectors, piece, owner, [message, own], [1.0, 0.0], 1)
        return True

    def _pass_on(self, piece: Piece, received: list[Tensor]) -> None:
        """As the owner: the code of the mean of what all have sent, to all."""
        rank = self._comm.rank
        # Rows end at different columns, and a gather takes messages of one length.
        longest = max(self._coders.nbytes(piece, owner) for owner in range(self.layout.owners))
        message = received[0].new_zeros(longest)
        if not self.residuals:
            self.residuals = [torch.zeros(self.layout.row, device=message.device) for _ in piece.spans]
        by_vector = zip(*(self._coders.find(codes, piece, rank) for codes in received), strict=True)
        places = self._coders.find(message, piece, rank)
        vectors = zip(piece.spans, by_vector, places, self.residuals, strict=True)
        for span, sent, (compressor, code), residual in vectors:
            mean = residual.new_zeros(span.numel(rank))
            for coder, said in sent:
                coder.decode_add(said, mean, 1 / len(received), step=span.step)
            own, row = span.parts[rank], rank * self.layout.row
            unsaid = residual[own.start - row : own.stop - row]
            encode_with_feedback(compressor, mean, unsaid, step=span.step, out=code)
        piece.pending = self._comm.all_gather_async(message)
        piece.messages = 2
