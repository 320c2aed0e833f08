"""Counts the payload bytes that this worker sends and the seconds it waits, by channel and verb."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Counts of one verb on one channel."""

    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass
class Counts:
    """Sums over channels and verbs. A channel or verb that is not given means all of them.

    A verb and its asynchronous form count under the same name, that of the blocking form.

    >>> meter = Meter()
    >>> meter.add("foreground", "mean", calls=1, nbytes=400)
    >>> meter.add("background", "all_gather", calls=1, nbytes=80)
    >>> meter.total.nbytes(), meter.total.nbytes("background"), meter.total.calls(verb="mean")
    (480, 80, 1)
    """

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)  # by (channel, verb)
    waited: float = 0.0  # seconds the training thread was blocked, on any channel
    method_seconds: float = 0.0  # seconds of the training thread in the method's hooks, waiting included

    def _sum(self, what: str, channel: str | None, verb: str | None) -> float:
        return sum(  # type: ignore[no-any-return]
            getattr(tally, what)
            for (c, v), tally in list(self.tallies.items())  # a copy: another thread may add one meanwhile
            if (channel is None or c == channel) and (verb is None or v == verb)
        )

    def calls(self, channel: str | None = None, verb: str | None = None) -> int:
        """Returns how often a verb sent anything."""
        return int(self._sum("calls", channel, verb))

    def nbytes(self, channel: str | None = None, verb: str | None = None) -> int:
        """Returns the payload bytes that this worker sent, without the headers of TCP and Ethernet."""
        return int(self._sum("nbytes", channel, verb))

    def seconds(self, channel: str | None = None, verb: str | None = None) -> float:
        """Returns the seconds that any thread was blocked, waiting for the network or for other workers."""
        return float(self._sum("seconds", channel, verb))


class Meter:
    """Counts for the whole run (`total`) and for the last step (`last_step`).

    A step counts from the end of the step before it to its own end. So the counts of all steps, and of what follows
    the last one, add up to `total`. Before the first step has ended, `last_step` is empty.

    Channels: `foreground` is traffic that a step may wait for, `background` is traffic that it does not wait for,
    `control` is the worker's own traffic (the broadcast at the start, `consensus()`, the average at the end, and 32
    bytes now and then by which the ranks compare themselves). `node` is traffic inside a node (docs/nodes.md).

    Args:
        in_training_thread: tells whether the caller is the training thread; by default, that is the present thread.

    >>> meter = Meter()
    >>> meter.begin_step(1)
    >>> meter.add("foreground", "mean", calls=1, nbytes=400)
    >>> meter.end_step()
    >>> meter.add("background", "exchange", calls=1, nbytes=80)  # between two steps
    >>> meter.last_step.nbytes(), meter.total.nbytes()
    (400, 480)
    >>> meter.begin_step(2)
    >>> meter.end_step()
    >>> meter.last_step.nbytes()
    80
    """

    def __init__(self, in_training_thread: Callable[[], bool] | None = None) -> None:
        self.step = 0  # the current step, for error messages
        self.total = Counts()
        self.last_step = Counts()
        self.current_step = Counts()  # since the last step ended
        self._waiting_since: float | None = None  # of the training thread
        self._lock = threading.Lock()
        training_thread = threading.get_ident()
        self._in_training_thread = in_training_thread or (lambda: threading.get_ident() == training_thread)

    def begin_step(self, step: int) -> None:
        """Sets the current step."""
        self.step = step

    def end_step(self) -> None:
        """Makes the counts since the end of the step before those of `last_step`."""
        with self._lock:
            self.last_step, self.current_step = self.current_step, Counts()

    def add(self, channel: str, verb: str, *, calls: int = 0, nbytes: int = 0, seconds: float = 0.0) -> None:
        """Adds to the counts. Any thread may call this; seconds of the training thread also count as `waited`."""
        with self._lock:
            for counts in (self.total, self.current_step):
                tally = counts.tallies.get((channel, verb))
                if tally is None:
                    tally = counts.tallies[channel, verb] = Tally()
                tally.calls += calls
                tally.nbytes += nbytes
                tally.seconds += seconds
                if seconds and self._in_training_thread():
                    counts.waited += seconds
                    self._waiting_since = None

    def begin_wait(self, now: float) -> None:
        """Notes that a wait begins, which `add` will count once it is over. `now`: by the clock of the comm."""
        if self._in_training_thread():
            self._waiting_since = now

    def waited_until(self, now: float) -> float:
        """Returns the seconds that the training thread was blocked, including a wait that is not over yet.

        >>> meter = Meter()
        >>> meter.begin_wait(now=10.0)
        >>> meter.total.waited, meter.waited_until(now=12.5)
        (0.0, 2.5)
        """
        with self._lock:
            since = self._waiting_since
            return self.total.waited + (max(0.0, now - since) if since is not None else 0.0)

    def nbytes_by_channel(self) -> dict[str, int]:
        """Returns the payload bytes sent so far, by channel. Any thread may call this."""
        found: dict[str, int] = {}
        with self._lock:
            for (channel, _), tally in self.total.tallies.items():
                found[channel] = found.get(channel, 0) + tally.nbytes
        return found

    def add_method(self, seconds: float) -> None:
        """Adds seconds that the training thread spent in the method's hooks."""
        for counts in (self.total, self.current_step):
            counts.method_seconds += seconds
