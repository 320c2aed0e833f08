"""Stand-ins for the network: workers that are all like this one, a link in virtual time, and scripted times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from laconic.comm import Pending, Solo
from laconic.comm.solo import Arrived
from laconic.methods.divisible import pace as pace_module
from laconic.methods.divisible.pace import Pace, Times


class Mirror(Solo):
    """The other workers send exactly what this one sends. Not for two hops, in which owners have different parts."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.size = size

    @property
    def members(self) -> list[int]:
        return list(range(self.size))

    def channel(self, name: str = "background") -> Mirror:
        return self

    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]:
        return Arrived([x.clone() for _ in range(self.size)])

    def meet(self, what: str, note: Any = None) -> list[Any]:
        return [note] * self.size


class Virtual(Mirror):
    """A link of `bandwidth` bytes per second in virtual time, on which messages follow one another."""

    def __init__(self, bandwidth: float, latency: float = 0.0, size: int = 2) -> None:
        super().__init__(size)
        self.seconds, self.bandwidth, self.latency = 0.0, bandwidth, latency
        self._free = 0.0  # when the link is idle again

    def now(self) -> float:
        return self.seconds

    def mean_async(self, x: Tensor, *, out: Tensor | None = None) -> Pending[Tensor]:
        return self._send(x, super().mean_async(x, out=out))

    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]:
        return self._send(x, super().all_gather_async(x))

    def _send(self, x: Tensor, pending: Pending[Any]) -> Pending[Any]:
        self._free = max(self._free, self.seconds) + x.numel() * x.itemsize / self.bandwidth
        return InFlight(self, self._free + self.latency, pending)

    def wait_until(self, arrival: float) -> None:
        self.meter.add("any", "any", seconds=max(0.0, arrival - self.seconds))
        self.seconds = max(self.seconds, arrival)


class InFlight(Pending[Any]):
    def __init__(self, comm: Virtual, arrival: float, pending: Pending[Any]) -> None:
        self._comm, self._arrival, self._pending = comm, arrival, pending

    def wait(self) -> Any:
        self._comm.wait_until(self._arrival)
        return self._pending.wait()


@contextmanager
def scripted_times(script: Callable[[int, float], Times], interval: int = 5) -> Iterator[None]:
    """Gives every `Pace` the times that `script` returns, instead of measured ones.

    Args:
        script: takes the step, and the bytes that a sweep sends now as a share of those at the start.
        interval: steps from one window to the next.
    """
    add, before = Pace.add, pace_module.INTERVAL

    def add_scripted(self: Pace, step: int, times: Times) -> None:
        at_start = next(iter(self.sizes.values()))[0]
        add(self, step, script(step, self.sizes[self.hops][self.choice] / at_start))

    Pace.add, pace_module.INTERVAL = add_scripted, interval  # type: ignore[method-assign]
    try:
        yield
    finally:
        Pace.add, pace_module.INTERVAL = add, before  # type: ignore[method-assign]
