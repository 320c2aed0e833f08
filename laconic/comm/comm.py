"""The verbs by which workers talk. Methods use nothing else, so they run unchanged over any implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from laconic.comm.gossip import Gossip, Talk
from laconic.comm.meter import Meter
from laconic.topology import Topology


class PeerError(RuntimeError):
    """Another worker failed, left, is missing or is doing something else. The message names ranks, step and verb."""


class Pending(ABC):
    """A mean that is on its way."""

    @abstractmethod
    def wait(self) -> Tensor:
        """The result; a second call returns it again."""


class Comm(ABC):
    """`size` workers, of which this is `rank`. Every verb is called by all ranks, in the same order on each channel,
    with tensors of the same shape and dtype everywhere; `exchange` is between two. Inputs are never changed, unless
    `out` is the input itself. Every wait ends: by the result, or by a `PeerError` that names who was missing."""

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
    def mean_async(self, x: Tensor) -> Pending:
        """Start a mean and return at once. `x` may be overwritten as soon as this returns."""

    @abstractmethod
    def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Send `chunks[j]` to rank j; the i-th result is what rank i sent here.

        What comes from each rank is as long as `chunks[rank]`: chunk j has the same length on every rank.
        """

    @abstractmethod
    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Everyone's x, by rank."""

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
