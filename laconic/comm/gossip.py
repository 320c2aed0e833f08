"""The verb for workers that talk with one neighbour at a time, beside the training and at their own pace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Self

from torch import Tensor

from laconic.topology import Topology

# One exchange as one end sees it: what it yields goes to the peer, and what the peer yielded at the same place comes
# back. Both ends yield the same number of tensors, of the same shapes and dtypes, and may change none of them.
Dialogue = Generator[Tensor, Tensor, None]
Talk = Callable[[int], Dialogue]


class Gossip(ABC):
    """Exchanges beside the training. Starts paused; `seek` starts it.

    The parts of a dialogue between two yields never run while the training is inside `with gossip:`, and there is never
    more than one dialogue under way. A neighbour that is gone or answers nothing is dropped with a warning.
    """

    topology: Topology  # of the workers still in it
    exchanges: int  # made so far, started here or there
    partners: Counter[int]  # the same by peer

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def seek(self, exchanges: int, urgently: int) -> None:
        """Look for neighbours that seek too, until this many exchanges have been made in all; beyond that, only answer.
        Until `urgently` many have been made, neighbours that only answer will do. Returns at once. Raises what has
        ended the gossip, if something has: this worker was dropped, the graph fell apart, …"""

    @abstractmethod
    def wait(self, exchanges: int) -> None:
        """Wait until this many exchanges have been made in all, or no neighbour is left."""

    @abstractmethod
    def pause(self) -> None:
        """Wait for the exchange under way, and start and answer none until the next `seek`."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the exchange under way, and end."""
