"""What the workers said to each other: payload bytes sent and seconds waited, by channel and verb."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Tally:
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass
class Counts:
    """Tallies by (channel, verb). A channel or verb that is not given means all of them."""

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    waited: float = 0.0  # seconds the training thread was blocked, on whatever channel
    method_seconds: float = 0.0  # seconds of the training thread in the method's hooks, waiting included

    def _sum(self, what: str, channel: str | None, verb: str | None) -> float:
        return sum(  # type: ignore[no-any-return]
            getattr(tally, what)
            for (c, v), tally in self.tallies.items()
            if (channel is None or c == channel) and (verb is None or v == verb)
        )

    def calls(self, channel: str | None = None, verb: str | None = None) -> int:
        return int(self._sum("calls", channel, verb))

    def nbytes(self, channel: str | None = None, verb: str | None = None) -> int:
        """Payload bytes this worker sent: what the algorithm put on the wire, without TCP's and Ethernet's headers."""
        return int(self._sum("nbytes", channel, verb))

    def seconds(self, channel: str | None = None, verb: str | None = None) -> float:
        """Seconds a caller was blocked, waiting for the network or for other workers, in whatever thread."""
        return self._sum("seconds", channel, verb)


class Meter:
    """Channels: `foreground` is what a step may wait for, `background` what it does not, `control` is outside steps
    (the broadcast at the start, `consensus()`, the average at the end)."""

    def __init__(self) -> None:
        self.step = 0  # the step under way: errors name it
        self.total = Counts()
        self.last_step = Counts()
        self._lock = threading.Lock()
        self._training_thread = threading.get_ident()

    def begin_step(self, step: int) -> None:
        self.step = step
        self.last_step = Counts()

    def add(self, channel: str, verb: str, *, calls: int = 0, nbytes: int = 0, seconds: float = 0.0) -> None:
        with self._lock:
            for counts in (self.total, self.last_step):
                tally = counts.tallies.get((channel, verb))
                if tally is None:
                    tally = counts.tallies[channel, verb] = Tally()
                tally.calls += calls
                tally.nbytes += nbytes
                tally.seconds += seconds
                if seconds and threading.get_ident() == self._training_thread:
                    counts.waited += seconds

    def add_method(self, seconds: float) -> None:
        for counts in (self.total, self.last_step):
            counts.method_seconds += seconds
