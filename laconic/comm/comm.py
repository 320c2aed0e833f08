"""The operations ("verbs") by which workers communicate. Methods use nothing else, so they run over any implementation.

The asynchronous verbs are abstract; each blocking verb is written once, in `Comm`, as its asynchronous form and a wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from laconic.comm.bulletin import Bulletin
from laconic.comm.checks import check_lengths
from laconic.comm.gossip import Gossip, Talk
from laconic.comm.late import Late
from laconic.comm.meter import Meter
from laconic.topology import Topology

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class PeerError(RuntimeError):
    """Another worker failed, left, is missing or runs different code. The message names ranks, step and verb."""


class Pending(ABC, Generic[T_co]):
    """A result that has not arrived yet: the handle that every asynchronous verb returns.

    >>> from laconic.comm import Solo
    >>> pending = Solo().mean_async(torch.ones(2))
    >>> pending.wait()
    tensor([1., 1.])
    """

    @abstractmethod
    def wait(self) -> T_co:
        """Blocks until the result is there, and returns it. A second call returns it again.

        Raises:
            PeerError: the result can no longer arrive, or did not within the time-out.
        """


class _Chunks(Pending[list[Tensor]]):
    """The chunks of an all_to_all: views of a buffer that `pending` fills."""

    def __init__(self, chunks: list[Tensor], pending: Pending[None]) -> None:
        self._chunks, self._pending = chunks, pending

    def wait(self) -> list[Tensor]:
        self._pending.wait()
        return self._chunks


class Comm(ABC):
    """Connects this worker to the others of the job.

    All ranks call every verb, in the same order on each channel, with tensors of the same shape and dtype; only
    `exchange` is between two ranks. Inputs are not modified, unless `out` is the input. Every wait ends, by the result
    or by a `PeerError` that names the ranks that were missing.

    A verb with `_async` in its name returns at once, and its inputs may be overwritten then (except for those of
    `all_to_all_into_async`, and an input that is also `out`). Several may be in flight, and be waited for in any order.

    Attributes:
        rank: this worker, from 0 to `size` − 1.
        size: how many workers started the job.
        meter: counts bytes sent and seconds waited.
        late: reads numbers of a device that decide what the host does, one step late.

    >>> from laconic.comm import Solo
    >>> comm = Solo()  # a job of one worker; in training, use `worker.comm`
    >>> comm.mean(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    >>> comm.all_gather(torch.tensor([comm.rank]))
    [tensor([0])]
    """

    rank: int
    size: int
    meter: Meter
    late: Late = Late()  # on the CPU it holds nothing; a comm of a device has its own

    @property
    @abstractmethod
    def members(self) -> list[int]:
        """The ranks that still take part, as of the last `meet`: all, unless gossip has dropped some.

        Verbs are between members, and lists that they return have one entry a member, in this order.
        """

    def name_of(self, rank: int) -> str:
        """Returns what error messages call a rank: its number in the job, also where only some ranks communicate."""
        return str(rank)

    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Averages x over the workers.

        Args:
            x: this worker's tensor.
            out: a contiguous tensor for the result; may be x itself.

        Returns:
            `out` if it was given, else a new tensor, with the mean, bit-identical on all ranks.

        Raises:
            FloatingPointError: on all ranks, if the mean is not finite; names the ranks whose x is not.
        """
        return self.mean_async(x, out=out).wait()

    @abstractmethod
    def mean_async(self, x: Tensor, *, out: Tensor | None = None) -> Pending[Tensor]:
        """Starts `mean`. `out` may be neither read nor written before the wait is over."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Returns every rank's x, in the order of the ranks."""
        return self.all_gather_async(x).wait()

    @abstractmethod
    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]:
        """Starts `all_gather`."""

    def all_to_all(self, chunks: Sequence[Tensor], *, lengths: Sequence[int] | None = None) -> list[Tensor]:
        """Sends the vector `chunks[j]` to rank j, for all j.

        Args:
            chunks: one vector for each rank, this one included.
            lengths: how many entries come from each rank, possibly 0, so that this is also a gather or a scatter. By
                default as many as `chunks[rank]` has: chunk j then has the same length on every rank.

        Returns:
            What each rank sent to this one, in the order of the ranks.
        """
        return self.all_to_all_async(chunks, lengths=lengths).wait()

    def all_to_all_async(
        self, chunks: Sequence[Tensor], *, lengths: Sequence[int] | None = None
    ) -> Pending[list[Tensor]]:
        """Starts `all_to_all`."""
        received_lengths = check_lengths(chunks, lengths, self.members.index(self.rank), len(self.members))
        sent = torch.cat([chunk.reshape(-1) for chunk in chunks])
        received = sent.new_empty(sum(received_lengths))
        pending = self.all_to_all_into_async(
            received, sent, received_lengths=received_lengths, sent_lengths=[chunk.numel() for chunk in chunks]
        )
        return _Chunks(list(torch.split(received, received_lengths)), pending)

    @abstractmethod
    def all_to_all_into_async(
        self, received: Tensor, sent: Tensor, *, received_lengths: Sequence[int], sent_lengths: Sequence[int]
    ) -> Pending[None]:
        """Starts an `all_to_all` between two buffers, without copies.

        Args:
            received: a contiguous vector, to be filled with the ranks' chunks end to end.
            sent: a contiguous vector, the chunks for the ranks end to end. Neither may be touched before the wait is
                over.
            received_lengths: entries from each rank.
            sent_lengths: entries for each rank.
        """

    def broadcast(self, x: Tensor, *, root: int = 0, out: Tensor | None = None) -> Tensor:
        """Returns the x of rank `root` (in `out`, if it is given)."""
        return self.broadcast_async(x, root=root, out=out).wait()

    @abstractmethod
    def broadcast_async(self, x: Tensor, *, root: int = 0, out: Tensor | None = None) -> Pending[Tensor]:
        """Starts `broadcast`."""

    @abstractmethod
    def exchange(self, x: Tensor, peer: int) -> Tensor:
        """Sends x to the rank `peer`, which does the same, and returns what `peer` sent."""

    @abstractmethod
    def gossip(self, topology: Topology, talk: Talk) -> Gossip:
        """Starts exchanges in the background, with one neighbour at a time. All ranks call it, once.

        Args:
            topology: which ranks are neighbours.
            talk: called with the peer's rank for each exchange; returns this worker's side of it.
        """

    @abstractmethod
    def channel(self, name: str = "background") -> Comm:
        """Opens a channel: its messages neither wait for those of other channels nor mix with them.

        All ranks open their channels in the same order. The meter is shared, and counts under the channel's name.
        """

    @abstractmethod
    def meet(self, what: str, note: Any = None) -> list[Any]:
        """Waits until all ranks have come to the same meeting, and returns everyone's note, in the order of the ranks.

        For rare moments at which ranks may have diverged (the end, `consensus()`, a checkpoint): if a rank waits
        elsewhere or came to another meeting, this raises on every rank instead of hanging. With gossip, a rank that is
        gone is left out.

        Args:
            what: names the meeting in error messages.
            note: anything that JSON can represent.
        """

    def bulletin(self, name: str) -> Bulletin:
        """Returns a board on which each rank posts a short text that the others may read; nobody waits for anybody.

        A comm whose ranks share no board returns one with only this rank's text.
        """
        return Bulletin(self.rank)

    @property
    def can_lose_members(self) -> bool:
        """Whether the others continue when a rank is gone: with gossip."""
        return False

    def among_members(self, what: str, operation: Callable[[], T]) -> T:
        """Returns the result of an operation of all members; with gossip, repeats it if a member is lost meanwhile.

        Args:
            what: names the operation in error messages.
            operation: calls verbs of this channel. It may be called several times, on all members, each time between
                those that are left.
        """
        return operation()

    def computed(self) -> None:  # noqa: B027  no implementation has to do anything
        """Says that this worker has computed a gradient. Real time has passed by then; simulated time passes here."""

    @abstractmethod
    def now(self) -> float:
        """Returns this worker's clock in seconds, for measuring intervals. Methods read no other clock."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Reports to the others that this worker cannot continue, so that they stop waiting for it."""

    @abstractmethod
    def close(self) -> None:
        """Releases the connections of all channels. All ranks have met before."""
