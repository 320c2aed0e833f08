"""The verbs over torch.distributed: gloo for tensors on the CPU and for background traffic, NCCL for the rest on GPUs.
On the CPU, messages from all to all go over wires of their own instead (`mesh.py`).

The paths for GPUs are untested.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from laconic.comm.background import BackgroundGossip
from laconic.comm.comm import (
    Comm,
    PeerError,
    Pending,
    check_buffers,
    check_lengths,
    first_line,
    ring_mean_nbytes,
    tree_children,
)
from laconic.comm.finite import is_finite
from laconic.comm.gossip import Gossip, Talk
from laconic.comm.mesh import HAS_EPOLL, Mesh, Swap
from laconic.comm.meter import Meter
from laconic.comm.pairing import Pairing
from laconic.comm.register import SLICE, Register
from laconic.comm.underway import Delivery, OnItsWay
from laconic.comm.wire import WireError, bytes_of
from laconic.topology import Topology

T = TypeVar("T")

SMALL_NBYTES = 2**16
SLICE_TIME = timedelta(seconds=SLICE)


class DistributedComm(Comm):
    """One channel over all ranks, with a process group of its own. Messages from all to all go past gloo, straight
    over wires of the channel: short ones, and `beside` the training any. (gloo's threads wake for each packet.)
    """

    def __init__(self, name: str, register: Register, meter: Meter, backend: str, *, beside: bool = False) -> None:
        self.rank, self.size = register.rank, register.size
        self.meter = meter
        self._name, self._register, self._backend = name, register, backend
        # A rank that does not come is named by the meeting; new_group alone would only say that a key is missing.
        register.meet(f"the opening of the {name} channel", meter.step, None)
        self._course = f"{name}-{register.count('channels')}"
        self._whole = dist.new_group(backend=backend, timeout=timedelta(seconds=register.timeout))
        self._group_members, self._members_group = register.members, self._whole
        self._channels: list[DistributedComm] = []
        self._longest_straight = math.inf if beside else SMALL_NBYTES
        self._mesh = self._open_mesh(beside) if backend == "gloo" and HAS_EPOLL and self.size > 1 else None

    def _open_mesh(self, beside: bool) -> Mesh:
        store = PrefixStore(self._course, self._register.store)
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            return Mesh(store, self.rank, others, self._register.timeout, beside=beside)
        except (WireError, OSError, dist.DistError) as error:
            raise self._register.roll_call(f"the opening of the {self._name} channel", first_line(error)) from error

    @property
    def members(self) -> list[int]:
        return self._register.members

    @property
    def _group(self) -> Any:
        """A group with a rank that is gone is of no use: the first verb after a meeting without it makes another."""
        if self._group_members != self.members:
            self._members_group = dist.new_group(
                self.members,
                backend=self._backend,
                timeout=timedelta(seconds=self._register.timeout),
                use_local_synchronization=True,
            )
            self._group_members = self.members
        return self._members_group

    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        # Out of place the input is still there to look at afterwards; in place it must be looked at now.
        finite_before = is_finite(x) if out is x else None

        def finite_here() -> bool:
            return is_finite(x) if finite_before is None else finite_before

        result = _copy(x, out)
        if self._backend == "gloo" and _nbytes(x) <= SMALL_NBYTES:
            self._small_mean(result)
            self._require_finite(result, finite_here)
            return result
        return self._mean("mean", x, result, finite_here).wait()

    def _small_mean(self, result: Tensor) -> None:
        """In place. Each rank averages its share: as many bytes as gloo's ring, but two messages to wait for instead of
        2(n−1) one after the other, which is what a small vector's time goes to."""
        shares = torch.tensor_split(result.view(-1), len(self.members))
        lengths = [share.numel() for share in shares]
        own = lengths[self.members.index(self.rank)]
        nbytes = ring_mean_nbytes(_nbytes(result), len(self.members))
        received = self._all_to_all("mean", shares, [own] * len(shares), nbytes, _nbytes(result)).wait()
        mean = torch.stack(received).mean(0)
        answers = self._all_to_all("mean", [mean] * len(shares), lengths, 0, _nbytes(result)).wait()
        torch.cat(answers, out=result.view(-1))

    def mean_async(self, x: Tensor) -> Pending[Tensor]:
        finite_here = is_finite(x)
        return self._mean("mean_async", x, _copy(x, None), lambda: finite_here)

    def _mean(self, verb: str, x: Tensor, result: Tensor, finite_here: Callable[[], bool]) -> Pending[Tensor]:
        def finish() -> Tensor:
            self._require_finite(result, finite_here)
            return result

        return self._send(
            verb,
            ring_mean_nbytes(_nbytes(x), len(self.members)),
            lambda: dist.all_reduce(result, op=dist.ReduceOp.AVG, group=self._group, async_op=True),
            finish,
        )

    def all_to_all(self, chunks: Sequence[Tensor], *, lengths: Sequence[int] | None = None) -> list[Tensor]:
        return self._all_to_all("all_to_all", chunks, lengths).wait()

    def all_to_all_async(
        self, chunks: Sequence[Tensor], *, lengths: Sequence[int] | None = None
    ) -> Pending[list[Tensor]]:
        return self._all_to_all("all_to_all_async", chunks, lengths)

    def _all_to_all(
        self,
        verb: str,
        chunks: Sequence[Tensor],
        lengths: Sequence[int] | None,
        nbytes: int | None = None,
        longest: float = math.inf,
    ) -> Pending[list[Tensor]]:
        output_splits = check_lengths(chunks, lengths, self.members.index(self.rank), len(self.members))
        sent = torch.cat([chunk.reshape(-1) for chunk in chunks])
        received = sent.new_empty(sum(output_splits))
        return self._swap(
            verb,
            received,
            sent,
            output_splits,
            [chunk.numel() for chunk in chunks],
            lambda: list(torch.split(received, output_splits)),
            nbytes,
            longest,
        )

    def all_to_all_into_async(
        self, received: Tensor, sent: Tensor, *, received_lengths: Sequence[int], sent_lengths: Sequence[int]
    ) -> Pending[None]:
        place = self.members.index(self.rank)
        check_buffers(received, sent, received_lengths, sent_lengths, place, len(self.members))
        return self._swap("all_to_all_into_async", received, sent, received_lengths, sent_lengths, lambda: None)

    def _swap(
        self,
        verb: str,
        received: Tensor,
        sent: Tensor,
        received_lengths: Sequence[int],
        sent_lengths: Sequence[int],
        finish: Callable[[], T],
        nbytes: int | None = None,
        longest: float = math.inf,
    ) -> Pending[T]:
        """`nbytes` is what the meter shall count; by default what leaves this rank. `longest`: no message between two
        ranks has more bytes, as all of them know."""
        received_lengths, sent_lengths = list(received_lengths), list(sent_lengths)

        def launch() -> Any:
            if self._goes_straight(sent, longest):
                return self._swap_straight(torch.split(received, received_lengths), torch.split(sent, sent_lengths))
            return dist.all_to_all_single(
                received, sent, received_lengths, sent_lengths, group=self._group, async_op=True
            )

        here = sent_lengths[self.members.index(self.rank)]
        leaving = (sent.numel() - here) * sent.element_size()
        return self._send(verb, leaving if nbytes is None else nbytes, launch, finish)

    def _goes_straight(self, x: Tensor, longest: float) -> bool:
        return self._mesh is not None and x.device.type == "cpu" and longest <= self._longest_straight

    def _swap_straight(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Swap:
        assert self._mesh is not None
        here = self.members.index(self.rank)
        received[here].copy_(sent[here])
        pairs = zip(self.members, sent, received, strict=True)
        return self._mesh.swap({rank: (bytes_of(to), bytes_of(of)) for rank, to, of in pairs if rank != self.rank})

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._all_gather("all_gather", x).wait()

    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]:
        return self._all_gather("all_gather_async", x)

    def _all_gather(self, verb: str, x: Tensor) -> Pending[list[Tensor]]:
        together = x.new_empty(len(self.members), *x.shape)
        results = list(together.unbind())
        own = results[self.members.index(self.rank)].copy_(x.detach())  # goes from here: x may change meanwhile

        def launch() -> Any:
            if self._goes_straight(x, _nbytes(x)):
                return self._gather_straight(together)
            return dist.all_gather(results, own, group=self._group, async_op=True)

        return self._send(verb, (len(self.members) - 1) * _nbytes(x), launch, lambda: results)

    def _gather_straight(self, together: Tensor) -> Swap:
        assert self._mesh is not None
        content = bytes_of(together)
        nbytes = len(content) // len(self.members)
        parts = {rank: content[i * nbytes : (i + 1) * nbytes] for i, rank in enumerate(self.members)}
        own = parts.pop(self.rank)
        return self._mesh.swap({rank: (own, part) for rank, part in parts.items()})

    def broadcast(self, x: Tensor, *, root: int = 0, out: Tensor | None = None) -> Tensor:
        self._check_rank("root", root)
        result = _copy(x, out)
        size = len(self.members)
        place = (self.members.index(self.rank) - self.members.index(root)) % size
        return self._send(
            "broadcast",
            tree_children(place, size) * _nbytes(x),
            lambda: dist.broadcast(result, src=root, group=self._group, async_op=True),
            lambda: result,
        ).wait()

    def exchange(self, x: Tensor, peer: int) -> Tensor:
        self._check_rank("peer", peer)
        if peer == self.rank:
            raise ValueError(f"peer must be another rank, not this one ({peer})")
        sent = x.contiguous()
        received = torch.empty_like(sent)
        verb = f"exchange with rank {peer}"
        number = self._register.count(f"{self._course}>{peer}")
        works = [
            self._start("exchange", 0, lambda: dist.irecv(received, src=peer, group=self._group), verb),
            self._start("exchange", _nbytes(x), lambda: dist.isend(sent, dst=peer, group=self._group), verb),
        ]
        needed = {peer: f"{self._course}>{self.rank}"}
        self._wait("exchange", Delivery(works), needed, number, verb)
        return received

    def gossip(self, topology: Topology, talk: Talk) -> Gossip:
        if topology.nodes != tuple(range(self.size)):
            raise ValueError(f"the topology must be of the {self.size} workers there are, not of {topology.nodes}")
        if self._register.board is not None:
            raise RuntimeError("gossip must be started once")
        store = self._register.store
        gossip = BackgroundGossip(store, topology, self.rank, talk, self.meter, self._register.timeout)
        self._register.board = Pairing(store, topology, self.rank)
        return gossip

    def channel(self, name: str = "background") -> Comm:
        # NCCL from two threads deadlocks, so whatever runs beside the training goes over gloo.
        channel = DistributedComm(name, self._register, self.meter, "gloo", beside=True)
        self._channels.append(channel)
        return channel

    def meet(self, what: str, note: Any = None) -> list[Any]:
        return self._register.meet(what, self.meter.step, note)

    def now(self) -> float:
        return time.monotonic()

    def fail(self, error: BaseException) -> None:
        if isinstance(error, PeerError):
            self._register.fail(str(error))
        else:
            self._register.fail(f"rank {self.rank} failed at step {self.meter.step}: {type(error).__name__}: {error}")
        for channel in (self, *self._channels):
            if channel._mesh is not None:
                channel._mesh.close()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        if self._mesh is not None:
            self._mesh.close()
        for group in {self._whole, self._members_group}:
            dist.destroy_process_group(group)

    def _send(self, verb: str, nbytes: int, launch: Callable[[], Any], finish: Callable[[], T]) -> OnItsWay[T]:
        number = self._register.count(self._course)
        work = self._start(verb, nbytes, launch)
        return OnItsWay(lambda: self._wait(verb, work, None, number), launch, finish)

    def _start(self, verb: str, nbytes: int, launch: Callable[[], Any], doing: str = "") -> Any:
        try:
            work = launch()
        except RuntimeError as error:  # gloo notices a dead neighbour already here
            raise self._register.roll_call(f"{doing or verb} at step {self.meter.step}", first_line(error)) from error
        self.meter.add(self._name, verb, calls=1 if nbytes else 0, nbytes=nbytes)
        return work

    def _wait(
        self, verb: str, work: dist.Work | Swap | Delivery, needed: dict[int, str] | None, number: int, doing: str = ""
    ) -> None:
        """Wait in slices, and between them look whether waiting makes sense. `needed`: by default all take part."""
        start, step = time.monotonic(), self.meter.step
        try:
            while True:
                # An error of a wait that began before the end may be its time-out, with the end just after it.
                had_ended = work.is_completed()
                try:
                    work.wait(SLICE_TIME)
                    return
                except (RuntimeError, TimeoutError) as error:
                    at = f"{doing or verb} at step {step}"
                    if had_ended:
                        raise self._register.roll_call(at, first_line(error)) from error
                    if work.is_completed():
                        continue
                    if time.monotonic() - start > self._register.timeout:
                        raise self._register.roll_call(at, f"waited {self._register.timeout:g} s") from error
                    self._register.look_around(at, needed or dict.fromkeys(self.members, self._course), number)
        finally:
            self.meter.add(self._name, verb, seconds=time.monotonic() - start)

    def _require_finite(self, result: Tensor, finite_here: Callable[[], bool]) -> None:
        # The result is the same everywhere, so either all ranks meet below or none does.
        if is_finite(result):
            return
        finite = self.meet("a mean that is not finite", finite_here())
        culprits = [rank for rank, is_fine in zip(self.members, finite, strict=True) if not is_fine]
        where = f"on rank {', '.join(map(str, culprits))}" if culprits else "in the sum, though finite on every rank"
        raise FloatingPointError(f"mean at step {self.meter.step}: NaN or infinity {where}")

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name} must be a rank from 0 to {self.size - 1}, not {rank}")
        if rank not in self.members:
            raise ValueError(f"{name} must be a rank that is still in it ({self.members}), not {rank}")


def _copy(x: Tensor, out: Tensor | None) -> Tensor:
    """A contiguous copy of x that a collective may work in; `out` where it is given."""
    if out is None:
        return x.clone(memory_format=torch.contiguous_format)
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, not of strides {out.stride()}")
    if out is not x:
        out.copy_(x)
    return out


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
