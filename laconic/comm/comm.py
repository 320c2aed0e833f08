"""The verbs by which workers talk. Methods use nothing else, so they run unchanged over any implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from laconic.comm.gossip import Gossip, Talk
from laconic.comm.meter import Meter
from laconic.topology import Topology

T_co = TypeVar("T_co", covariant=True)


class PeerError(RuntimeError):
    """Another worker failed, left, is missing or is doing something else. The message names ranks, step and verb."""


class Pending(ABC, Generic[T_co]):
    """A result that is on its way."""

    @abstractmethod
    def wait(self) -> T_co:
        """The result; a second call returns it again."""


class Comm(ABC):
    """`size` workers, of which this is `rank`. Every verb is called by all ranks, in the same order on each channel,
    with tensors of the same shape and dtype everywhere; `exchange` is between two. Inputs are never changed, unless
    `out` is the input itself. Every wait ends: by the result, or by a `PeerError` that names who was missing.

    A verb with `_async` in its name returns at once, and then its inputs may be overwritten (but not those of
    `all_to_all_into_async`). Several may be on their way at a time; what was started first need not be waited for
    first."""

    rank: int
    size: int
    meter: Meter

    @property
    @abstractmethod
    def members(self) -> list[int]:
        """The ranks that are still in it, as of the last meeting: all of them, unless gossip has dropped some. Verbs
        are then between members, and what they return has one entry a member."""

    @abstractmethod
    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The mean over workers, bit-identical on all. A result that is not finite raises on every rank."""

    @abstractmethod
    def mean_async(self, x: Tensor) -> Pending[Tensor]: ...

    @abstractmethod
    def all_to_all(self, chunks: Sequence[Tensor], *, lengths: Sequence[int] | None = None) -> list[Tensor]:
        """Send the vector `chunks[j]` to rank j; the i-th result is what rank i sent here, `lengths[i]` entries.

        Without `lengths`, what comes from each rank is as long as `chunks[rank]`: chunk j has the same length on every
        rank. With them, the lengths are free (0 too), so that this is also a gather, a scatter or both at a time.
        """

    @abstractmethod
    def all_to_all_async(
        self, chunks: Sequence[Tensor], *, lengths: Sequence[int] | None = None
    ) -> Pending[list[Tensor]]: ...

    @abstractmethod
    def all_to_all_into_async(
        self, received: Tensor, sent: Tensor, *, received_lengths: Sequence[int], sent_lengths: Sequence[int]
    ) -> Pending[None]:
        """`all_to_all_async` without a copy: `sent` holds the chunks for ranks 0, 1, … end to end, and `received` is
        filled likewise. Both are contiguous vectors, and neither may be touched before the wait is over."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Everyone's x, by rank."""

    @abstractmethod
    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]: ...

    @abstractmethod
    def broadcast(self, x: Tensor, *, root: int = 0, out: Tensor | None = None) -> Tensor:
        """The root's x."""

    @abstractmethod
    def exchange(self, x: Tensor, peer: int) -> Tensor:
        """Send x to one peer that does the same; what it sent."""

    @abstractmethod
    def gossip(self, topology: Topology, talk: Talk) -> Gossip:
        """Exchanges beside the training, with one neighbour at a time as both are free. All ranks start it, once."""

    @abstractmethod
    def channel(self, name: str = "background") -> Comm:
        """An independent path: its messages neither wait for those of other channels nor mix with them.

        All ranks open their channels in the same order. The meter is shared, with the channel's name.
        """

    @abstractmethod
    def meet(self, what: str, note: Any = None) -> list[Any]:
        """All ranks come to the same meeting and read each other's notes (anything JSON can say), by rank.

        For rare moments, where workers may have gone different ways: a rank that waits elsewhere, or came to another
        meeting, makes this raise on every rank instead of hanging. With gossip, a rank that is gone is left out.
        """

    @abstractmethod
    def now(self) -> float:
        """Seconds on this worker's clock, for measuring intervals: methods look at no other."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the others that this worker cannot go on, so that they stop waiting for it."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the channels hold. All ranks have met before."""


def ring_mean_nbytes(nbytes: int, size: int) -> int:
    """What one worker sends in a ring all-reduce."""
    return round(2 * (size - 1) * nbytes / size)


def tree_children(vrank: int, size: int) -> int:
    """How many ranks one sends to in the binomial tree by which gloo broadcasts; the root is 0."""
    children, bit = 0, 1
    while bit < size:
        if vrank < bit and vrank + bit < size:
            children += 1
        bit <<= 1
    return children


def check_lengths(chunks: Sequence[Tensor], lengths: Sequence[int] | None, rank: int, size: int) -> list[int]:
    """How many entries an all_to_all receives from each rank."""
    if len(chunks) != size:
        raise ValueError(f"all_to_all takes one chunk for each of {size} ranks, not {len(chunks)}")
    own = chunks[rank].numel()
    if lengths is None:
        return [own] * size
    if len(lengths) != size:
        raise ValueError(f"all_to_all takes one length for each of {size} ranks, not {len(lengths)}")
    if lengths[rank] != own:
        raise ValueError(
            f"lengths[{rank}] must be the length {own} of the chunk to this rank itself, not {lengths[rank]}"
        )
    return list(lengths)


def check_buffers(
    received: Tensor, sent: Tensor, received_lengths: Sequence[int], sent_lengths: Sequence[int], rank: int, size: int
) -> None:
    for name, buffer, lengths in (("received", received, received_lengths), ("sent", sent, sent_lengths)):
        if len(lengths) != size:
            raise ValueError(f"{name}_lengths must have one length for each of {size} ranks, not {len(lengths)}")
        if sum(lengths) != buffer.numel():
            raise ValueError(f"{name} must have {sum(lengths)} entries, the sum of its lengths, not {buffer.numel()}")
        if buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(f"{name} must be a contiguous vector, not of shape {tuple(buffer.shape)}")
    if received_lengths[rank] != sent_lengths[rank]:
        raise ValueError(
            f"received_lengths[{rank}] must be the length {sent_lengths[rank]} of what this rank sends to itself, "
            f"not {received_lengths[rank]}"
        )


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
