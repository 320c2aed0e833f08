"""The seeds of each way taken together: means, spreads, time to a target, and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from laconic.bench.record import Point, Record, Split

MAX_CURVE_POINTS = 240  # more than a chart has room for
LOSS_WINDOWS = 100


@dataclass(frozen=True)
class Spread:
    """The mean over seeds, and their sample standard deviation (None for one seed)."""

    mean: float
    deviation: float | None


@dataclass(frozen=True)
class Curve:
    """Some quantity at each step: the mean over seeds, the lowest and the highest seed."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class ToTarget:
    """What the target cost, mean over the seeds that reached it."""

    seconds: float
    payload_nbytes: float
    step: float
    reached: int
    seeds: int

    @property
    def by_all(self) -> bool:
        return self.reached == self.seeds


@dataclass(frozen=True)
class Summary:
    """All runs of one name. Figures are over those that ended well."""

    name: str
    runs: list[Record]
    failed: list[Record]

    @property
    def way(self) -> str:
        return (self.runs or self.failed)[0].way

    @property
    def is_peer(self) -> bool:
        return (self.runs or self.failed)[0].is_peer

    @property
    def final(self) -> Spread | None:
        return spread(record.final() for record in self.runs)

    @property
    def seconds(self) -> float | None:
        return mean(record.seconds for record in self.runs)

    @property
    def split(self) -> Split | None:
        splits = [record.split for record in self.runs if record.split is not None]
        step = mean(split.step for split in splits)
        if step is None:
            return None
        return Split(
            step,
            compute=mean_if_all(split.compute for split in splits),
            waiting=mean_if_all(split.waiting for split in splits),
            method=mean_if_all(split.method for split in splits),
        )

    @property
    def payload_nbytes_per_step(self) -> dict[str, float]:
        """By channel, foreground first."""
        channels = {channel for record in self.runs for channel in record.payload_nbytes_per_step}
        ordered = sorted(channels, key=lambda channel: (channel != "foreground", channel))
        total = {channel: sum(r.payload_nbytes_per_step.get(channel, 0.0) for r in self.runs) for channel in ordered}
        return {channel: nbytes / len(self.runs) for channel, nbytes in total.items()}

    @property
    def card_nbytes_per_step(self) -> float | None:
        return mean_if_all(record.card_nbytes_per_step for record in self.runs)

    @property
    def peak_memory_nbytes(self) -> int | None:
        return max((record.peak_memory_nbytes for record in self.runs), default=0) or None

    def to_target(self, target: float) -> ToTarget | None:
        points = [point for record in self.runs if (point := record.first_at(target))]
        if not points:
            return None
        return ToTarget(
            seconds=sum(point.seconds for point in points) / len(points),
            payload_nbytes=sum(point.payload_nbytes for point in points) / len(points),
            step=sum(point.step for point in points) / len(points),
            reached=len(points),
            seeds=len(self.runs),
        )

    def curve(self, quantity: Callable[[Point], float | None]) -> Curve:
        """The quantity at the evaluations that all seeds made."""
        return curve_of([[(p.step, quantity(p)) for p in record.points] for record in self.runs])

    def method_curves(self) -> dict[str, Curve]:
        """The method's own metrics, by name."""
        keys = dict.fromkeys(key for record in self.runs for point in record.points for key in point.method)
        curves = {key: self.curve(partial(_own_metric, key)) for key in keys}
        return {key: curve for key, curve in curves.items() if curve.steps}

    def loss_curve(self) -> Curve:
        """The training loss, each run smoothed by the means of equal windows of steps."""
        return curve_of([windowed(record.train_loss) for record in self.runs])


def summarize(records: Sequence[Record]) -> list[Summary]:
    """One summary a name, in the order in which the names were run."""
    names = dict.fromkeys(record.name for record in records)
    return [
        Summary(
            name,
            runs=[r for r in records if r.name == name and r.status == "ok"],
            failed=[r for r in records if r.name == name and r.status != "ok"],
        )
        for name in names
    ]


def _own_metric(key: str, point: Point) -> float | None:
    return point.method.get(key)


def mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def mean_if_all(values: Iterable[float | None]) -> float | None:
    """None when one is unknown: a mean over some seeds would not add up with those over all."""
    known: list[float] = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return mean(known)


def spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    middle = mean(known)
    if middle is None:
        return None
    if len(known) == 1:
        return Spread(middle, None)
    return Spread(middle, math.sqrt(sum((value - middle) ** 2 for value in known) / (len(known) - 1)))


def curve_of(seeds: Sequence[Sequence[tuple[int, float | None]]]) -> Curve:
    """Over the steps known for all seeds: past them, the mean would jump whenever a seed ends."""
    known = [{step: value for step, value in points if value is not None} for points in seeds]
    steps = sorted(set.intersection(*map(set, known))) if known else []
    steps = thinned(steps)
    columns = [[values[step] for values in known] for step in steps]
    return Curve(
        steps,
        mean=[sum(column) / len(column) for column in columns],
        low=[min(column) for column in columns],
        high=[max(column) for column in columns],
    )


def thinned(steps: list[int]) -> list[int]:
    """Evenly fewer, with the first and the last."""
    if len(steps) <= MAX_CURVE_POINTS:
        return steps
    last = len(steps) - 1
    return [steps[round(i * last / (MAX_CURVE_POINTS - 1))] for i in range(MAX_CURVE_POINTS)]


def windowed(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Means over equal numbers of points, each at its last step."""
    width = math.ceil(len(points) / LOSS_WINDOWS) or 1
    windows = [points[i : i + width] for i in range(0, len(points), width)]
    return [(window[-1][0], sum(loss for _, loss in window) / len(window)) for window in windows]
