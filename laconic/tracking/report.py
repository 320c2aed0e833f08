"""What each rank reports about itself for the live view, and what rank 0 makes of all reports."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from laconic.version import __version__

WINDOW_SECONDS = 10.0  # over which rates are measured
SILENT_SECONDS = 5.0  # without a report, after which a rank is shown as silent
LONGEST_TEXT = 300  # characters of an error


@dataclass
class Report:
    """The state of one rank at one moment.

    Args:
        rank: of the worker.
        beat: counts the reports of this rank.
        host: its name.
        state: "training", "finished" or "failed".
        step: optimizer steps so far.
        doing: "computing", or the verb of the worker in which the training thread is; "" after the end.
        doing_seconds: for how long, if it is a verb.
        step_seconds: mean duration of a step, over the last seconds; None if there was none.
        waiting_share: the share of the last seconds in which the training thread waited for others.
        bytes_per_second: payload sent, over the last seconds.
        nbytes: payload sent since the start, by channel.
        waited_seconds: since the start.
        overhead_seconds: since the start.
        members: ranks that take part.
        error: the last warning or error in the log of this rank, or "".
    """

    rank: int = 0
    beat: int = 0
    host: str = ""
    state: str = "training"
    step: int = 0
    doing: str = "computing"
    doing_seconds: float = 0.0
    step_seconds: float | None = None
    waiting_share: float | None = None
    bytes_per_second: float | None = None
    nbytes: dict[str, int] = field(default_factory=dict)
    waited_seconds: float = 0.0
    overhead_seconds: float = 0.0
    members: int = 1
    error: str = ""

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Report:
        """Reads what `to_text` wrote. The store that carried it is open to others, so nothing is taken on trust.

        Raises:
            ValueError: it is no report.

        >>> Report.from_text(Report(rank=1, step=7).to_text()).step
        7
        """
        try:
            found = json.loads(text)
            return cls(**{f.name: READERS[f.type](found[f.name]) for f in dataclasses.fields(cls)})
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"no report of a rank: {error}") from error


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def _short(value: Any) -> str:
    return str(value)[:LONGEST_TEXT]


# By the type of a field, as it is written.
READERS: dict[Any, Callable[[Any], Any]] = {
    "int": int,
    "str": _short,
    "float": _finite,
    "float | None": lambda value: None if value is None else _finite(value),
    "dict[str, int]": lambda value: {_short(channel): int(n) for channel, n in dict(value).items()},
}


class Rates:
    """Rates over the last seconds, from totals that are added now and then.

    >>> rates = Rates()
    >>> rates.add({"seconds": 0.0, "timed_steps": 0, "timed_seconds": 0.0, "waited_seconds": 0.0, "bytes": 0})
    >>> rates.add({"seconds": 2.0, "timed_steps": 4, "timed_seconds": 2.0, "waited_seconds": 1.0, "bytes": 600})
    >>> rates.read()
    {'step_seconds': 0.5, 'waiting_share': 0.5, 'bytes_per_second': 300.0}
    """

    def __init__(self) -> None:
        self._past: deque[dict[str, float]] = deque()

    def add(self, totals: dict[str, float]) -> None:
        self._past.append(totals)
        while len(self._past) > 2 and self._past[1]["seconds"] < totals["seconds"] - WINDOW_SECONDS:
            self._past.popleft()

    def read(self) -> dict[str, float | None]:
        first, last = self._past[0], self._past[-1]
        change = {name: last[name] - first[name] for name in last}
        seconds, steps = change["seconds"], change["timed_steps"]
        return {
            "step_seconds": change["timed_seconds"] / steps if steps else None,
            "waiting_share": min(1.0, change["waited_seconds"] / seconds) if seconds > 0 else None,
            "bytes_per_second": change["bytes"] / seconds if seconds > 0 else None,
        }


class Overview:
    """All reports that rank 0 has read, and when each rank was last seen.

    Args:
        method: the name of the method.
        size: the number of workers.
    """

    def __init__(self, method: str, size: int) -> None:
        self.method, self._size = method, size
        self._seen: dict[int, tuple[Report, float]] = {}  # by rank: the report, and when it was new here

    def add(self, texts: dict[int, str]) -> None:
        """Adds the ranks' texts. A text that is no report does not count as a sign of life."""
        now = time.monotonic()
        for rank, text in texts.items():
            try:
                report = Report.from_text(text)
            except ValueError:
                continue
            if rank not in self._seen or self._seen[rank][0].beat != report.beat:
                self._seen[rank] = dataclasses.replace(report, rank=rank), now

    def status(self) -> dict[str, Any]:
        """Returns the whole view, ready for JSON."""
        return {
            "laconic": __version__,
            "method": self.method,
            "size": self._size,
            "ranks": [self._rank(rank) for rank in range(self._size)],
        }

    def _rank(self, rank: int) -> dict[str, Any]:
        if rank not in self._seen:
            unknown = {"step": None, "last_seen_seconds": None}
            return dataclasses.asdict(Report(rank=rank, state="no report", doing="")) | unknown
        report, when = self._seen[rank]
        age = time.monotonic() - when
        row = dataclasses.asdict(report) | {"last_seen_seconds": round(age, 1)}
        if report.state == "training" and age > SILENT_SECONDS:
            row["state"] = "silent"
        return row
