"""A job of one worker: every verb is the identity and nothing is sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from laconic.comm.checks import check_buffers, contiguous_copy
from laconic.comm.comm import Comm, Pending
from laconic.comm.finite import check_late
from laconic.comm.gossip import Gossip, Talk
from laconic.comm.late import Late
from laconic.comm.meter import Meter
from laconic.topology import Topology

T = TypeVar("T")


class Arrived(Pending[T]):
    """A result that is there already.

    >>> Arrived(3).wait()
    3
    """

    def __init__(self, result: T) -> None:
        self.result = result

    def wait(self) -> T:
        return self.result


class Solo(Comm):
    """Implements the verbs for a single worker, as under plain `python`.

    >>> comm = Solo()
    >>> comm.meet("the first epoch", note=3)
    [3]
    >>> comm.meter.total.nbytes()
    0
    """

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.meter, self.late = Meter(), Late()

    @property
    def members(self) -> list[int]:
        return [0]

    def mean_async(self, x: Tensor, *, out: Tensor | None = None) -> Pending[Tensor]:
        check_late(self, x, torch.zeros(()))
        return Arrived(contiguous_copy(x, out))

    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]:
        return Arrived([x.clone()])

    def all_to_all_into_async(
        self, received: Tensor, sent: Tensor, *, received_lengths: Sequence[int], sent_lengths: Sequence[int]
    ) -> Pending[None]:
        check_buffers(received, sent, received_lengths, sent_lengths, self.rank, self.size)
        received.copy_(sent)
        return Arrived(None)

    def broadcast_async(self, x: Tensor, *, root: int = 0, out: Tensor | None = None) -> Pending[Tensor]:
        if root != 0:
            raise ValueError(f"root must be 0, the only rank of a job of one worker, not {root}")
        return Arrived(contiguous_copy(x, out))

    def exchange(self, x: Tensor, peer: int) -> Tensor:
        raise ValueError(f"peer must be another rank, and a job of one worker has none, not {peer}")

    def gossip(self, topology: Topology, talk: Talk) -> Gossip:
        raise ValueError("gossip needs another worker, and a job of one worker has none; use torchrun to start more")

    def channel(self, name: str = "background") -> Comm:
        return self

    def meet(self, what: str, note: Any = None) -> list[Any]:
        return [note]

    def now(self) -> float:
        return time.monotonic()

    def fail(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass
