"""What a worker measures about itself, and who gets it: writers, and the live view."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from laconic.comm import Meter
from laconic.ranges import span
from laconic.tracking.metrics import CHANNELS, INSIDE, Readings, Tracked, over_ranks

if TYPE_CHECKING:
    from laconic.tracking.dashboard import Dashboard
    from laconic.tracking.track import Track

STEP_VERBS = ("before_step", "after_step", "after_hooks", "await_step")


class Tracking:
    """One worker's time in laconic, its writers and its live view.

    Args:
        worker: the worker; its `comm` is connected.

    Attributes:
        steps: the steps made by this object's worker, in this run.
        doing: what the training thread does, and since when by the worker's clock; None while it computes.
        tracks: the writers added by `laconic.track`.
        dashboard: the live view, if there is one.
        is_over: whether the worker's block has ended.
    """

    def __init__(self, worker: Tracked) -> None:
        self._worker = worker
        self.steps = 0
        self.doing: tuple[str, float] | None = None
        self.tracks: list[Track] = []
        self.dashboard: Dashboard | None = None
        self.is_over = False
        self._started = worker.comm.now()
        self._left: float | None = None  # when the last step was over, unless something else came after it
        self._timed_steps, self._timed_seconds = 0, 0.0
        self.overhead_seconds = 0.0
        self._readings = Readings(worker)

    @property
    def meter(self) -> Meter:
        return self._worker.meter

    def now(self) -> float:
        return self._worker.comm.now()

    def start_dashboard(self) -> str | None:
        """Starts the live view, if the worker has one. Returns its address on rank 0."""
        if self.dashboard is None:
            return None
        self.dashboard.start()
        return self.dashboard.url

    def verb(self, name: str) -> Verb:
        """Returns a `with` block around a verb of the worker: a range for profilers, and the time spent in it."""
        return Verb(self, name)

    def leave_verb(self, name: str, seconds: float, waited: float) -> None:
        if name in STEP_VERBS:
            self.overhead_seconds += max(0.0, seconds - waited)
        else:
            self._left = None  # the time until the end of the next step is not that of a step

    def end_step(self) -> None:
        """Counts a step, and writes where it is time to. No writer's failure gets out of here."""
        now = self.now()
        self.steps += 1
        if self._left is not None:
            self._timed_steps += 1
            self._timed_seconds += now - self._left
        self._left = now
        for track in self.tracks:
            track.end_step(self._worker.step)

    def totals(self) -> dict[str, float]:
        """Returns what is counted, since the start of the worker. Any thread may call this."""
        nbytes, now = self.meter.nbytes_by_channel(), self.now()
        return {
            "steps": float(self.steps),
            "seconds": now - self._started,
            "timed_steps": float(self._timed_steps),
            "timed_seconds": self._timed_seconds,
            "waited_seconds": self.meter.waited_until(now),
            "overhead_seconds": self.overhead_seconds,
            "bytes": float(sum(nbytes.values()) - nbytes.get(INSIDE, 0)),
            **{f"bytes_{channel}": float(nbytes.get(channel, 0)) for channel in (*CHANNELS, INSIDE)},
        }

    def read(self) -> dict[str, float]:
        """Returns this rank's metrics since the last call."""
        return self._readings.read()

    def read_over_ranks(self) -> dict[str, float]:
        """Returns mean and maximum over the ranks, all of which call this between two steps."""
        return over_ranks(self._worker.comm.meet("metrics(over='ranks')", self.read()))

    def close(self, error: BaseException | None = None) -> None:
        """Writes the rest and ends the live view. To be called before the job's store is closed.

        Args:
            error: why the worker ends; None if all is well.
        """
        self.is_over = True
        for track in self.tracks:
            track.close(self._worker.step)
        self.tracks = []
        if self.dashboard is not None:
            self.dashboard.close(error)
            self.dashboard = None


class Verb:
    """A `with` block around a verb of the worker, as returned by `Tracking.verb`."""

    __slots__ = ("_name", "_outer", "_span", "_start", "_tracking", "_waited")

    def __init__(self, tracking: Tracking, name: str) -> None:
        self._tracking, self._name, self._span = tracking, name, span(name)

    def __enter__(self) -> None:
        self._span.__enter__()
        tracking = self._tracking
        self._outer, self._start, self._waited = tracking.doing, tracking.now(), tracking.meter.total.waited
        tracking.doing = self._outer or (self._name, self._start)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tracking = self._tracking
        tracking.doing = self._outer
        if self._outer is None:
            waited = tracking.meter.total.waited - self._waited
            tracking.leave_verb(self._name, tracking.now() - self._start, waited)
        self._span.__exit__(kind, error, trace)
