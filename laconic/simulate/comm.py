"""The verbs between simulated workers: results as real processes compute them, and the time that links would take."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from laconic.comm import Comm, Meter, PeerError, Pending
from laconic.comm.checks import check_buffers, contiguous_copy
from laconic.comm.finite import is_finite, raise_not_finite
from laconic.comm.gossip import Gossip, Talk
from laconic.comm.pairing import Dropped
from laconic.comm.plan import (
    Rounds,
    all_gather_nbytes,
    all_gather_rounds,
    all_to_all_nbytes,
    all_to_all_rounds,
    broadcast_nbytes,
    broadcast_rounds,
    is_direct,
    mean_nbytes,
    mean_rounds,
)
from laconic.comm.register import ranks
from laconic.simulate.arithmetic import direct_mean, ring_mean
from laconic.simulate.engine import CURRENT, Killed
from laconic.simulate.gossip import SimulatedGossip
from laconic.simulate.job import Job, Key, Operation, cannot_complete
from laconic.topology import Topology

T = TypeVar("T")

SHOWN_RANKS = 8  # in an error message


class Awaited(Pending[T]):
    """The result of an operation in flight.

    Args:
        comm: the channel.
        verb: its name in the meter.
        operation: what to wait for.
        finish: called once after that, returns the result.
    """

    def __init__(self, comm: SimulatedComm, verb: str, operation: Operation, finish: Callable[[], T]) -> None:
        self._comm, self._verb, self._operation = comm, verb, operation
        self._finish: Callable[[], T] | None = finish
        self._result: list[T] = []

    def wait(self) -> T:
        if self._finish is not None:
            self._comm.wait_for(self._operation, self._verb)
            self._result, self._finish = [self._finish()], None
        return self._result[0]


class SimulatedComm(Comm):
    """One worker's side of a channel.

    Args:
        job: what all workers share.
        rank: this worker.
        name: of the channel.
        compute: returns the seconds that this worker computes in a step.
        first: the worker's first channel; None for that channel itself.
    """

    def __init__(
        self, job: Job, rank: int, name: str, compute: Callable[[int], float], first: SimulatedComm | None = None
    ) -> None:
        self.rank, self.size = rank, job.size
        self._job, self._name, self._compute = job, name, compute
        self._first = self if first is None else first
        self.meter = Meter(lambda: CURRENT.get() is not None) if first is None else first.meter
        self._members = list(range(self.size))
        self._channels = self._meetings = 0
        self._number = 0 if first is None else first._channels
        self._operations: dict[int | None, int] = {}  # started so far, by peer; None: with all
        self._gossip: SimulatedGossip | None = None

    @property
    def members(self) -> list[int]:
        return self._first._members

    @property
    def _place(self) -> int:
        return self.members.index(self.rank)

    @property
    def _background(self) -> bool:
        return self._first is not self

    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self._mean(x, out, direct=is_direct(_nbytes(x), background=self._background)).wait()

    def mean_async(self, x: Tensor, *, out: Tensor | None = None) -> Pending[Tensor]:
        return self._mean(x, out, direct=False)

    def _mean(self, x: Tensor, out: Tensor | None, *, direct: bool) -> Pending[Tensor]:
        result, n, nbytes = contiguous_copy(x.detach(), out), len(self.members), _nbytes(x)
        sent = mean_nbytes(nbytes, n)

        def start(operation: Operation) -> None:
            vectors = [operation.inputs[rank] for rank in operation.members]
            mean = (direct_mean if direct else ring_mean)(vectors)
            operation.result = mean, is_finite(mean)

        def finish() -> Tensor:
            mean, finite = operation.result
            if not finite:
                raise_not_finite(self, is_finite(result), self.meter.step)
            result.view(-1).copy_(mean)
            return result if out is None else out

        operation = self._start(
            "mean",
            f"{tuple(x.shape)} {x.dtype}, {'direct' if direct else 'by a ring'}",
            result.view(-1),
            start,
            traffic=lambda _: dict.fromkeys(self.members, (sent, sent)),
            rounds=mean_rounds(n, direct=direct),
            connections=n - 1 if direct else 1,
            sent=sent,
        )
        return Awaited(self, "mean", operation, finish)

    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]:
        n, sent = len(self.members), all_gather_nbytes(_nbytes(x), len(self.members))
        direct = is_direct(_nbytes(x), background=self._background)

        def start(operation: Operation) -> None:
            operation.result = [operation.inputs[rank] for rank in operation.members]

        operation = self._start(
            "all_gather",
            f"{tuple(x.shape)} {x.dtype}",
            x.detach().clone(),
            start,
            traffic=lambda _: dict.fromkeys(self.members, (sent, sent)),
            rounds=all_gather_rounds(n, direct=direct),
            connections=n - 1 if direct else 1,
            sent=sent,
        )
        # Every rank gets its own copy, and only when it asks for it: n at once would take n² tensors.
        return Awaited(self, "all_gather", operation, lambda: list(torch.stack(operation.result).unbind()))

    def all_to_all_into_async(
        self, received: Tensor, sent: Tensor, *, received_lengths: Sequence[int], sent_lengths: Sequence[int]
    ) -> Pending[None]:
        n, place, size = len(self.members), self._place, sent.element_size()
        check_buffers(received, sent, received_lengths, sent_lengths, place, n)

        def start(operation: Operation) -> None:
            contents = [operation.inputs[rank] for rank in operation.members]
            chunks = [torch.split(buffer, list(lengths)) for buffer, lengths, _, _ in contents]
            for i, (_, _, into, lengths) in enumerate(contents):
                if [chunk[i].numel() for chunk in chunks] != list(lengths):
                    operation.break_off(
                        f"rank {operation.members[i]} expects {list(lengths)} entries of all_to_all, and the ranks "
                        f"send {[chunk[i].numel() for chunk in chunks]}"
                    )
                    return
                torch.cat([chunk[i] for chunk in chunks], out=into)

        def traffic(operation: Operation) -> dict[int, tuple[float, float]]:
            return {
                rank: (all_to_all_nbytes(to, i, size), all_to_all_nbytes(of, i, size))
                for i, (rank, (_, to, _, of)) in enumerate((r, operation.inputs[r]) for r in operation.members)
            }

        operation = self._start(
            "all_to_all",
            str(sent.dtype),
            (sent.detach(), list(sent_lengths), received.detach(), list(received_lengths)),
            start,
            traffic=traffic,
            rounds=all_to_all_rounds(direct=is_direct(None, background=self._background)),
            connections=n - 1,
            sent=all_to_all_nbytes(sent_lengths, place, size),
        )
        return Awaited(self, "all_to_all", operation, lambda: None)

    def broadcast_async(self, x: Tensor, *, root: int = 0, out: Tensor | None = None) -> Pending[Tensor]:
        self._check_rank("root", root)
        result, members, nbytes = contiguous_copy(x.detach(), out), self.members, _nbytes(x)
        n, first = len(members), members.index(root)

        def start(operation: Operation) -> None:
            operation.result = operation.inputs[root].clone()

        def finish() -> Tensor:
            result.copy_(operation.result)
            return result if out is None else out

        sent = {rank: broadcast_nbytes(nbytes, (i - first) % n, n) for i, rank in enumerate(members)}
        operation = self._start(
            "broadcast",
            f"{tuple(x.shape)} {x.dtype} from rank {root}",
            result,
            start,
            traffic=lambda _: {rank: (sent[rank], 0 if rank == root else nbytes) for rank in members},
            rounds=broadcast_rounds(n),
            connections=max(1, (n - 1).bit_length()),
            sent=sent[self.rank],
        )
        return Awaited(self, "broadcast", operation, finish)

    def exchange(self, x: Tensor, peer: int) -> Tensor:
        self._check_rank("peer", peer)
        if peer == self.rank:
            raise ValueError(f"peer must be another rank, not this one ({peer})")
        nbytes, pair = _nbytes(x), sorted((self.rank, peer))

        def start(operation: Operation) -> None:
            operation.result = dict(operation.inputs)

        operation = self._start(
            "exchange",
            f"{tuple(x.shape)} {x.dtype}",
            x.detach().clone(memory_format=torch.contiguous_format),
            start,
            traffic=lambda _: dict.fromkeys(pair, (nbytes, nbytes)),
            rounds=all_to_all_rounds(direct=False),
            connections=1,
            sent=nbytes,
            peer=peer,
        )
        self.wait_for(operation, "exchange", peer)
        received: Tensor = operation.result[peer]
        return received

    def gossip(self, topology: Topology, talk: Talk) -> Gossip:
        if topology.nodes != tuple(range(self.size)):
            raise ValueError(f"the topology must have the nodes 0 to {self.size - 1}, not {topology.nodes}")
        if self.rank in self._job.gossips:
            raise RuntimeError("gossip must be started only once in a job")
        self._gossip = SimulatedGossip(self._job, topology, self.rank, talk, self.meter)
        return self._gossip

    def channel(self, name: str = "background") -> Comm:
        self._first._channels += 1
        return SimulatedComm(self._job, self.rank, name, self._compute, self._first)

    def meet(self, what: str, note: Any = None) -> list[Any]:
        first = self._first
        first._meetings += 1
        as_read = json.loads(json.dumps(note))
        meeting = self._job.meet(first._meetings, self.rank, what, self.meter.step, self.members, as_read)
        meeting.event.wait(lambda: f"is at {what}, step {self.meter.step}, and waits for {_ranks(meeting.missing())}")
        if meeting.error is not None:
            raise PeerError(meeting.error)
        first._members, notes = list(meeting.result[0]), list(meeting.result[1])
        if self.rank not in first._members:
            why = self._job.dropped.get(self.rank, "it came too late to a meeting")
            raise Dropped(f"rank {self.rank} was dropped, the others go on without it: {why}")
        return notes

    @property
    def can_lose_members(self) -> bool:
        return self._job.board is not None

    def among_members(self, what: str, operation: Callable[[], T]) -> T:
        while self.can_lose_members:
            members, error = self.members, None
            try:
                result = operation()
            except Dropped:
                raise
            except PeerError as lost:
                error = lost
            if all(self.meet(what, error is None)) and error is None:
                return result
            if self.members == members:
                raise error or PeerError(f"rank {self.rank}: {what} failed on another rank, and no rank is lost")
        return operation()

    def computed(self) -> None:
        self._job.engine.sleep(self._compute(self.meter.step + 1))

    def now(self) -> float:
        return self._job.engine.now

    def fail(self, error: BaseException) -> None:
        if isinstance(error, Killed):
            return  # a killed process reports nothing
        text = f"rank {self.rank} failed at step {self.meter.step}: {type(error).__name__}: {error}"
        self._job.fail(self.rank, str(error) if isinstance(error, PeerError) else text)

    def close(self) -> None:
        if self._gossip is not None:
            self._gossip.warn_and_raise()

    def wait_for(self, operation: Operation, verb: str, peer: int | None = None) -> None:
        """Waits until an operation is over, and counts the seconds.

        Raises:
            PeerError: it can never complete.
        """
        start, doing = self.now(), verb if peer is None else f"{verb} with rank {peer}"
        doing = f"{doing} at step {self.meter.step}"

        def waits_for() -> str:
            missing = _ranks(operation.missing())
            return f"is in {doing} on the channel {self._name!r}, and waits for {missing}"

        try:
            operation.event.wait(waits_for)
        finally:
            self.meter.add(self._name, verb, seconds=self.now() - start)
        if operation.error is not None:
            raise cannot_complete(self.rank, doing, operation.error)

    def _start(
        self,
        verb: str,
        form: str,
        content: Any,
        start: Callable[[Operation], None],
        *,
        traffic: Callable[[Operation], dict[int, tuple[float, float]]],
        rounds: Rounds,
        connections: int,
        sent: int,
        peer: int | None = None,
    ) -> Operation:
        """Takes part in an operation, and returns it.

        Args:
            verb: its name in the meter.
            form: shapes and dtypes, which must be the same on all ranks.
            content: what this rank brings along.
            start: called when all have come; computes the result.
            traffic: returns the bytes that each rank sends and receives.
            rounds, connections: as in `Network.carry`.
            sent: bytes that this rank sends.
            peer: the only other rank that takes part; by default all members do.
        """
        number = self._operations[peer] = self._operations.get(peer, 0) + 1
        members = self.members if peer is None else sorted((self.rank, peer))
        key: Key = (self._number, number) if peer is None else ("exchange", self._number, *members, number)

        def start_and_carry(operation: Operation) -> None:
            with torch.no_grad():
                start(operation)
            if operation.error is None:
                self._job.network.carry(
                    traffic(operation), rounds, connections, lambda: self._job.finish(key, operation)
                )

        operation = self._job.join(key, self.rank, f"{verb} of {form}", members, content, start_and_carry)
        self.meter.add(self._name, verb, calls=1 if sent else 0, nbytes=sent)
        return operation

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name} must be a rank from 0 to {self.size - 1}, not {rank}")
        if rank not in self.members:
            raise ValueError(f"{name} must be a rank that still takes part ({self.members}), not {rank}")


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _ranks(numbers: Sequence[int]) -> str:
    if not numbers:
        return "its messages"
    others = f" and {len(numbers) - SHOWN_RANKS} others" if len(numbers) > SHOWN_RANKS else ""
    return ranks(list(numbers[:SHOWN_RANKS])) + others
