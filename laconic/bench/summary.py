"""Summarises the seeds of each contender: means, standard deviations, cost to a target, and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from laconic.bench.record import Point, Record, StepTime, mean_step_time

MAX_CURVE_POINTS = 120  # more than a chart has room for
LOSS_WINDOWS = 100


@dataclass(frozen=True)
class Spread:
    """The mean over seeds, and the sample standard deviation (None for one seed)."""

    mean: float
    deviation: float | None


@dataclass(frozen=True)
class Curve:
    """A quantity by step: the mean over seeds, the lowest and the highest seed."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class ToTarget:
    """The cost of reaching the target, mean over the seeds that reached it.

    Args:
        seconds: Training time.
        lowest_seconds: Training time of the fastest seed.
        highest_seconds: Training time of the slowest seed that reached the target.
        payload_nbytes: Bytes sent by one worker.
        step: The number of steps.
        reached: The number of seeds that reached the target.
        seeds: The number of all seeds.
    """

    seconds: float
    lowest_seconds: float
    highest_seconds: float
    payload_nbytes: float
    step: float
    reached: int
    seeds: int

    @property
    def by_all(self) -> bool:
        return self.reached == self.seeds


@dataclass(frozen=True)
class Summary:
    """All runs of one contender. Figures are over the runs that did not fail."""

    name: str
    runs: list[Record]
    failed: list[Record]

    @property
    def method(self) -> str:
        return (self.runs or self.failed)[0].method

    @property
    def is_baseline(self) -> bool:
        return (self.runs or self.failed)[0].is_baseline

    @property
    def final(self) -> Spread | None:
        return spread(record.final() for record in self.runs)

    @property
    def seconds(self) -> float | None:
        return mean(record.seconds for record in self.runs)

    @property
    def step_time(self) -> StepTime | None:
        return mean_step_time([record.step_time for record in self.runs if record.step_time is not None])

    @property
    def worker_step_times(self) -> list[StepTime]:
        """Returns the step time of each rank, mean over seeds; empty if a run did not record it for each rank."""
        ranks = {len(record.worker_step_times) for record in self.runs}
        if len(ranks) != 1:
            return []
        means = [mean_step_time(times) for times in zip(*(r.worker_step_times for r in self.runs), strict=True)]
        return [time for time in means if time is not None]

    @property
    def payload_nbytes_per_step(self) -> dict[str, float]:
        """Returns the payload bytes per step by channel, foreground first."""
        channels = {channel for record in self.runs for channel in record.payload_nbytes_per_step}
        ordered = sorted(channels, key=lambda channel: (channel != "foreground", channel))
        total = {channel: sum(r.payload_nbytes_per_step.get(channel, 0.0) for r in self.runs) for channel in ordered}
        return {channel: nbytes / len(self.runs) for channel, nbytes in total.items()}

    @property
    def nic_nbytes_per_step(self) -> float | None:
        return mean_if_all(record.nic_nbytes_per_step for record in self.runs)

    @property
    def peak_memory_nbytes(self) -> int | None:
        return max((record.peak_memory_nbytes for record in self.runs), default=0) or None

    def to_target(self, target: float) -> ToTarget | None:
        """Returns the cost of reaching the target (see `Record.reached`), or None if no seed reaches it."""
        points = [point for record in self.runs if (point := record.reached(target))]
        if not points:
            return None
        return ToTarget(
            seconds=sum(point.seconds for point in points) / len(points),
            lowest_seconds=min(point.seconds for point in points),
            highest_seconds=max(point.seconds for point in points),
            payload_nbytes=sum(point.payload_nbytes for point in points) / len(points),
            step=sum(point.step for point in points) / len(points),
            reached=len(points),
            seeds=len(self.runs),
        )

    def rank(self, target: float) -> tuple[bool, float]:
        """Returns the key that sorts contenders by the time to the target; those that some seed misses come last."""
        cost = self.to_target(target)
        return (cost is None or not cost.by_all, cost.seconds if cost else math.inf)

    def curve(self, quantity: Callable[[Point], float | None]) -> Curve:
        """Returns a quantity at the steps that all seeds evaluated."""
        return curve_of([[(p.step, quantity(p)) for p in record.points] for record in self.runs])

    def method_curves(self) -> dict[str, Curve]:
        """Returns the curves of the method's own metrics, by name."""
        keys = dict.fromkeys(key for record in self.runs for point in record.points for key in point.method_metrics)
        curves = {key: self.curve(partial(_method_metric, key)) for key in keys}
        return {key: curve for key, curve in curves.items() if curve.steps}

    def loss_curve(self) -> Curve:
        """Returns the training loss, smoothed by averaging over windows of equal length."""
        return curve_of([window_means(record.train_loss) for record in self.runs])


def summarize(records: Sequence[Record]) -> list[Summary]:
    """Returns one summary per contender, in the order of the runs."""
    names = dict.fromkeys(record.name for record in records)
    return [
        Summary(
            name,
            runs=[r for r in records if r.name == name and r.status == "ok"],
            failed=[r for r in records if r.name == name and r.status != "ok"],
        )
        for name in names
    ]


def _method_metric(key: str, point: Point) -> float | None:
    return point.method_metrics.get(key)


def mean(values: Iterable[float]) -> float | None:
    """Returns the mean, or None if there are no values."""
    known = list(values)
    return sum(known) / len(known) if known else None


def mean_if_all(values: Iterable[float | None]) -> float | None:
    """Returns the mean, or None if one value is None: a mean over some seeds is not comparable with one over all."""
    known: list[float] = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return mean(known)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Returns mean and sample standard deviation of the values that are not None.

    Example:
        >>> spread([1.0, 2.0, 3.0])
        Spread(mean=2.0, deviation=1.0)
    """
    known = [value for value in values if value is not None]
    middle = mean(known)
    if middle is None:
        return None
    if len(known) == 1:
        return Spread(middle, None)
    return Spread(middle, math.sqrt(sum((value - middle) ** 2 for value in known) / (len(known) - 1)))


def curve_of(seeds: Sequence[Sequence[tuple[int, float | None]]]) -> Curve:
    """Returns the curve over the steps that all seeds have. Elsewhere the mean would jump when a seed ends.

    Args:
        seeds: For each seed, pairs of step and value.
    """
    known = [{step: value for step, value in points if value is not None} for points in seeds]
    steps = sorted(set.intersection(*map(set, known))) if known else []
    steps = thin_out(steps)
    columns = [[values[step] for values in known] for step in steps]
    return Curve(
        steps,
        mean=[sum(column) / len(column) for column in columns],
        low=[min(column) for column in columns],
        high=[max(column) for column in columns],
    )


def thin_out(steps: list[int]) -> list[int]:
    """Returns at most MAX_CURVE_POINTS of the steps, evenly spaced, with the first and the last."""
    if len(steps) <= MAX_CURVE_POINTS:
        return steps
    last = len(steps) - 1
    return [steps[round(i * last / (MAX_CURVE_POINTS - 1))] for i in range(MAX_CURVE_POINTS)]


def window_means(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns the means over at most LOSS_WINDOWS windows of equal length, each at the last step of its window."""
    width = math.ceil(len(points) / LOSS_WINDOWS) or 1
    windows = [points[i : i + width] for i in range(0, len(points), width)]
    return [(window[-1][0], sum(loss for _, loss in window) / len(window)) for window in windows]
