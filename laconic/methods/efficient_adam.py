"""Efficient-Adam: workers send quantized optimizer steps, a server sends back their quantized mean.

Chen, Shen, Liu, Luo, "Efficient-Adam: Communication-Efficient Distributed Adam", arXiv 2205.14473.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from laconic.comm import Comm, Pending
from laconic.comm.coded_mean import CodedMean, Part, block_of
from laconic.comm.saved_mean import average_saved
from laconic.compress import Compressor, Identity, Log, bits_per_entry
from laconic.forms import Choice, Form
from laconic.method import Method, Replica, check_choice, check_count, check_flag, kernels_of, state
from laconic.methods.packed_chunks import Chunk, cut, places, segments
from laconic.methods.steps_ahead import StepsAhead

MOST_RANKS = 2**16
CHUNK, DEVICE_CHUNK = 2**18, 2**24  # default entries per message: on a device each costs some 400 kernels
STEP, PAUSE = 1, 0  # what comes next, announced to a dedicated server


@dataclass
class EfficientAdam(Method):
    """Averages the workers' local optimizer steps, quantized in both directions with error feedback at both ends.

        worker i:  p = u_i + e_i ;                 send Q_up(p) ;        e_i = p − Q_up(p)
        server:    P = mean_i Q_up(p) + e_server ; send D = Q_down(P) ;  e_server = P − D
        worker:    x = x_start + D

    with u_i the step that the worker's optimizer made from x_start. After every step all workers hold the same x, bit
    for bit. For links on which sending takes longer than computing, and iid data.

    With a `delay`, messages travel while the next steps are computed. A worker keeps its local steps until their means
    arrive:

        x_i = base + the local steps of the last `delay` steps ;        base ← base + D of the step `delay` steps ago

    Then workers differ by these steps, and `base` is the same on all, bit for bit; so is x after the last step.

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
        chunk: entries per message. Chunk k is encoded while the chunks before it are on the wire. None: 2^18 on the
            CPU, 2^24 for larger models on other devices. A checkpoint loads with the chunk that it was saved with.
        delay: steps from sending a local step to replacing it by the mean. 0: workers wait for it. 1: they wait for
            the mean, but not for each other's steps. 2: they wait for neither, if the network is fast enough.

    Bytes per step in each direction, all n workers together: (n − 1)·(⌈d·bits/8⌉ + 4·blocks). Sharded, each rank sends
    an n-th of that each way. A single worker sends nothing and is the plain optimizer.

    A checkpoint of another number of workers: x and the sum of all errors that are still to be sent are kept; every
    worker gets the mean of the workers' errors, and the servers' errors are cut anew. Messages in flight are applied as
    at the end of training; without a delay there are none between steps.

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
    chunk: int | None = None
    delay: int = 0

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
        if self.chunk is not None:
            check_count("chunk", self.chunk)
        check_count("delay", self.delay, least=0)

    def trains(self, rank: int) -> bool:
        return not (self.dedicated and rank == self.server)

    def kernels(self, numel: int, workers: int) -> set[str]:
        return kernels_of(self.up, self.down, Identity())

    def resolve(self, x: Tensor) -> None:
        if self.chunk is None:
            self.chunk = CHUNK if x.device.type == "cpu" or x.numel() <= CHUNK else DEVICE_CHUNK

    def setup(self, worker: Replica) -> None:
        size, x = worker.comm.size, worker.x
        if isinstance(self.server, int) and self.server >= size:
            raise ValueError(f"server must be a rank from 0 to {size - 1}, not {self.server}")
        self._workers = [r for r in range(size) if self.trains(r)]
        if not self._workers:
            raise ValueError("dedicated=True needs a rank that trains besides the server, and there is only one rank")
        large, small = segments(worker.numels, self.exact_below)
        self._exact_from = sum(s.stop - s.start for s in large)
        self._segments = large + small  # of x, in the packed order: large parameters first, then small ones
        self._dtype = x.dtype
        self._x_start = torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32))  # in the packed order
        self._chunks = list(self._make_chunks(worker))
        self._ahead: StepsAhead | None = None
        if self.delay and size > 1:
            self._pack(x, self._x_start)
            means = [chunk.mean for chunk in self._chunks]
            pieces = [slice(mean.parts[0].start, mean.parts[-1].stop) for mean in means]
            self._ahead = StepsAhead(self._x_start, pieces, means, self.delay)
        self._announced: Pending[list[Tensor]] | None = None
        self._pause_announced = False

    def _cut(self, d: int, workers: list[int]) -> list[tuple[list[Part], Compressor, Compressor]]:
        """Returns the parts of each chunk, in the packed order, and what quantizes them up and down."""
        # Where the vector is cut does not depend on who serves the parts, so neither does the result. Parts are whole
        # blocks, so that with most compressors the chunk's length does not change the result either.
        owners = workers if self.server == "sharded" else [self.server] * len(workers)
        unit = math.lcm(block_of(self.up), block_of(self.down))
        assert self.chunk is not None
        quantized = cut(0, self._exact_from, owners, self.chunk, unit)
        exact = cut(self._exact_from, d, owners, d, 1)
        return [(parts, self.up, self.down) for parts in quantized] + [
            (parts, Identity(), Identity()) for parts in exact
        ]

    def _make_chunks(self, worker: Replica) -> Iterator[Chunk]:
        comm, d = worker.comm, worker.x.numel()
        chunks = self._cut(d, self._workers)
        # On the CPU a channel has connections of its own: at a round trip of 50 ms a step took 158 ms, over gloo 519.
        # A parameter server must answer while more is coming in: that takes a second channel.
        name = "background" if self.delay else "foreground"
        up_comm = comm.channel(name) if self.delay or worker.x.device.type == "cpu" else comm
        answer_comm = None if self.server == "sharded" else comm.channel(name)
        served = [sum(part.numel for part in parts if part.owner == comm.rank) for parts, _, _ in chunks]
        self.e = self._x_start.new_zeros(d if self.trains(comm.rank) else 0)
        self.e_server = self._x_start.new_zeros(sum(served))
        u = self._x_start.new_empty(max(parts[-1].stop - parts[0].start for parts, _, _ in chunks))
        for (parts, up, down), e_server in zip(chunks, torch.split(self.e_server, served), strict=True):
            start, stop = parts[0].start, parts[-1].stop
            mean = CodedMean(
                up_comm,
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

    def _pack(self, x: Tensor, out: Tensor) -> None:
        """Copies x to `out`, in the packed order."""
        for in_x, packed in places(self._segments, 0, x.numel()):
            out[packed] = x[in_x]

    def _unpack(self, packed_x: Tensor, out: Tensor) -> None:
        """Inverts `_pack`."""
        for in_x, packed in places(self._segments, 0, out.numel()):
            out[in_x] = packed_x[packed]

    def before_step(self, worker: Replica) -> None:
        if worker.comm.size == 1:
            return
        if self._ahead is None:
            self._pack(worker.x, self._x_start)
        if self.dedicated and self.trains(worker.comm.rank):
            self._announced = self._announce(worker, STEP)

    def after_step(self, worker: Replica) -> None:
        if worker.comm.size == 1:
            return
        if self._ahead is None:
            self._exchange(worker)
        else:
            self._exchange_ahead(worker, self._ahead)
        if self._announced is not None:
            self._announced.wait()
        if self.moments == "averaged" and worker.step % self.moments_every == 0:
            self._average_moments(worker)

    def _exchange(self, worker: Replica) -> None:
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

    def _exchange_ahead(self, worker: Replica, ahead: StepsAhead) -> None:
        # Answers go first: the means that they bring are waited for before the steps that are sent now.
        ahead.advance(worker.step)
        u = ahead.steps[worker.step % self.delay]
        self._pack(worker.x, u)
        u -= self._x_start
        ahead.send(worker.step, worker.counted)
        self._show(worker, ahead)

    def _show(self, worker: Replica, ahead: StepsAhead) -> None:
        """Sets x and x_start to what `ahead` has. Changes of x from now on are a part of the next local step."""
        ahead.write_x(self._x_start)
        self._unpack(self._x_start, worker.x)
        if worker.x.dtype != self._x_start.dtype:  # x was rounded to 16 bits
            self._pack(worker.x, self._x_start)

    def drain(self, worker: Replica) -> None:
        if self._ahead is not None:
            self._ahead.drain()
            self._show(worker, self._ahead)

    def reset(self, worker: Replica) -> None:
        self.e.zero_()
        self.e_server.zero_()
        if self._ahead is not None:
            self._pack(worker.x, self._x_start)
            self._ahead.reset(self._x_start)

    def metrics(self) -> dict[str, float]:
        """Returns `period`, and `bits` per entry of what workers send; `down` may differ."""
        return {"period": 1.0, "bits": bits_per_entry(self.up)}

    def common(self, worker: Replica) -> Literal["step", "x"]:
        return "step" if self._ahead is not None else "x"

    def agreed(self, worker: Replica) -> Tensor | None:
        if self._ahead is None:
            return super().agreed(worker)
        agreed = torch.empty_like(worker.x)
        self._unpack(self._ahead.base, agreed)
        return agreed

    def unsliceable(self) -> str | None:
        return "a dedicated server has no node of its own: set dedicated=False" if self.dedicated else None

    def sent_until(self, worker: Replica) -> int:
        return worker.step

    def _average_moments(self, worker: Replica) -> None:
        for vector in worker.moments().values():
            if not self.trains(worker.comm.rank):
                vector.zero_()
            worker.mean(vector, out=vector)
            if self.dedicated:  # the mean has counted the server's zeros
                vector *= worker.comm.size / len(self._workers)

    # What is saved. Without a delay, that is e and e_server.

    def state_dict(self) -> dict[str, Any]:
        if not self.delay:
            return super().state_dict()
        return super().state_dict() | {"ahead": None if self._ahead is None else self._ahead.state_dict()}

    def state_forms(self, step: int) -> dict[str, Form]:
        if not self.delay:
            return super().state_forms(step)
        return super().state_forms(step) | {"ahead": Choice((None,)) if self._ahead is None else self._ahead.form(step)}

    def check_state(self, saved: Any, step: int) -> None:
        super().check_state(saved, step)
        if self._ahead is not None:
            self._ahead.check(saved["ahead"], step)

    def agreed_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        ahead = saved.get("ahead")
        return super().agreed_state(saved) | ({} if ahead is None else StepsAhead.agreed(ahead))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict({name: value for name, value in saved.items() if name != "ahead"})
        if self._ahead is not None:
            self._ahead.load_state_dict(saved["ahead"])
            self._ahead.write_x(self._x_start)
            self._x_start.copy_(self._x_start.to(self._dtype))

    def merge(self, saved: list[dict[str, Any]], worker: Replica) -> tuple[Tensor, dict[str, Any]]:
        """Keeps x, which is the same on all ranks after all messages in flight, and x + mean(e) + e_server.

        Every worker gets the mean of e. The servers' errors, put together, are cut anew.
        """
        x, merged = super().merge(saved, worker)
        d, rank = worker.x.numel(), worker.comm.rank
        states = [one["method"] for one in saved]
        e_server = torch.zeros(d, dtype=self.e.dtype)
        for served, entries in self._served(d, len(saved)):
            parts = torch.split(states[served]["e_server"], [part.numel for part in entries])
            for part, values in zip(entries, parts, strict=True):
                e_server[part.start : part.stop] = values
        if self.delay and states[0]["ahead"] is not None:
            base = self._apply_saved([one["ahead"] for one in states], e_server)
            for in_x, packed in places(self._segments, 0, d):
                x[in_x] = base[packed]
        if self._ahead is not None:
            base = torch.empty_like(self._ahead.base, device=x.device)
            self._pack(x, base)
            steps = torch.zeros_like(self._ahead.steps, device=x.device)
            merged["ahead"] = {"base": base, "steps": steps, "flights": []}
        elif self.delay:
            merged["ahead"] = None
        own = [part for served, entries in self._served(d, worker.comm.size) if served == rank for part in entries]
        merged["e_server"] = torch.cat([e_server[:0], *(e_server[part.start : part.stop] for part in own)])
        return x, merged | ({} if self.trains(rank) else {"e": self.e[:0]})

    def _apply_saved(self, saved: list[dict[str, Any]], e_server: Tensor) -> Tensor:
        """Returns `base` after all messages that all ranks saved in flight; servers answer now if they had not."""
        base: Tensor = saved[0]["base"].clone()
        workers = [rank for rank in range(len(saved)) if self.trains(rank)]
        for flights in zip(*(one["flights"] for one in saved), strict=True):
            for chunk, (parts, up, down) in enumerate(self._cut(base.numel(), workers)):

                def make(
                    comm: Comm, parts: list[Part] = parts, up: Compressor = up, down: Compressor = down
                ) -> CodedMean:
                    owned = [part for part in parts if part.owner == comm.rank]
                    residual = e_server[owned[0].start : owned[-1].stop] if owned else e_server[:0]
                    return CodedMean(comm, parts, up, down, workers=workers, owner_residual=residual)

                transfers = [flight["transfers"][chunk] for flight in flights]
                average = average_saved("method.ahead", transfers, make, answered=bool(flights[0]["answered"]))
                base[parts[0].start : parts[-1].stop] += average
        return base

    def _served(self, d: int, size: int) -> Iterator[tuple[int, list[Part]]]:
        """Yields each of `size` ranks with the parts that it serves, in the order in which it stores their errors."""
        chunks = self._cut(d, [rank for rank in range(size) if self.trains(rank)])
        for rank in range(size):
            yield rank, [part for parts, _, _ in chunks for part in parts if part.owner == rank]

    def _announce(self, worker: Replica, event: int) -> Pending[list[Tensor]]:
        """Sends one byte from the first worker to the dedicated server: STEP or PAUSE comes next."""
        comm, message = worker.comm, torch.full((1,), event, dtype=torch.uint8, device=worker.x.device)
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
        event = self._announce(worker, PAUSE).wait()[self._workers[0]]
        self._pause_announced = event.item() == PAUSE
        return not self._pause_announced

    def pause(self, worker: Replica) -> None:
        if not self.dedicated:
            return
        if self.trains(worker.comm.rank):
            self._announce(worker, PAUSE).wait()
        elif not self._pause_announced and self.await_step(worker):
            raise RuntimeError(
                f"rank {self.server} is a dedicated server and the other ranks are making a step: "
                f"call worker.serve() there"
            )
        self._pause_announced = False
