"""The verbs over torch.distributed: gloo for tensors in host memory, a device's own backend (NCCL, …) for its tensors.

A device's backend serves the foreground only; `comm/staged.py` brings device tensors to channels of host memory.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.background import BackgroundGossip
from laconic.comm.bulletin import Bulletin, StoreBulletin
from laconic.comm.checks import check_buffers, contiguous_copy
from laconic.comm.comm import Comm, PeerError, Pending
from laconic.comm.finite import all_finite, check_late
from laconic.comm.gossip import Gossip, Talk
from laconic.comm.late import Late
from laconic.comm.mesh import HAS_EPOLL, Mesh
from laconic.comm.meter import Meter
from laconic.comm.pairing import Dropped, Pairing
from laconic.comm.plan import (
    SMALL_NBYTES,
    all_gather_nbytes,
    all_to_all_nbytes,
    broadcast_nbytes,
    is_direct,
    mean_nbytes,
)
from laconic.comm.register import Register, first_line
from laconic.comm.staged import CPU, StagedComm
from laconic.comm.store import StoreGone
from laconic.comm.wire import Connector, WireError, bytes_of
from laconic.comm.work import DeviceWork, PendingWork, PointToPointWork, Work, call_torch, wait_for
from laconic.ranges import span
from laconic.topology import Topology

T = TypeVar("T")
DEVICE_GRACE_SECONDS = 60.0  # by which the time-out of a device's own backend is longer


class DistributedComm(Comm):
    """One channel over all ranks, with its own process group.

    On the CPU, a channel also has a mesh: its own TCP connections, over which all-to-all and all-gather messages bypass
    gloo, whose threads wake up for each packet. A background channel uses the mesh for messages of any length. The
    foreground channel uses it for messages that all ranks know to be small, since nothing moves long ones while the
    worker computes.

    With a device's backend, a wait makes the device wait and not the host. Before it starts an operation, the host
    makes sure that those of earlier steps are over: so it learns of a rank that is gone, and is at most a step ahead.

    Args:
        name: of the channel, in the meter and in error messages.
        register: where ranks leave their errors, and meet.
        meter: shared by all channels.
        backend: "gloo", or the device's own.
        device: of the model, for which other channels and gossip are made.
        background: whether messages must also move while the worker computes.
        late: shared by all channels; by default a new one.
    """

    def __init__(
        self,
        name: str,
        register: Register,
        meter: Meter,
        backend: str,
        *,
        device: torch.device = CPU,
        background: bool = False,
        late: Late | None = None,
    ) -> None:
        self.rank, self.size, self.meter = register.rank, register.size, meter
        self._name, self._register, self._backend, self._background = name, register, backend, background
        self.device, self.late = device, late or Late()
        self._unfinished: deque[DeviceWork] = deque()  # of a device's backend: what the host has not seen completed
        # A rank that does not come is named by the meeting; new_group alone would only say that a key is missing.
        self._opening = f"the opening of the {name} channel"
        _require_same_devices(register, register.meet(self._opening, meter.step, [backend, device.type]))
        self._sequence = f"{name}-{register.count('channels')}"
        # A device's backend ends the process when its time is over: this worker's own, which names a rank, is shorter.
        grace = 0.0 if backend == "gloo" else DEVICE_GRACE_SECONDS
        self._timeout = timedelta(seconds=register.timeout + grace)
        self._whole = self._new_group(register.members)
        self._group_members, self._members_group = register.members, self._whole
        self._channels: list[DistributedComm] = []
        self._staged: list[StagedComm] = []  # around the channels, for tensors of a device
        self._gossip: BackgroundGossip | None = None
        self._mesh = self._open_mesh() if backend == "gloo" and HAS_EPOLL and len(self.members) > 1 else None
        if backend != "gloo":
            # NCCL connects in the first operation, which must be of all ranks and takes seconds.
            probe = torch.zeros(1, device=device)
            connect = lambda: dist.broadcast(probe, src=self.members[0], group=self._whole, async_op=True)  # noqa: E731
            self._start("connect", 0, connect, lambda: None).wait()
            self._await_device()

    def _new_group(self, members: list[int]) -> Any:
        def new_group() -> Any:
            partition = self._register.partition
            if members in partition:
                # All ranks make the groups of all subsets, in the same order: torch names groups by counting them.
                groups = [dist.new_group(ranks, backend=self._backend, timeout=self._timeout) for ranks in partition]
                return groups[partition.index(members)]
            # gloo cannot use a group with a dead rank.
            return dist.new_group(members, backend=self._backend, timeout=self._timeout, use_local_synchronization=True)

        if self._backend != "gloo":
            return new_group()  # on this thread, whose current device it uses
        return call_torch(new_group, self._register, self._opening)

    def _open_mesh(self) -> Mesh:
        register = self._register
        others = [rank for rank in self.members if rank != self.rank]
        connector = Connector(
            register.store.prefixed(self._sequence),
            self.rank,
            register.timeout,
            lambda: register.raise_if_failed(self._opening),
        )
        try:
            mesh = Mesh(connector, self.rank, others, background=self._background)
        except (WireError, OSError) as error:
            raise register.roll_call(self._opening, first_line(error), others) from error
        register.meanwhile.append(mesh.serve)
        return mesh

    @property
    def members(self) -> list[int]:
        return self._register.members

    @property
    def _place(self) -> int:
        """This rank's index among the members."""
        return self.members.index(self.rank)

    @property
    def _group(self) -> Any:
        """The process group of the members."""
        if self._group_members != self.members:
            self._members_group = self._new_group(self.members)
            self._group_members = self.members
        return self._members_group

    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        if self._backend == "gloo" and (_nbytes(x) <= SMALL_NBYTES or self._is_direct(x, None)):
            return self._direct_mean(x, out)
        return super().mean(x, out=out)

    def _direct_mean(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Averages in two rounds of direct messages: each rank averages a share of the entries, and sends its mean.

        gloo's ring sends as many bytes, but in 2(n−1) rounds, and a small vector's time is the rounds' latency. A
        connection of gloo that was reset while it was idle cannot be made again, as those of direct messages are. So
        the averages of `consensus()` and of the end, the first that a channel sends in hours, go this way too. This is
        no `mean_async`: the second round starts in the wait, so ranks that wait in another order would mix them up.
        """
        finite_here, result, n = all_finite(x), contiguous_copy(x, out), len(self.members)
        entries, nbytes = result.view(-1), _nbytes(x)
        lengths = [share.numel() for share in torch.tensor_split(entries, n)]
        own = lengths[self._place]
        shares = entries.new_empty(n * own)
        self._all_to_all("mean", mean_nbytes(nbytes, n), shares, entries, [own] * n, lengths, most_nbytes=nbytes).wait()
        answers = shares.view(n, own).mean(0).repeat(n)
        # The bytes of both rounds are counted in the first.
        self._all_to_all("mean", 0, entries, answers, lengths, [own] * n, most_nbytes=nbytes).wait()
        return self._checked(result, finite_here)

    def mean_async(self, x: Tensor, *, out: Tensor | None = None) -> Pending[Tensor]:
        finite_here, result = all_finite(x), contiguous_copy(x, out)
        return self._start(
            "mean",
            mean_nbytes(_nbytes(x), len(self.members)),
            lambda: dist.all_reduce(result, op=dist.ReduceOp.AVG, group=self._group, async_op=True),
            lambda: self._checked(result, finite_here),
        )

    def _checked(self, mean: Tensor, finite_here: Tensor) -> Tensor:
        check_late(self, mean, finite_here)
        return mean

    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]:
        n = len(self.members)
        gathered = x.new_empty(n, *x.shape)
        results = list(gathered.unbind())
        own = results[self._place].copy_(x.detach())  # is sent from here: the caller may overwrite x

        def launch() -> Any:
            if self._is_direct(x, _nbytes(x)):
                parts = _split_bytes(gathered, [x.numel()] * n)
                return self._launch_direct(parts, [parts[self._place]] * n)
            return dist.all_gather(results, own, group=self._group, async_op=True)

        return self._start("all_gather", all_gather_nbytes(_nbytes(x), n), launch, lambda: results)

    def all_to_all_into_async(
        self, received: Tensor, sent: Tensor, *, received_lengths: Sequence[int], sent_lengths: Sequence[int]
    ) -> Pending[None]:
        check_buffers(received, sent, received_lengths, sent_lengths, self._place, len(self.members))
        nbytes = all_to_all_nbytes(sent_lengths, self._place, sent.element_size())
        return self._all_to_all("all_to_all", nbytes, received, sent, list(received_lengths), list(sent_lengths))

    def _all_to_all(
        self,
        verb: str,
        nbytes: int,
        received: Tensor,
        sent: Tensor,
        received_lengths: list[int],
        sent_lengths: list[int],
        *,
        most_nbytes: int | None = None,
    ) -> Pending[None]:
        """`verb`, `nbytes`: for the meter. `most_nbytes`: an upper bound on every message, if all ranks know one."""

        def launch() -> Any:
            if self._is_direct(sent, most_nbytes):
                incoming, outgoing = _split_bytes(received, received_lengths), _split_bytes(sent, sent_lengths)
                incoming[self._place][:] = outgoing[self._place]
                return self._launch_direct(incoming, outgoing)
            return dist.all_to_all_single(
                received, sent, received_lengths, sent_lengths, group=self._group, async_op=True
            )

        return self._start(verb, nbytes, launch, lambda: None)

    def _is_direct(self, x: Tensor, most_nbytes: int | None) -> bool:
        """Returns whether messages bypass gloo. All ranks must come to the same answer."""
        has_mesh = self._mesh is not None and x.device.type == "cpu"
        return has_mesh and is_direct(most_nbytes, background=self._background)

    def _launch_direct(self, incoming: Sequence[memoryview], outgoing: Sequence[memoryview]) -> Work:
        """Starts messages from and to the members."""
        assert self._mesh is not None
        pairs = zip(self.members, outgoing, incoming, strict=True)
        return self._mesh.sendrecv({rank: (to, of) for rank, to, of in pairs if rank != self.rank})

    def broadcast_async(self, x: Tensor, *, root: int = 0, out: Tensor | None = None) -> Pending[Tensor]:
        self._check_rank("root", root)
        result, n = contiguous_copy(x, out), len(self.members)
        return self._start(
            "broadcast",
            broadcast_nbytes(_nbytes(x), (self._place - self.members.index(root)) % n, n),
            lambda: dist.broadcast(result, src=root, group=self._group, async_op=True),
            lambda: result,
        )

    def exchange(self, x: Tensor, peer: int) -> Tensor:
        self._check_rank("peer", peer)
        if peer == self.rank:
            raise ValueError(f"peer must be another rank, not this one ({peer})")
        sent = x.contiguous()
        received = torch.empty_like(sent)

        def launch() -> Work:
            works = [dist.irecv(received, src=peer, group=self._group), dist.isend(sent, dst=peer, group=self._group)]
            return PointToPointWork(works)

        def launch_on_device() -> list[Any]:
            # As one batch: NCCL does one operation after the other, and both ranks would wait in the first.
            # NCCL's use the current device, which need not be the model's.
            with torch.accelerator.device_index(self.device.index):
                return dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, sent, peer, group=self._group),
                        dist.P2POp(dist.irecv, received, peer, group=self._group),
                    ]
                )

        start = launch if self._backend == "gloo" else launch_on_device
        return self._start("exchange", _nbytes(x), start, lambda: received, peer=peer).wait()

    def gossip(self, topology: Topology, talk: Talk) -> Gossip:
        if topology.nodes != tuple(range(self.size)):
            raise ValueError(f"the topology must have the nodes 0 to {self.size - 1}, not {topology.nodes}")
        if self._register.pairing is not None:
            raise RuntimeError("gossip must be started only once in a job")
        store = self._register.store
        gossip = BackgroundGossip(store, topology, self.rank, talk, self.meter, self._register.timeout, self.device)
        self._register.pairing = Pairing(store, topology, self.rank)
        self._gossip = gossip
        # Before this, a rank that is lost ends the job; after it, the others go on. So all must change together.
        self.meet("the start of gossip")
        return gossip

    def channel(self, name: str = "background") -> Comm:
        return self.open_channel(name, self._register, background=True)

    def open_channel(self, name: str, register: Register, *, background: bool) -> Comm:
        """Opens another channel for tensors of the model's device. This channel closes it.

        Args:
            name: of the channel.
            register: of the ranks that it connects. All of the job open theirs at the same time.
            background: whether messages must also move while the worker computes.
        """
        # NCCL's operations wait for each other's kernels, so background channels always use gloo.
        background = background or self._background
        backend = "gloo" if background else self._backend
        channel = DistributedComm(
            name, register, self.meter, backend, device=self.device, background=background, late=self.late
        )
        self._channels.append(channel)
        if self.device.type == "cpu" or backend != "gloo":
            return channel
        staged = StagedComm(channel, self.device, register.timeout)
        self._staged.append(staged)
        return staged

    def meet(self, what: str, note: Any = None) -> list[Any]:
        start = time.monotonic()
        self.meter.begin_wait(start)
        try:
            with span("meet"):
                return self._register.meet(what, self.meter.step, note)
        finally:
            self.meter.add("control", "meet", seconds=time.monotonic() - start)

    def bulletin(self, name: str) -> Bulletin:
        return StoreBulletin(self._register.store.prefixed(f"bulletin/{name}").clone(), self.rank, self.size)

    @property
    def can_lose_members(self) -> bool:
        return self._register.pairing is not None

    def among_members(self, what: str, operation: Callable[[], T]) -> T:
        while self.can_lose_members:
            members, error = self.members, None
            try:
                result = operation()
            except (Dropped, StoreGone):
                raise
            except PeerError as lost:
                error = lost
            if all(self.meet(what, error is None)) and error is None:
                return result
            if self.members == members:
                raise error or PeerError(f"rank {self.rank}: {what} failed on another rank, and no rank is lost")
            self._forget_connections()
        return operation()

    def _forget_connections(self) -> None:
        """Makes the verbs use new connections between the members. The old ones may hold parts of failed messages."""
        if self._mesh is not None:
            self._register.meanwhile.remove(self._mesh.serve)
            self._mesh.close()
            self._mesh = None

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
            if channel._backend != "gloo":
                # Otherwise everything that the user still does on the device would wait for operations that never end.
                with contextlib.suppress(RuntimeError):
                    channel._whole.abort()

    def close(self) -> None:
        self._register.leave()
        self._close_connections()
        if self._gossip is not None and self._register.pairing is not None:
            self._gossip.warn_of_lost(self.members, self._register.pairing.dropped)

    def _close_connections(self) -> None:
        for staged in self._staged:
            staged.stop()
        self._await_device()
        for channel in self._channels:
            channel._close_connections()
        if self._mesh is not None:
            self._mesh.close()
        for group in {self._whole, self._members_group}:
            dist.destroy_process_group(group)

    def _start(
        self, verb: str, nbytes: int, launch: Callable[[], Any], finish: Callable[[], T], *, peer: int | None = None
    ) -> Pending[T]:
        """Starts an operation.

        Args:
            verb: its name in the meter.
            nbytes: what this rank sends in it.
            launch: starts it, and returns its work.
            finish: called when it is over, returns the result.
            peer: the only other rank that takes part; by default all members do.
        """
        sequence, name = (
            (self._sequence, verb) if peer is None else (f"{self._sequence}>{peer}", f"{verb} with rank {peer}")
        )
        number, step = self._register.count(sequence), self.meter.step
        participants = (
            {peer: f"{self._sequence}>{self.rank}"} if peer is not None else dict.fromkeys(self.members, self._sequence)
        )
        self._await_device(before=step)
        try:
            work = launch()
        except PeerError:
            raise
        except RuntimeError as error:  # gloo may notice a dead rank already here
            others = self.members if peer is None else [peer]
            raise self._register.roll_call(f"{name} at step {self.meter.step}", first_line(error), others) from error
        self.meter.add(self._name, verb, calls=1 if nbytes else 0, nbytes=nbytes)
        on_device = None
        if self._backend != "gloo":
            works = work if isinstance(work, list) else [work]
            on_device = DeviceWork(works, f"{name} at step {step}", participants, number, step)
            self._unfinished.append(on_device)

        def wait() -> None:
            start = time.monotonic()
            self.meter.begin_wait(start)
            try:
                with span(f"wait {verb}"):
                    if on_device is not None:
                        on_device.order(self._register)
                    else:
                        wait_for(work, self._register, f"{name} at step {self.meter.step}", participants, number)
            finally:
                self.meter.add(self._name, verb, seconds=time.monotonic() - start)

        return PendingWork(wait, finish, launch)

    def _await_device(self, before: float = math.inf) -> None:
        """Makes the host wait for the device's operations that were started before the step `before`."""
        while self._unfinished and self._unfinished[0].step < before:
            self._unfinished[0].await_completion(self._register)
            self._unfinished.popleft()

    def _check_rank(self, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name} must be a rank from 0 to {self.size - 1}, not {rank}")
        if rank not in self.members:
            raise ValueError(f"{name} must be a rank that still takes part ({self.members}), not {rank}")


def _split_bytes(x: Tensor, lengths: Sequence[int]) -> list[memoryview]:
    """Returns the memory of consecutive parts of x, which have `lengths` entries."""
    content, size = bytes_of(x), x.element_size()
    return [content[(end - n) * size : end * size] for n, end in zip(lengths, accumulate(lengths), strict=True)]


def _require_same_devices(register: Register, kinds: Sequence[Sequence[str]]) -> None:
    """Raises a ValueError on every rank if the ranks' models are on different kinds of devices."""
    if any(kind != kinds[0] for kind in kinds):
        found = "; ".join(
            f"{device} ({backend}) on rank {rank}"
            for rank, (backend, device) in zip(register.members, kinds, strict=True)
        )
        with contextlib.suppress(PeerError):  # as in `raise_together`: a rank that left at once would be blamed
            register.meet("an error of all ranks", 0, None)
        raise ValueError(f"all ranks must train on the same kind of device with the same backend, not {found}")


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
