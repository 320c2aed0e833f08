"""Efficient-Adam: workers send quantized steps, a server answers with their quantized mean, both remember the rest.

Chen, Shen, Liu, Luo, "Efficient-Adam: Communication-Efficient Distributed Adam", arXiv 2205.14473.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor

from laconic.comm import Comm, Pending
from laconic.compress import Compressor, Identity, Log, encode_with_feedback
from laconic.compress.blockwise import Blockwise
from laconic.method import Method, Replica, check_choice, check_count, state
from laconic.methods.cutting import Piece, cut, pack, views

STEP, PAUSE = 1, 0  # what a dedicated server is told to come next


@dataclass
class EfficientAdam(Method):
    """Own steps up, their mean down, both quantized with error feedback; after every step all workers hold the same x.

    Args:
        up: the compressor of the workers' steps.
        down: the compressor of the server's answer.
        server: `"sharded"`, every rank serves its share; or the rank of one parameter server. The result is the same
            bit for bit; sharded, no rank carries more than another.
        dedicated: the parameter server has no data: on its rank call `worker.serve()` where the others train.
        exact_below: parameters of fewer entries than this travel unquantized, together in one message each way.
        moments: `"averaged"` also averages the optimizer's state (Adam's m and v), unquantized, every `moments_every`
            steps: for workers whose data differ in kind.
        chunk: entries coded and sent at a time: chunk k goes up while chunk k − 1 comes down.

    Bytes a step, up from all n workers to other ranks or down to them: (n − 1)·(⌈d·bits/8⌉ + 4·blocks); sharded, each
    rank sends an n-th of that each way. One worker alone sends nothing and is the plain optimizer.
    """

    paper: ClassVar[str] = "arXiv 2205.14473"

    up: Compressor = field(default_factory=lambda: Log(3))
    down: Compressor = field(default_factory=lambda: Log(3))
    server: int | Literal["sharded"] = "sharded"
    dedicated: bool = False
    exact_below: int = 0
    moments: Literal["local", "averaged"] = "local"
    moments_every: int = 200
    chunk: int = 2**18

    e: Tensor = state()  # what this worker has not been able to say yet, in the packed order
    e_server: Tensor = state()  # the same of the server, for the pieces it serves, in their order

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            if not isinstance(getattr(self, name), Compressor):
                raise ValueError(f"{name} must be a compressor such as Log(3), not {getattr(self, name)!r}")
        if self.server != "sharded" and (type(self.server) is not int or self.server < 0):
            raise ValueError(f'server must be "sharded" or a rank, not {self.server!r}')
        if not isinstance(self.dedicated, bool):
            raise ValueError(f"dedicated must be True or False, not {self.dedicated!r}")
        if self.dedicated and self.server == "sharded":
            raise ValueError("dedicated=True needs one parameter server: server must be a rank, not 'sharded'")
        check_count("exact_below", self.exact_below, least=0)
        check_choice("moments", self.moments, ("local", "averaged"))
        check_count("moments_every", self.moments_every)
        check_count("chunk", self.chunk)

    def trains(self, rank: int) -> bool:
        return not (self.dedicated and rank == self.server)

    def setup(self, worker: Replica) -> None:
        rank, size, x = worker.comm.rank, worker.comm.size, worker.x
        if isinstance(self.server, int) and self.server >= size:
            raise ValueError(f"server must be a rank from 0 to {size - 1}, not {self.server}")
        self._workers = [r for r in range(size) if self.trains(r)]
        if not self._workers:
            raise ValueError("dedicated=True needs a rank that trains beside the server, and there is only one rank")
        # The pieces do not depend on who serves them, so neither does the result.
        servers = [r if self.server == "sharded" else self.server for r in self._workers]
        runs, exact_from = pack(worker.numels, self.exact_below)
        d, unit = x.numel(), math.lcm(_block(self.up), _block(self.down))
        self._chunks = [
            Chunk(pieces, self.up, self.down, views(runs, x, pieces))
            for pieces in cut(0, exact_from, unit, self.chunk, servers)
        ] + [
            Chunk(pieces, Identity(), Identity(), views(runs, x, pieces))
            for pieces in cut(exact_from, d, 1, d, servers)
        ]
        # x before the step, in the packed order; and room for one chunk of the own step.
        self._x_start = torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        self._u = self._x_start.new_empty(max(chunk.numel for chunk in self._chunks))
        self.e = self._x_start.new_zeros(d if self.trains(rank) else 0)
        served = [piece for chunk in self._chunks for piece in chunk.pieces if piece.server == rank]
        ends = list(accumulate(piece.numel for piece in served))
        self._places = {piece: slice(end - piece.numel, end) for piece, end in zip(served, ends, strict=True)}
        self.e_server = self._x_start.new_zeros(ends[-1] if ends else 0)
        self._announced: Pending[list[Tensor]] | None = None
        self._told_to_pause = False

    def before_step(self, worker: Replica) -> None:
        if worker.comm.size == 1:
            return
        for chunk in self._chunks:
            for part, place in chunk.views:
                self._x_start[place].copy_(part)
        if self.dedicated and self.trains(worker.comm.rank):
            self._announced = self._announce(worker.comm, STEP)

    def after_step(self, worker: Replica) -> None:
        chunks = self._chunks
        if worker.comm.size == 1:
            return
        # Chunk k is encoded while k − 1 goes up and k − 2 comes down. All ranks start messages in this order, else they
        # would wait for each other for ever.
        rising: list[Pending[list[Tensor]]] = []
        falling: list[Pending[list[Tensor]]] = []
        for k in range(len(chunks) + 2):
            if k < len(chunks):
                rising.append(self._tell_server(worker, chunks[k]))
            if 1 <= k <= len(chunks):
                falling.append(self._answer(worker, chunks[k - 1], rising[k - 1].wait()))
            if k >= 2:
                self._move(worker, chunks[k - 2], falling[k - 2].wait())
        if self._announced is not None:
            self._announced.wait()
        if self.moments == "averaged" and worker.step % self.moments_every == 0:
            self._average_moments(worker)

    def _tell_server(self, worker: Replica, chunk: Chunk) -> Pending[list[Tensor]]:
        """Worker i: p = u_i + e_i, send Q_w(p), e_i = p − Q_w(p)."""
        comm = worker.comm
        codes: list[list[Tensor]] = [[] for _ in range(comm.size)]
        if self.trains(comm.rank):
            for part, place in chunk.views:
                torch.sub(part, self._x_start[place], out=self._u[place.start - chunk.start : place.stop - chunk.start])
            for piece in chunk.pieces:
                u = self._u[piece.start - chunk.start : piece.stop - chunk.start]
                Q_w, e = self._own_randomness(chunk.up, piece, comm.rank), self.e[piece.start : piece.stop]
                codes[piece.server].append(encode_with_feedback(Q_w, u, e, step=worker.step))
        here = sum(chunk.up.nbytes(piece.numel) for piece in chunk.pieces if piece.server == comm.rank)
        lengths = [here if self.trains(rank) else 0 for rank in range(comm.size)]
        return comm.all_to_all_async([_join(messages) for messages in codes], lengths=lengths)

    def _answer(self, worker: Replica, chunk: Chunk, messages: list[Tensor]) -> Pending[list[Tensor]]:
        """Server: P = mean(Q_w(p_i)) + e_s, send D = Q_s(P), e_s = P − D."""
        comm = worker.comm
        served = [piece for piece in chunk.pieces if piece.server == comm.rank]
        codes = [_split(messages[rank], served, chunk.up) for rank in self._workers]
        answers = []
        for piece, *of_workers in zip(served, *codes, strict=True):
            mean = self._x_start.new_zeros(piece.numel)
            for code in of_workers:
                chunk.up.decode_add(code, mean, step=worker.step)
            mean /= len(self._workers)
            Q_s, e = self._own_randomness(chunk.down, piece), self.e_server[self._places[piece]]
            answers.append(encode_with_feedback(Q_s, mean, e, step=worker.step))
        lengths = [
            sum(chunk.down.nbytes(piece.numel) for piece in chunk.pieces if piece.server == rank)
            for rank in range(comm.size)
        ]
        return comm.all_to_all_async([_join(answers)] * comm.size, lengths=lengths)

    def _move(self, worker: Replica, chunk: Chunk, messages: list[Tensor]) -> None:
        """Worker: x = x_start + D."""
        for server in {piece.server for piece in chunk.pieces}:
            pieces = [piece for piece in chunk.pieces if piece.server == server]
            for piece, code in zip(pieces, _split(messages[server], pieces, chunk.down), strict=True):
                chunk.down.decode_add(code, self._x_start[piece.start : piece.stop], step=worker.step)
        for part, place in chunk.views:
            part.copy_(self._x_start[place])

    def _own_randomness(self, compressor: Compressor, piece: Piece, worker: int | None = None) -> Compressor:
        """Stochastic rounding must differ from piece to piece, and from worker to worker and the server."""
        position = len(self._workers) if worker is None else self._workers.index(worker)
        return compressor.for_rank(piece.start * (len(self._workers) + 1) + position)

    def _average_moments(self, worker: Replica) -> None:
        for vector in worker.moments().values():
            if not self.trains(worker.comm.rank):
                vector.zero_()
            worker.comm.mean(vector, out=vector)
            if self.dedicated:  # the server's zeros were counted
                vector *= worker.comm.size / len(self._workers)

    def _announce(self, comm: Comm, what: int) -> Pending[list[Tensor]]:
        """The first worker tells a dedicated server what comes next; the server hears it."""
        said = torch.full((1,), what, dtype=torch.uint8)
        nothing = said[:0]
        speaks, hears = comm.rank == self._workers[0], comm.rank == self.server
        return comm.all_to_all_async(
            [said if speaks and rank == self.server else nothing for rank in range(comm.size)],
            lengths=[1 if hears and rank == self._workers[0] else 0 for rank in range(comm.size)],
        )

    def await_step(self, worker: Replica) -> bool:
        if self._told_to_pause:
            raise RuntimeError("the others wait at consensus(), save(), load() or the end: come there before serve()")
        said = self._announce(worker.comm, PAUSE).wait()[self._workers[0]]
        self._told_to_pause = said.item() == PAUSE
        return not self._told_to_pause

    def pause(self, worker: Replica) -> None:
        if not self.dedicated:
            return
        if self.trains(worker.comm.rank):
            self._announce(worker.comm, PAUSE).wait()
        elif not self._told_to_pause and self.await_step(worker):
            raise RuntimeError(
                f"rank {self.server} is a server without data (dedicated=True), and the others make a step: "
                f"call worker.serve() there"
            )
        self._told_to_pause = False


@dataclass(frozen=True)
class Chunk:
    """What is coded and sent at a time."""

    pieces: list[Piece]
    up: Compressor
    down: Compressor
    views: list[tuple[Tensor, slice]]  # the parts of x it is made of, with their places in the packed order

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def numel(self) -> int:
        return self.pieces[-1].stop - self.start


def _block(compressor: Compressor) -> int:
    """Entries that share a scale: a piece holds whole blocks of them."""
    return compressor.block if isinstance(compressor, Blockwise) else 1


def _split(message: Tensor, pieces: Sequence[Piece], compressor: Compressor) -> Sequence[Tensor]:
    return torch.split(message, [compressor.nbytes(piece.numel) for piece in pieces])


def _join(codes: list[Tensor]) -> Tensor:
    return torch.cat(codes) if codes else torch.empty(0, dtype=torch.uint8)
