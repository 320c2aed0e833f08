"""Communication among some ranks of a job: those of one node, or one rank of each node.

The ranks of a subset meet among themselves. Failures, roll calls and lifelines are those of the whole job, so a rank
that is lost is named on every rank, in or outside of the subset.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.comm.background import BackgroundGossip
from laconic.comm.comm import Comm, PeerError, Pending
from laconic.comm.distributed import DistributedComm
from laconic.comm.gossip import Gossip, Talk
from laconic.comm.meter import Meter
from laconic.comm.register import Register
from laconic.comm.solo import Solo
from laconic.comm.staged import StagedComm
from laconic.topology import Topology


class SubsetRegister(Register):
    """The meetings of some ranks of a job.

    Args:
        job: the register of all ranks.
        name: of the partition.
        partition: all ranks of the job in subsets, by their numbers in the job. One of them contains this rank.
    """

    def __init__(self, job: Register, name: str, partition: list[list[int]]) -> None:
        vars(self).update(vars(job))  # the same lifeline, counts of operations, and failures
        self._job = job
        index = next(i for i, members in enumerate(partition) if job.rank in members)
        self.store = job.store.prefixed(f"{name}-{index}")
        self.partition, self.members, self.pairing = partition, partition[index], None
        self._meetings = 0

    def raise_if_failed(self, doing: str) -> None:
        self._job.raise_if_failed(doing)

    def raise_if_stuck(self, doing: str, participants: Mapping[int, str], number: int) -> None:
        self._job.raise_if_stuck(doing, participants, number)
        self._raise_if_at_meeting(doing, participants, number)

    def raise_if_elsewhere(self, doing: str, missing: Collection[int]) -> None:
        """Raises if one of the ranks that did not come to a meeting of this subset waits at one of the whole job."""
        for rank in missing:
            found = self._job.place_of(rank)
            if found is not None and not self.store.check([f"meet/{self._meetings}/{rank}"]):
                raise PeerError(f"rank {self.rank}: {doing} cannot complete: rank {rank} has been at {found}")

    def roll_call(self, doing: str, cause: str, participants: Collection[int]) -> PeerError:
        return self._job.roll_call(doing, cause, participants)

    def fail(self, text: str) -> None:
        self._job.fail(text)


class SubsetGossip(BackgroundGossip):
    """Gossip in a subset. It ends when a rank is lost: the rest of that rank's node cannot go on, and the job ends."""

    def __init__(
        self, register: SubsetRegister, topology: Topology, rank: int, talk: Talk, meter: Meter, device: torch.device
    ) -> None:
        self._register = register
        super().__init__(register.store, topology, rank, talk, meter, register.timeout, device)

    def _notice_dropped(self) -> None:
        lost = [self._register.members[rank] for rank in self._pairing.dropped]
        if lost:
            raise self._register.roll_call("gossip between the nodes", "an exchange was broken off", lost)


class SubsetComm(Comm):
    """A `Comm` among some ranks of a job, in which they are numbered from 0.

    Args:
        job: the foreground channel of all ranks, which closes this one too.
        register: of the subset.
        channel: the name of the channel in the meter.
        background: whether messages must also move while the worker computes.
    """

    def __init__(
        self, job: DistributedComm, register: SubsetRegister, channel: str, *, background: bool = False
    ) -> None:
        self._job, self._register, self._ranks, self.late = job, register, register.members, job.late
        self._comm = job.open_channel(channel, register, background=background)
        self._gossip: SubsetGossip | None = None
        self.rank, self.size, self.meter = self._ranks.index(job.rank), len(self._ranks), job.meter

    @property
    def members(self) -> list[int]:
        return list(range(self.size))

    def name_of(self, rank: int) -> str:
        return self._job.name_of(self._ranks[rank])

    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self._comm.mean(x, out=out)

    def mean_async(self, x: Tensor, *, out: Tensor | None = None) -> Pending[Tensor]:
        return self._comm.mean_async(x, out=out)

    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]:
        return self._comm.all_gather_async(x)

    def all_to_all_into_async(
        self, received: Tensor, sent: Tensor, *, received_lengths: Sequence[int], sent_lengths: Sequence[int]
    ) -> Pending[None]:
        return self._comm.all_to_all_into_async(
            received, sent, received_lengths=received_lengths, sent_lengths=sent_lengths
        )

    def broadcast_async(self, x: Tensor, *, root: int = 0, out: Tensor | None = None) -> Pending[Tensor]:
        return self._comm.broadcast_async(x, root=self._ranks[root], out=out)

    def exchange(self, x: Tensor, peer: int) -> Tensor:
        return self._comm.exchange(x, self._ranks[peer])

    def gossip(self, topology: Topology, talk: Talk) -> Gossip:
        if topology.nodes != tuple(range(self.size)):
            raise ValueError(f"the topology must have the nodes 0 to {self.size - 1}, not {topology.nodes}")
        if self._gossip is not None:
            raise RuntimeError("gossip must be started only once in a job")
        self._gossip = SubsetGossip(self._register, topology, self.rank, talk, self.meter, self._job.device)
        return self._gossip

    @property
    def can_lose_members(self) -> bool:
        return self._gossip is not None

    def raise_if_failed(self, doing: str) -> None:
        """Raises if another rank of the job has reported a failure to this one. Costs nothing if none has."""
        if self._register.lifeline.notice is not None:
            self._register.raise_if_failed(f"{doing} at step {self.meter.step}")

    def channel(self, name: str = "background") -> Comm:
        return SubsetComm(self._job, self._register, name, background=True)

    def meet(self, what: str, note: Any = None) -> list[Any]:
        return self._comm.meet(what, note)

    def now(self) -> float:
        return self._comm.now()

    def fail(self, error: BaseException) -> None:
        self._job.fail(error)

    def close(self) -> None:
        """Does nothing: the job's channel closes this one."""


def open_subset(job: Comm, name: str, partition: list[list[int]], channel: str = "foreground") -> Comm:
    """Returns the communication of this rank with the others of its subset. All ranks of the job call it.

    Args:
        job: the foreground channel of all ranks.
        name: of the partition.
        partition: all ranks of the job in subsets of one size, each ascending.
        channel: the name of the channel in the meter.

    Raises:
        ValueError: the job does not run over torch.distributed.
    """
    if isinstance(job, StagedComm):
        job = job.channel_of_host  # the subset's channels have buffers of their own
    if not isinstance(job, DistributedComm):
        raise ValueError(f"nodes need torch.distributed, and this job communicates by {type(job).__name__}")
    if len(partition[0]) == 1:
        alone = Solo()
        alone.meter, alone.late = job.meter, job.late
        return alone
    return SubsetComm(job, SubsetRegister(job._register, name, partition), channel)
