"""The record of a run: one line of `runs.jsonl`, with a versioned schema."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 5
# Schema 4 had no `agreed`: times to a target were those of the mean of all models.
# Schema 3 had no `average_seconds`, `average_nbytes` and `differs`, and its clock stopped for evaluations. Schema 2 had
# no `target` and no `worker_step_times` either. Schema 1 also used other names for some fields.
_RENAMED_FIELDS = {
    "way": "method",
    "is_peer": "is_baseline",
    "split": "step_time",
    "card_nbytes_per_step": "nic_nbytes_per_step",
}
_RENAMED_POINT_FIELDS = {"card_nbytes": "nic_nbytes", "method": "method_metrics"}
_RENAMED_TIME_FIELDS = {"step": "total", "method": "overhead"}


@dataclass
class Point:
    """One evaluation during a run.

    Args:
        step: The number of steps made.
        seconds: Training time until then. The models are evaluated after training, which is not included.
        payload_nbytes: Bytes sent by one worker, mean over workers.
        nic_nbytes: The same as counted by the (emulated) network interface, headers included; None on loopback.
        values: Loss and metric of the evaluated model on held-out data.
        method_metrics: The method's own metrics, such as its current period.
        differs: Whether the workers' parameters differed, so that the evaluated model, their mean, exists only once
            they are averaged.
        agreed: If they differed, loss and metric of the model that all workers held, such as the outer parameters of
            DiLoCo; empty if there is none. It is some steps old, and available without an average.
    """

    step: int
    seconds: float
    payload_nbytes: float
    nic_nbytes: float | None
    values: dict[str, float]
    method_metrics: dict[str, float] = field(default_factory=dict)
    differs: bool = False
    agreed: dict[str, float] = field(default_factory=dict)


@dataclass
class StepTime:
    """Where the seconds of an average step go. None: not measured.

    Args:
        total: The whole step.
        compute: Forward pass, backward pass and optimizer.
        waiting: The training thread was blocked on the network or on other workers.
        overhead: The method's work on the training thread: packing, compressing, deciding.
    """

    total: float
    compute: float | None
    waiting: float | None
    overhead: float | None


def mean_step_time(times: Sequence[StepTime]) -> StepTime | None:
    """Returns the mean of several step times, or None if there are none. A part that one of them lacks is None."""
    if not times:
        return None

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if len(known) == len(values) else None

    return StepTime(
        sum(time.total for time in times) / len(times),
        compute=mean([time.compute for time in times]),
        waiting=mean([time.waiting for time in times]),
        overhead=mean([time.overhead for time in times]),
    )


@dataclass
class Record:
    """One run of one method or baseline."""

    name: str  # with settings, as requested: "local_sgd+period=4"
    method: str  # "local_sgd"
    is_baseline: bool
    settings: dict[str, str]
    task: str
    task_settings: dict[str, Any]
    metric: str
    higher_is_better: bool
    parameters: int
    workers: int
    link: str  # "none" for loopback, or the link of each host
    rho: float | None
    steps: int
    seed: int
    command: str
    date: str
    versions: dict[str, str]
    machine: str
    target: float | None = None  # the value of the metric to which the comparison measures time, if any
    status: str = "ok"  # or "failed"
    reason: str = ""
    seconds: float = 0.0
    step_time: StepTime | None = None  # mean over workers
    worker_step_times: list[StepTime] = field(default_factory=list)  # by rank
    payload_nbytes_per_step: dict[str, float] = field(default_factory=dict)  # by channel, mean over workers
    nic_nbytes_per_step: float | None = None
    average_seconds: float = 0.0  # to average the parameters of all workers once, measured at the end
    average_nbytes: float = 0.0  # that one worker sends for it
    peak_memory_nbytes: int = 0  # of the worker with the highest peak
    points: list[Point] = field(default_factory=list)
    train_loss: list[tuple[int, float]] = field(default_factory=list)
    schema: int = SCHEMA

    def final(self) -> float | None:
        """Returns the metric at the last evaluation, or None if there was none."""
        return self.points[-1].values[self.metric] if self.points else None

    def reached(self, target: float) -> Point | None:
        """Returns when a model is first at the target, which the next evaluation confirms, or None.

        One evaluation at the target may be noise. The last evaluation of a run needs no confirmation. If the workers'
        parameters differed, the seconds and bytes of averaging them once are added: without that, no worker has the
        model that was evaluated. The agreed model, which all workers hold, may be at the target sooner: then that is
        returned, with its values and without an average.
        """
        of_mean = self._first_at([point.values for point in self.points], target)
        if of_mean is not None and of_mean.differs:
            of_mean = dataclasses.replace(
                of_mean,
                seconds=of_mean.seconds + self.average_seconds,
                payload_nbytes=of_mean.payload_nbytes + self.average_nbytes,
            )
        # Where all hold the same parameters, these are the agreed ones.
        held = [point.agreed if point.differs else point.values for point in self.points]
        of_agreed = self._first_at(held, target)
        if of_agreed is not None and of_agreed.differs:
            of_agreed = dataclasses.replace(of_agreed, values=of_agreed.agreed, differs=False)
        found = [point for point in (of_mean, of_agreed) if point is not None]
        return min(found, key=lambda point: point.seconds, default=None)

    def _first_at(self, values: Sequence[dict[str, float]], target: float) -> Point | None:
        """Returns the first point at which these values are at the target, and at the next point again."""
        at_target = [self.metric in one and self._is_at(one[self.metric], target) for one in values]
        for i, point in enumerate(self.points):
            if all(at_target[i : i + 2]):
                return point
        return None

    def _is_at(self, value: float, target: float) -> bool:
        return value >= target if self.higher_is_better else value <= target


class RunsFile:
    """The file `runs.jsonl` of an output folder. Lines are written completely or not at all."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "runs.jsonl"

    def append(self, record: Record) -> None:
        """Appends a run.

        Raises:
            OSError: The line could not be written, for example because the disk is full. Earlier lines are unchanged.
        """
        line = (json.dumps(to_json(dataclasses.asdict(record)), allow_nan=False) + "\n").encode()
        # Unbuffered: closing a buffered file would write again what a full disk rejected.
        with open(self.path, "ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError as error:
                os.truncate(self.path, end)
                what = f"the run of {record.name} was not written: {error.strerror}"
                raise OSError(error.errno, what, str(self.path)) from error

    def read(self) -> list[Record]:
        """Returns all runs, those of older schemas included.

        Raises:
            ValueError: A line is not a run that laconic wrote; the message has the line's number.
        """
        records = []
        for number, line in enumerate(self.path.read_text(errors="replace").splitlines(), start=1):
            try:
                records.append(parse_record(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                what = "" if isinstance(error, json.JSONDecodeError) else f" ({error})"
                raise ValueError(f"{self.path}, line {number} is not a run that laconic wrote{what}") from error
        return records


def to_json(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by strings that `float` accepts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: to_json(entry) for key, entry in value.items()}
    return [to_json(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def parse_record(line: str) -> Record:
    """Returns the record that one line of `runs.jsonl` holds.

    Raises:
        ValueError: The line has a schema that this version of laconic cannot read.
    """
    data = json.loads(line)
    if not isinstance(data, dict) or data.get("schema") not in range(1, SCHEMA + 1):
        schema = data.get("schema") if isinstance(data, dict) else None
        raise ValueError(f"a run must have a schema from 1 to {SCHEMA}, not {schema!r}")
    if data["schema"] == 1:
        data = _from_schema_1(data)
    data["schema"] = SCHEMA
    for point in data["points"]:
        for column in ("values", "method_metrics", "agreed"):
            if column not in point:
                continue
            point[column] = {name: float(value) for name, value in point[column].items()}
    data["points"] = [Point(**point) for point in data["points"]]
    data["step_time"] = data["step_time"] and StepTime(**data["step_time"])
    data["worker_step_times"] = [StepTime(**time) for time in data.get("worker_step_times", [])]
    data["train_loss"] = [(step, float(loss)) for step, loss in data["train_loss"]]
    return Record(**data)


def _from_schema_1(data: dict[str, Any]) -> dict[str, Any]:
    new = _renamed(data, _RENAMED_FIELDS)
    new["points"] = [_renamed(point, _RENAMED_POINT_FIELDS) for point in data["points"]]
    new["step_time"] = data["split"] and _renamed(data["split"], _RENAMED_TIME_FIELDS)
    return new


def _renamed(data: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in data.items()}
