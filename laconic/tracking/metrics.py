"""The numbers that describe a worker: the same keys for every method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from laconic.comm import Comm, Meter
from laconic.method import Method

if TYPE_CHECKING:
    from laconic.tracking.tracking import Tracking

CHANNELS = ("foreground", "background", "control")
INSIDE = "node"  # the channel inside a node
# Every key of `worker.metrics()`, besides `exchanges_with_RANK` for each rank and `method_NAME` for what only one
# method has. Those of COUNTED are counted since the last call, and so are exchanges with each rank.
COUNTED = (
    "steps",
    "seconds",
    "waited_seconds",
    "overhead_seconds",
    "bytes",
    *(f"bytes_{channel}" for channel in (*CHANNELS, INSIDE)),
    "exchanges",
)
KEYS = (
    "step",
    *COUNTED,
    "bytes_total",
    "step_seconds",
    "waited_share",
    "overhead_share",
    "bytes_per_second",
    "period",
    "bits",
    "consensus_distance",
    "members",
)
WITH = "exchanges_with_"


class Tracked(Protocol):
    """A worker, as tracking sees it."""

    step: int
    comm: Comm
    method: Method
    consensus_distance: float | None
    tracking: Tracking

    @property
    def meter(self) -> Meter: ...


class Readings:
    """Reads a worker's metrics. Counters count from the last call of `read` of the same object, or from the start."""

    def __init__(self, worker: Tracked) -> None:
        self._worker = worker
        self._last: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        worker, tracking = self._worker, self._worker.tracking
        of_method = worker.method.metrics()
        totals = tracking.totals() | self._exchanges(of_method)
        since = {name: total - self._last.get(name, 0.0) for name, total in totals.items()}
        self._last = totals
        timed_steps, timed_seconds = since.pop("timed_steps"), since.pop("timed_seconds")
        seconds = since["seconds"]
        distance = worker.consensus_distance
        found = since | {
            "step": float(worker.step),
            "step_seconds": _ratio(timed_seconds, timed_steps),
            "waited_share": _ratio(since["waited_seconds"], seconds),
            "overhead_share": _ratio(since["overhead_seconds"], seconds),
            "bytes_total": totals["bytes"],
            "bytes_per_second": _ratio(since["bytes"], seconds),
            "period": of_method.get("period", math.nan),
            "bits": of_method.get("bits", math.nan),
            "consensus_distance": math.nan if distance is None else distance,
            "members": float(len(worker.comm.members)),
        }
        others = {
            f"method_{name}": value
            for name, value in of_method.items()
            if name not in KEYS and not name.startswith(WITH)
        }
        by_peer = {name: value for name, value in since.items() if name.startswith(WITH)}
        return {name: float(found[name]) for name in KEYS} | by_peer | others

    def _exchanges(self, of_method: Mapping[str, float]) -> dict[str, float]:
        """Returns how many exchanges this run has made with each rank. The method's own sum may be of earlier runs."""
        made = {f"{WITH}{rank}": of_method.get(f"{WITH}{rank}", 0.0) for rank in range(self._worker.comm.size)}
        return {"exchanges": sum(made.values()), **made}


def over_ranks(readings: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Returns the mean and the maximum of each key over the ranks that have a value for it.

    >>> over_ranks([{"bytes": 4.0, "bits": math.nan}, {"bytes": 8.0, "bits": math.nan}])
    {'bytes_mean': 6.0, 'bytes_max': 8.0, 'bits_mean': nan, 'bits_max': nan}
    """
    found = {}
    for key in dict.fromkeys(key for reading in readings for key in reading):
        values = [value for reading in readings if (value := reading.get(key)) is not None and not math.isnan(value)]
        found[f"{key}_mean"] = sum(values) / len(values) if values else math.nan
        found[f"{key}_max"] = max(values, default=math.nan)
    return found


def _ratio(amount: float, of: float) -> float:
    return amount / of if of > 0 else math.nan
