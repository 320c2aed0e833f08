"""One chunk of the parameters on its way to the server and back: views and buffers that are made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.comm import Comm, Pending
from laconic.compress import Compressor
from laconic.compress.blockwise import Blockwise
from laconic.methods.cutting import Piece, Run, views


@dataclass(frozen=True)
class Coded:
    """Neighbouring entries that are coded in one call: a view of them, and a view of their code in a message."""

    compressor: Compressor
    values: Tensor
    code: Tensor
    residual: Tensor  # of the entries where they are encoded, else empty


@dataclass(frozen=True)
class Message:
    """What a rank sends to all and receives from all (itself too), end to end by rank."""

    sent: Tensor
    sent_lengths: list[int]
    received: Tensor
    received_lengths: list[int]

    def start(self, comm: Comm) -> Pending[None]:
        return comm.all_to_all_into_async(
            self.received, self.sent, received_lengths=self.received_lengths, sent_lengths=self.sent_lengths
        )


@dataclass(frozen=True)
class Chunk:
    """What is coded and sent at a time, as one rank sees it."""

    parts: list[tuple[Tensor, Tensor, Tensor]]  # of x, of x before the step, and room for the own step
    up: Message
    told: list[Coded]  # the own step, in `up.sent`
    heard: list[Coded]  # the mean of the entries served here, with everyone's codes in `up.received`
    mean: Tensor
    answered: list[Coded]  # the mean, in the first of the copies in `down.sent`
    down: Message
    copies: Tensor  # `down.sent` as a table: a row for each rank
    moved: list[Coded]  # x before the step, with all servers' codes in `down.received`


@dataclass(frozen=True)
class Chunks:
    """Makes chunks over these vectors, all in the packed order but x."""

    rank: int
    size: int
    workers: list[int]
    runs: list[Run]
    x: Tensor
    x_start: Tensor
    e: Tensor
    u: Tensor  # room for the own step in any one chunk
    mean: Tensor  # room for what this rank serves of any one chunk

    def make(self, pieces: list[Piece], up: Compressor, down: Compressor, e_server: Tensor) -> Chunk:
        """`e_server`: of the pieces served by this rank."""
        start = pieces[0].start
        by_server = [[piece for piece in pieces if piece.server == rank] for rank in range(self.size)]
        served = by_server[self.rank]
        trains = self.rank in self.workers
        here = nbytes(served, up)
        up_message = self._message(
            [nbytes(of_server, up) if trains else 0 for of_server in by_server],
            [here if rank in self.workers else 0 for rank in range(self.size)],
        )
        answer = nbytes(served, down)
        down_message = self._message([answer] * self.size, [nbytes(of_server, down) for of_server in by_server])
        mean = self.mean[: sum(piece.numel for piece in served)]
        position = self.workers.index(self.rank) if trains else 0
        return Chunk(
            parts=[
                (part, self.x_start[place], self.u[place.start - start : place.stop - start])
                for part, place in views(self.runs, self.x, pieces)
            ],
            up=up_message,
            told=self._coded(pieces, up, self.u, up_message.sent, self.e[start:], position) if trains else [],
            heard=[
                coded
                for k in range(len(self.workers))
                for coded in self._coded(served, up, mean, up_message.received[k * here : (k + 1) * here])
            ],
            mean=mean,
            answered=self._coded(served, down, mean, down_message.sent[:answer], e_server, len(self.workers)),
            down=down_message,
            copies=down_message.sent.view(self.size, answer),
            moved=self._coded(pieces, down, self.x_start[start:], down_message.received),
        )

    def _message(self, sent_lengths: list[int], received_lengths: list[int]) -> Message:
        sent, received = (
            torch.empty(sum(lengths), dtype=torch.uint8, device=self.x.device)
            for lengths in (sent_lengths, received_lengths)
        )
        return Message(sent, sent_lengths, received, received_lengths)

    def _coded(
        self,
        pieces: Sequence[Piece],
        compressor: Compressor,
        values: Tensor,
        message: Tensor,
        residual: Tensor | None = None,
        position: int | None = None,
    ) -> list[Coded]:
        """The calls that code these pieces; all vectors begin with the first piece. `position`: who encodes.

        Each piece has a code of its own. But blocks are coded one by one and pieces hold whole ones: where chance plays
        no part, the pieces' codes end to end are the code of all, in one call.
        """
        if not pieces:
            return []
        calls = [pieces] if _is_sliceable(compressor) else [[piece] for piece in pieces]
        coded, end = [], 0
        for first, last in ((call[0], call[-1]) for call in calls):
            entries = slice(first.start - pieces[0].start, last.stop - pieces[0].start)
            begin, end = end, end + compressor.nbytes(last.stop - first.start)
            # Stochastic rounding must differ from piece to piece, and from worker to worker and the server.
            own = (
                compressor.for_rank(first.start * (len(self.workers) + 1) + position)
                if position is not None
                else compressor
            )
            rest = residual[entries] if residual is not None else values[:0]
            coded.append(Coded(own, values[entries], message[begin:end], rest))
        return coded


def nbytes(pieces: Sequence[Piece], compressor: Compressor) -> int:
    return sum(compressor.nbytes(piece.numel) for piece in pieces)


def block_of(compressor: Compressor) -> int:
    """Entries that share a scale: a piece holds whole blocks of them."""
    return compressor.block if isinstance(compressor, Blockwise) else 1


def _is_sliceable(compressor: Compressor) -> bool:
    return isinstance(compressor, Blockwise) and compressor.for_rank(1) == compressor
