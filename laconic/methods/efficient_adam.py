"""Efficient-Adam: workers send quantized steps, a server answers with their quantized mean, both remember the rest.

Chen, Shen, Liu, Luo, "Efficient-Adam: Communication-Efficient Distributed Adam", arXiv 2205.14473.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from laconic.comm import Comm, Pending
from laconic.compress import Compressor, Identity, Log, encode_with_feedback
from laconic.method import Method, Replica, check_choice, check_count, state
from laconic.methods.chunk import Chunk, Chunks, block_of
from laconic.methods.cutting import Piece, Run, cut, pack, views

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
        chunk: entries coded and sent at a time: chunk k is encoded while those before it are on the wire.

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
        runs, quantized, exact = self._cut(worker)
        d = x.numel()
        numels = [sum(piece.numel for piece in pieces) for pieces in quantized + exact]
        served = [[piece for piece in pieces if piece.server == rank] for pieces in quantized + exact]
        numels_served = [sum(piece.numel for piece in pieces) for pieces in served]
        # gloo works on two messages of a channel at a time. That keeps flows alike, which fills the links, where every
        # rank sends to every other; but a parameter server should answer while there is more to come.
        self._down = worker.comm if self.server == "sharded" else worker.comm.channel("foreground")
        # x before the step, in the packed order.
        self._x_start = torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        self._whole = [(part, self._x_start[place]) for part, place in views(runs, x, [Piece(0, d, rank)])]
        self.e = self._x_start.new_zeros(d if self.trains(rank) else 0)
        self.e_server = self._x_start.new_zeros(sum(numels_served))
        u, mean = self._x_start.new_empty(max(numels)), self._x_start.new_empty(max(numels_served))
        chunks = Chunks(rank, size, self._workers, runs, x, self._x_start, self.e, u, mean)
        quantizers = [(self.up, self.down)] * len(quantized) + [(Identity(), Identity())] * len(exact)
        self._chunks = [
            chunks.make(pieces, up, down, e_server)
            for pieces, (up, down), e_server in zip(
                quantized + exact, quantizers, torch.split(self.e_server, numels_served), strict=True
            )
        ]
        self._announced: Pending[list[Tensor]] | None = None
        self._told_to_pause = False

    def _cut(self, worker: Replica) -> tuple[list[Run], list[list[Piece]], list[list[Piece]]]:
        """The packed order, and the quantized and the exact pieces of each chunk. Where they are cut does not depend
        on who serves them, so neither does the result."""
        servers = [r if self.server == "sharded" else self.server for r in self._workers]
        runs, exact_from = pack([p.numel() for p in worker.parameters], self.exact_below)
        d, unit = worker.x.numel(), math.lcm(block_of(self.up), block_of(self.down))
        return runs, cut(0, exact_from, unit, self.chunk, servers), cut(exact_from, d, 1, d, servers)

    def before_step(self, worker: Replica) -> None:
        if worker.comm.size == 1:
            return
        for part, start in self._whole:
            start.copy_(part)
        if self.dedicated and self.trains(worker.comm.rank):
            self._announced = self._announce(worker.comm, STEP)

    def after_step(self, worker: Replica) -> None:
        if worker.comm.size == 1:
            return
        # Chunk k is encoded while those before it go up, and answered while those after it do, so the wire is never out
        # of work. All ranks start messages in this order, else they would wait for each other for ever.
        rising = [self._tell_server(worker, chunk) for chunk in self._chunks]
        falling = [self._answer(worker, chunk, up) for chunk, up in zip(self._chunks, rising, strict=True)]
        for chunk, down in zip(self._chunks, falling, strict=True):
            self._move(worker, chunk, down)
        if self._announced is not None:
            self._announced.wait()
        if self.moments == "averaged" and worker.step % self.moments_every == 0:
            self._average_moments(worker)

    def _tell_server(self, worker: Replica, chunk: Chunk) -> Pending[None]:
        """Worker i: p = u_i + e_i, send Q_w(p), e_i = p − Q_w(p)."""
        if self.trains(worker.comm.rank):
            for x, x_start, u in chunk.parts:
                torch.sub(x, x_start, out=u)
        for coded in chunk.told:
            encode_with_feedback(coded.compressor, coded.values, coded.residual, step=worker.step, out=coded.code)
        return chunk.up.start(worker.comm)

    def _answer(self, worker: Replica, chunk: Chunk, up: Pending[None]) -> Pending[None]:
        """Server: P = mean(Q_w(p_i)) + e_s, send D = Q_s(P), e_s = P − D."""
        up.wait()
        chunk.mean.zero_()
        for coded in chunk.heard:
            coded.compressor.decode_add(coded.code, coded.values, step=worker.step)
        chunk.mean.div_(len(self._workers))
        for coded in chunk.answered:
            encode_with_feedback(coded.compressor, coded.values, coded.residual, step=worker.step, out=coded.code)
        chunk.copies[1:] = chunk.copies[0]
        return chunk.down.start(self._down)

    def _move(self, worker: Replica, chunk: Chunk, down: Pending[None]) -> None:
        """Worker: x = x_start + D."""
        down.wait()
        for coded in chunk.moved:
            coded.compressor.decode_add(coded.code, coded.values, step=worker.step)
        for x, x_start, _ in chunk.parts:
            x.copy_(x_start)

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
