"""Efficient-Adam: workers send quantized optimizer steps, a server sends back their quantized mean.

Chen, Shen, Liu, Luo, "Efficient-Adam: Communication-Efficient Distributed Adam", arXiv 2205.14473.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from laconic.comm import Comm, Pending
from laconic.comm.coded_mean import CodedMean, Part, block_of, split
from laconic.compress import Compressor, Identity, Log, bits_per_entry
from laconic.method import Method, Replica, check_choice, check_count, check_flag, kernels_of, state

MOST_RANKS = 2**16
STEP, PAUSE = 1, 0  # what comes next, announced to a dedicated server


@dataclass
class EfficientAdam(Method):
    """Averages the workers' local optimizer steps, quantized in both directions with error feedback at both ends.

        worker i:  p = u_i + e_i ;                 send Q_up(p) ;        e_i = p − Q_up(p)
        server:    P = mean_i Q_up(p) + e_server ; send D = Q_down(P) ;  e_server = P − D
        worker:    x = x_start + D

    with u_i the step that the worker's optimizer made from x_start. After every step all workers hold the same x, bit
    for bit. For links on which sending takes longer than computing, and iid data.

    Args:
        up: the compressor of the workers' steps.
        down: the compressor of the server's mean.
        server: `"sharded"`, every rank serves an equal share of the parameters; or the rank of one parameter server.
            The result is the same bit for bit. Sharded, no rank's link carries more than another's.
        dedicated: the parameter server has no data: its rank calls `worker.serve()` where the others train.
        exact_below: parameters with fewer entries than this are sent unquantized, all in one message each way.
        moments: `"averaged"` also averages the optimizer's state (Adam's m and v), in fp32, every `moments_every`
            steps: for non-iid data.
        moments_every: steps between averages of the optimizer's state.
        chunk: entries per message. Chunk k is encoded while the chunks before it are on the wire.

    Bytes per step in each direction, all n workers together: (n − 1)·(⌈d·bits/8⌉ + 4·blocks). Sharded, each rank sends
    an n-th of that each way. A single worker sends nothing and is the plain optimizer.

    A checkpoint of another number of workers: x and the sum of all errors that are still to be sent are kept; every
    worker gets the mean of the workers' errors, and the servers' errors are cut anew. No messages are in flight between
    steps.

    >>> import laconic
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    >>> with laconic.Worker(model, optimizer, laconic.EfficientAdam()) as worker:
    ...     model(torch.ones(3)).backward()
    ...     optimizer.step()
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

    e: Tensor = state(merge="mean")  # this worker's quantization error, in the packed order of `_segments`
    # The quantization error of the entries that this rank serves, chunk by chunk.
    e_server: Tensor = state(merge="method")

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            if not isinstance(getattr(self, name), Compressor):
                raise ValueError(f"{name} must be a compressor such as Log(3), not {getattr(self, name)!r}")
        if self.server != "sharded" and (type(self.server) is not int or not 0 <= self.server < MOST_RANKS):
            raise ValueError(f'server must be "sharded" or a rank, not {self.server!r}')
        check_flag("dedicated", self.dedicated)
        if self.dedicated and self.server == "sharded":
            raise ValueError("dedicated=True needs one parameter server: server must be a rank, not 'sharded'")
        check_count("exact_below", self.exact_below, least=0)
        check_choice("moments", self.moments, ("local", "averaged"))
        check_count("moments_every", self.moments_every)
        check_count("chunk", self.chunk)

    def trains(self, rank: int) -> bool:
        return not (self.dedicated and rank == self.server)

    def kernels(self, numel: int, workers: int) -> set[str]:
        return kernels_of(self.up, self.down, Identity())

    def setup(self, worker: Replica) -> None:
        size, x = worker.comm.size, worker.x
        if isinstance(self.server, int) and self.server >= size:
            raise ValueError(f"server must be a rank from 0 to {size - 1}, not {self.server}")
        self._workers = [r for r in range(size) if self.trains(r)]
        if not self._workers:
            raise ValueError("dedicated=True needs a rank that trains besides the server, and there is only one rank")
        large, small = segments([p.numel() for p in worker.parameters], self.exact_below)
        self._exact_from = sum(s.stop - s.start for s in large)
        self._segments = large + small  # of x, in the packed order: large parameters first, then small ones
        self._x_start = torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32))  # in the packed order
        self._chunks = list(self._make_chunks(worker))
        self._announced: Pending[list[Tensor]] | None = None
        self._pause_announced = False

    def _cut(self, d: int, workers: list[int]) -> tuple[list[list[Part]], list[list[Part]]]:
        """Returns the parts of each chunk, in the packed order: of quantized chunks and of exact ones."""
        # Where the vector is cut does not depend on who serves the parts, so neither does the result. Parts are whole
        # blocks, so that with most compressors the chunk's length does not change the result either.
        owners = workers if self.server == "sharded" else [self.server] * len(workers)
        unit = math.lcm(block_of(self.up), block_of(self.down))
        return cut(0, self._exact_from, owners, self.chunk, unit), cut(self._exact_from, d, owners, d, 1)

    def _make_chunks(self, worker: Replica) -> Iterator[Chunk]:
        comm, d = worker.comm, worker.x.numel()
        quantized, exact = self._cut(d, self._workers)
        # gloo works on two messages of a channel at a time. Sharded, that keeps the flows between ranks equal, which
        # fills the links. But a parameter server must answer while more is coming in: that takes a second channel.
        answer_comm = None if self.server == "sharded" else comm.channel("foreground")
        served = [sum(part.numel for part in parts if part.owner == comm.rank) for parts in quantized + exact]
        self.e = self._x_start.new_zeros(d if self.trains(comm.rank) else 0)
        self.e_server = self._x_start.new_zeros(sum(served))
        u = self._x_start.new_empty(max(parts[-1].stop - parts[0].start for parts in quantized + exact))
        compressors = [(self.up, self.down)] * len(quantized) + [(Identity(), Identity())] * len(exact)
        for parts, (up, down), e_server in zip(
            quantized + exact, compressors, torch.split(self.e_server, served), strict=True
        ):
            start, stop = parts[0].start, parts[-1].stop
            mean = CodedMean(
                comm,
                parts,
                up,
                down,
                workers=self._workers,
                residual=self.e[start:stop],
                owner_residual=e_server,
                answer_comm=answer_comm,
                name="optimizer step",
            )
            views = [
                (worker.x[in_x], self._x_start[packed], u[packed.start - start : packed.stop - start])
                for in_x, packed in places(self._segments, start, stop)
            ]
            yield Chunk(mean, u[: stop - start], views)

    def before_step(self, worker: Replica) -> None:
        if worker.comm.size == 1:
            return
        for in_x, packed in places(self._segments, 0, worker.x.numel()):
            self._x_start[packed] = worker.x[in_x]
        if self.dedicated and self.trains(worker.comm.rank):
            self._announced = self._announce(worker.comm, STEP)

    def after_step(self, worker: Replica) -> None:
        if worker.comm.size == 1:
            return
        # A chunk is encoded while those before it are on their way to the server, and averaged while those after it
        # are. All ranks must start their messages in the same order, or they would wait for each other forever.
        transfers = []
        for chunk in self._chunks:
            for x, x_start, u in chunk.views:
                torch.sub(x, x_start, out=u)
            transfers.append(chunk.mean.send(chunk.u, step=worker.step, counted=worker.counted))
        for chunk, transfer in zip(self._chunks, transfers, strict=True):
            chunk.mean.answer(transfer)
        for chunk, transfer in zip(self._chunks, transfers, strict=True):
            chunk.mean.receive(transfer, out=chunk.u)
            for x, x_start, D in chunk.views:
                torch.add(x_start, D, out=x)
        if self._announced is not None:
            self._announced.wait()
        if self.moments == "averaged" and worker.step % self.moments_every == 0:
            self._average_moments(worker)

    def reset(self, worker: Replica) -> None:
        self.e.zero_()
        self.e_server.zero_()

    def metrics(self) -> dict[str, float]:
        """Returns `period`, and `bits` per entry of what workers send; `down` may differ."""
        return {"period": 1.0, "bits": bits_per_entry(self.up)}

    def common(self, worker: Replica) -> Literal["x"]:
        return "x"

    def sent_until(self, worker: Replica) -> int:
        return worker.step

    def _average_moments(self, worker: Replica) -> None:
        for vector in worker.moments().values():
            if not self.trains(worker.comm.rank):
                vector.zero_()
            worker.mean(vector, out=vector)
            if self.dedicated:  # the mean has counted the server's zeros
                vector *= worker.comm.size / len(self._workers)

    def merge(self, saved: list[dict[str, Any]], worker: Replica) -> tuple[Tensor, dict[str, Any]]:
        """Keeps x, which is the same on all ranks, and x + mean(e) + e_server.

        Every worker gets the mean of e. The servers' errors, put together, are cut anew.
        """
        x, merged = super().merge(saved, worker)
        d, rank = worker.x.numel(), worker.comm.rank
        whole = torch.zeros(d, dtype=self.e.dtype)
        for served, entries in self._served(d, len(saved)):
            parts = torch.split(saved[served]["method"]["e_server"], [part.numel for part in entries])
            for part, values in zip(entries, parts, strict=True):
                whole[part.start : part.stop] = values
        own = [part for served, entries in self._served(d, worker.comm.size) if served == rank for part in entries]
        merged["e_server"] = torch.cat([whole[:0], *(whole[part.start : part.stop] for part in own)])
        return x, merged | ({} if self.trains(rank) else {"e": self.e[:0]})

    def _served(self, d: int, size: int) -> Iterator[tuple[int, list[Part]]]:
        """Yields each of `size` ranks with the parts that it serves, in the order in which it stores their errors."""
        quantized, exact = self._cut(d, [rank for rank in range(size) if self.trains(rank)])
        for rank in range(size):
            yield rank, [part for parts in quantized + exact for part in parts if part.owner == rank]

    def _announce(self, comm: Comm, event: int) -> Pending[list[Tensor]]:
        """Sends one byte from the first worker to the dedicated server: STEP or PAUSE comes next."""
        message = torch.full((1,), event, dtype=torch.uint8)
        sends, receives = comm.rank == self._workers[0], comm.rank == self.server
        return comm.all_to_all_async(
            [message if sends and rank == self.server else message[:0] for rank in range(comm.size)],
            lengths=[1 if receives and rank == self._workers[0] else 0 for rank in range(comm.size)],
        )

    def await_step(self, worker: Replica) -> bool:
        if self._pause_announced:
            raise RuntimeError(
                f"worker.serve() was called again on rank {self.server} while the other ranks wait at consensus(), "
                f"save(), load() or the end of the worker: call the same there before the next serve()"
            )
        event = self._announce(worker.comm, PAUSE).wait()[self._workers[0]]
        self._pause_announced = event.item() == PAUSE
        return not self._pause_announced

    def pause(self, worker: Replica) -> None:
        if not self.dedicated:
            return
        if self.trains(worker.comm.rank):
            self._announce(worker.comm, PAUSE).wait()
        elif not self._pause_announced and self.await_step(worker):
            raise RuntimeError(
                f"rank {self.server} is a dedicated server and the other ranks are making a step: "
                f"call worker.serve() there"
            )
        self._pause_announced = False


@dataclass(frozen=True)
class Chunk:
    """Entries that are averaged by one message to the server and one back."""

    mean: CodedMean
    u: Tensor  # buffer for the local step, then for the mean; shared by all chunks
    views: list[tuple[Tensor, Tensor, Tensor]]  # the same entries in x, in x before the step, and in u


def segments(numels: Sequence[int], exact_below: int) -> tuple[list[slice], list[slice]]:
    """Returns the runs of neighbouring parameters in x with at least `exact_below` entries, and those with fewer.

    >>> segments([100, 5, 200, 300, 7], exact_below=10)
    ([slice(0, 100, None), slice(105, 605, None)], [slice(100, 105, None), slice(605, 612, None)])
    """
    large: list[slice] = []
    small: list[slice] = []
    start = 0
    for numel in numels:
        runs = small if numel < exact_below else large
        first = runs.pop().start if runs and runs[-1].stop == start else start
        start += numel
        runs.append(slice(first, start))
    return large, small


def places(packed: Sequence[slice], start: int, stop: int) -> Iterator[tuple[slice, slice]]:
    """Yields where the entries `start` to `stop` of the packed order are: a slice of x, and one of the packed order."""
    end = 0
    for segment in packed:
        begin, end = end, end + segment.stop - segment.start
        first, last = max(start, begin), min(stop, end)
        if first < last:
            shift = segment.start - begin
            yield slice(first + shift, last + shift), slice(first, last)


def cut(start: int, stop: int, owners: Sequence[int], chunk: int, unit: int) -> list[list[Part]]:
    """Cuts the entries `start` to `stop` into chunks of about `chunk` entries, each with one part per owner."""
    count = -(-(stop - start) // chunk)
    n = len(owners)
    parts = split(start, stop, list(owners) * count, unit) if count else []
    chunks = [parts[i * n : (i + 1) * n] for i in range(count)]
    return [parts for parts in chunks if parts[-1].stop > parts[0].start]
