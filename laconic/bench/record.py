"""What is kept of a run: one line of `runs.jsonl`, with a versioned schema."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass
class Point:
    """The agreed model after `step` steps. Seconds exclude evaluation; bytes are of one worker, the mean over all."""

    step: int
    seconds: float
    payload_nbytes: float
    card_nbytes: float | None  # as the (emulated) network card counted them; None on loopback
    values: dict[str, float]  # loss and the task's metric on held-out data
    method: dict[str, float] = field(default_factory=dict)  # the method's own metrics: period, variance, …


@dataclass
class Split:
    """Where the seconds of an average step go, mean over workers."""

    step: float
    compute: float | None  # forward, backward, optimizer; None for a peer when no `none` run is there to tell
    waiting: float | None  # the training thread blocked, for the network or for other workers
    method: float | None  # the method's own work: packing, compressing, deciding


@dataclass
class Record:
    """One run of one way to train (a method of laconic, or a peer)."""

    name: str  # as it was asked for: "local_sgd+period=4"
    way: str  # "local_sgd"
    is_peer: bool
    settings: dict[str, str]
    task: str
    task_settings: dict[str, Any]
    metric: str
    higher_is_better: bool
    parameters: int
    workers: int
    link: str  # "none", or the rate of each host
    rho: float | None
    steps: int
    seed: int
    command: str
    date: str
    versions: dict[str, str]
    machine: str
    status: str = "ok"  # or "failed"
    reason: str = ""
    seconds: float = 0.0
    split: Split | None = None
    payload_nbytes_per_step: dict[str, float] = field(default_factory=dict)  # by channel, mean over workers
    card_nbytes_per_step: float | None = None
    peak_memory_nbytes: int = 0  # of the largest worker
    points: list[Point] = field(default_factory=list)
    train_loss: list[tuple[int, float]] = field(default_factory=list)
    schema: int = SCHEMA

    def final(self) -> float | None:
        """The metric of the agreed model at the end."""
        return self.points[-1].values[self.metric] if self.points else None

    def first_at(self, target: float) -> Point | None:
        """The first evaluation that is at least as good as the target."""
        for point in self.points:
            value = point.values[self.metric]
            if value >= target if self.higher_is_better else value <= target:
                return point
        return None


class RunsFile:
    """`runs.jsonl`: a line is there whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "runs.jsonl"

    def append(self, record: Record) -> None:
        """Add a run. When the disk is full the earlier lines stay as they were, and the error says so."""
        line = (json.dumps(_plain(dataclasses.asdict(record)), allow_nan=False) + "\n").encode()
        # Without a buffer: what a full disk did not take must not be tried again when the file is closed.
        with open(self.path, "ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError as error:
                os.truncate(self.path, end)
                what = f"the run of {record.name} is not written: {error.strerror}"
                raise OSError(error.errno, what, str(self.path)) from error

    def read(self) -> list[Record]:
        return [parse(line) for line in self.path.read_text().splitlines()]


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity: a diverged run has the word instead, which `float` reads again."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def parse(line: str) -> Record:
    data = json.loads(line)
    if data.get("schema") != SCHEMA:
        raise ValueError(f"runs.jsonl must have schema {SCHEMA}, not {data.get('schema')!r}")
    for point in data["points"]:
        point["values"] = {name: float(value) for name, value in point["values"].items()}
        point["method"] = {name: float(value) for name, value in point["method"].items()}
    data["points"] = [Point(**point) for point in data["points"]]
    data["split"] = data["split"] and Split(**data["split"])
    data["train_loss"] = [(step, float(loss)) for step, loss in data["train_loss"]]
    return Record(**data)
