"""Gossip: workers exchange tensors with one neighbour at a time, in the background and each at its own pace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator
from types import TracebackType

from torch import Tensor
from typing_extensions import Self

from laconic.topology import Topology

# One worker's side of an exchange. Each tensor that it yields is sent to the peer, and what the peer yielded at this
# point comes back: in host memory, from where a device may copy it without waiting, or on the device. Both sides yield
# the same number of tensors, of the same shapes and dtypes, and may modify none. One that is not finite is not sent,
# and ends the gossip with an error.
Dialogue = Generator[Tensor, Tensor, None]
Talk = Callable[[int], Dialogue]  # the peer's rank → this worker's side of an exchange with it


class Gossip(ABC):
    """Exchanges in the background. Starts paused; `seek` starts it.

    Code of a dialogue between two yields never runs while the training thread is inside `with gossip:`, and there is
    never more than one dialogue at a time. A neighbour that is gone or does not answer is dropped, with a warning.

    Attributes:
        topology: of the workers that still take part.
        exchanges: how many this worker has made, started here or at the peer.
        partners: the same, by peer.
    """

    topology: Topology
    exchanges: int
    partners: Counter[int]

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def seek(self, exchanges: int, urgently: int) -> None:
        """Sets how many exchanges are to be made, and returns at once.

        Args:
            exchanges: in total; until then, seeks neighbours that seek too. Afterwards only answers.
            urgently: in total; until then, also accepts neighbours that only answer.

        Raises:
            Exception: the error that has ended the gossip, if any (this worker was dropped, a dialogue failed, …).
        """

    @abstractmethod
    def wait(self, exchanges: int) -> None:
        """Waits until this many exchanges have been made in total, or no neighbour is left."""

    @abstractmethod
    def pause(self) -> None:
        """Waits for the current exchange; neither starts nor answers another before the next `seek`."""

    @abstractmethod
    def close(self) -> None:
        """Waits for the current exchange, and ends."""
