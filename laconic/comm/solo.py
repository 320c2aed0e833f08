"""A world of one worker: every verb is the identity and nothing is sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from laconic.comm.comm import Comm, Pending, check_buffers, check_lengths
from laconic.comm.finite import is_finite
from laconic.comm.gossip import Gossip, Talk
from laconic.comm.meter import Meter
from laconic.topology import Topology

T = TypeVar("T")


class Arrived(Pending[T]):
    def __init__(self, result: T) -> None:
        self.result = result

    def wait(self) -> T:
        return self.result


class Solo(Comm):
    rank = 0
    size = 1

    def __init__(self) -> None:
        self.meter = Meter()

    @property
    def members(self) -> list[int]:
        return [0]

    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        if not is_finite(x):
            raise FloatingPointError(f"mean at step {self.meter.step}: not finite on rank 0")
        return _copy(x, out)

    def mean_async(self, x: Tensor) -> Pending[Tensor]:
        return Arrived(self.mean(x))

    def all_to_all(self, chunks: Sequence[Tensor], *, lengths: Sequence[int] | None = None) -> list[Tensor]:
        check_lengths(chunks, lengths, self.rank, self.size)
        return [chunks[0].clone()]

    def all_to_all_async(
        self, chunks: Sequence[Tensor], *, lengths: Sequence[int] | None = None
    ) -> Pending[list[Tensor]]:
        return Arrived(self.all_to_all(chunks, lengths=lengths))

    def all_to_all_into_async(
        self, received: Tensor, sent: Tensor, *, received_lengths: Sequence[int], sent_lengths: Sequence[int]
    ) -> Pending[None]:
        check_buffers(received, sent, received_lengths, sent_lengths, self.rank, self.size)
        received.copy_(sent)
        return Arrived(None)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x.clone()]

    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]:
        return Arrived(self.all_gather(x))

    def broadcast(self, x: Tensor, *, root: int = 0, out: Tensor | None = None) -> Tensor:
        if root != 0:
            raise ValueError(f"root must be a rank from 0 to 0, not {root}")
        return _copy(x, out)

    def exchange(self, x: Tensor, peer: int) -> Tensor:
        raise ValueError(f"peer must be another rank, and there is none in a world of one, not {peer}")

    def gossip(self, topology: Topology, talk: Talk) -> Gossip:
        raise ValueError("gossip needs another worker, and there is none in a world of one")

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


def _copy(x: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return x.clone()
    if out is not x:
        out.copy_(x)
    return out
