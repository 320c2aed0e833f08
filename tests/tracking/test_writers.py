"""`laconic.track`: trackers are recognised by their functions, and none of them can stop training."""

from __future__ import annotations

import csv
import logging
import math
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import laconic
from laconic.tracking.metrics import KEYS
from tests.helpers import Silent, build_model, rank, sgd, train_step


class TensorBoard:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert global_step is not None
        self.scalars.append((tag, scalar_value, global_step))


class MLflow:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None) -> None:
        assert step is not None
        self.logged.append((step, metrics))


class WandB:
    def __init__(self) -> None:
        self.axes: dict[str, str | None] = {}
        self.logged: list[dict[str, float]] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is None, "a step that is behind W&B's own count would be dropped"
        self.logged.append(data)


def train(writer: Any, steps: int = 5, every: int = 2, method: laconic.Method | None = None, **options: Any) -> int:
    model = build_model()
    optimizer = sgd(model)
    with laconic.Worker(model, optimizer, method or Silent()) as worker:
        laconic.track(worker, writer, every=every, **options)
        for step in range(steps):
            train_step(model, optimizer, worker.rank, step)
    return worker.step


def test_tensorboard() -> None:
    writer = TensorBoard()
    train(writer)
    assert {step for _, _, step in writer.scalars} == {2, 4, 5}
    assert [value for tag, value, _ in writer.scalars if tag == "laconic/steps"] == [2.0, 2.0, 1.0]
    assert not any(math.isnan(value) for _, value, _ in writer.scalars)
    assert "laconic/bits" not in {tag for tag, _, _ in writer.scalars}, "no method, no bits"


def test_mlflow() -> None:
    writer = MLflow()
    train(writer, method=laconic.LocalSGD(), prefix="")
    assert [(step, metrics["steps"], metrics["period"]) for step, metrics in writer.logged] == [
        (2, 2.0, 8.0),
        (4, 2.0, 8.0),
        (5, 1.0, 8.0),
    ]


def test_wandb_has_an_axis_of_its_own() -> None:
    writer = WandB()
    train(writer)
    assert writer.axes == {"laconic/step": None, "laconic/*": "laconic/step"}
    assert [data["laconic/step"] for data in writer.logged] == [2.0, 4.0, 5.0]


def test_a_function_gets_every_key() -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    train(lambda step, metrics: seen.append((step, metrics)))
    assert [step for step, _ in seen] == [2, 4, 5]
    assert all(list(metrics)[: len(KEYS)] == list(KEYS) for _, metrics in seen)


@pytest.mark.parametrize("kind", [str, Path])
def test_csv_of_a_run_and_of_one_that_goes_on(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    for _ in range(2):
        train(kind(path), method=laconic.LocalSGD())
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4", "5"] * 2
    assert list(rows[0])[: len(KEYS)] == list(KEYS)
    assert rows[0]["consensus_distance"] == rows[0]["method_variance"] == "", "not known yet"
    with pytest.raises(ValueError, match=r"metrics.csv has other columns than this run would write: name another file"):
        train(path, method=laconic.AllReduce())


def test_only_rank_0_writes_unless_told_otherwise(tmp_path: Path) -> None:
    def run() -> None:
        train(tmp_path / "first.csv" if rank() == 0 else None)
        train(tmp_path / "second.csv", rank=1)
        train(tmp_path / f"all-{rank()}.csv", rank=None)

    laconic.spawn(run, 2)
    assert sorted(os.listdir(tmp_path)) == ["all-0.csv", "all-1.csv", "first.csv", "second.csv"]
    assert all(len(path.read_text().splitlines()) == 4 for path in tmp_path.iterdir())


def test_a_dedicated_server_writes_too() -> None:
    def run() -> list[int]:
        model = build_model()
        optimizer = sgd(model)
        seen: list[int] = []
        with laconic.Worker(model, optimizer, laconic.EfficientAdam(server=0, dedicated=True)) as worker:
            laconic.track(worker, lambda step, metrics: seen.append(step), every=2)
            if worker.rank == 0:
                worker.serve()
            else:
                for step in range(4):
                    train_step(model, optimizer, 1, step)
        return seen

    assert laconic.spawn(run, 2) == [[2, 4], []]


def test_a_writer_that_raises_is_switched_off_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    calls, others = [], []

    def broken(step: int, metrics: dict[str, float]) -> None:
        calls.append(step)
        if step >= 4:
            raise ConnectionError("the tracker is down")

    model = build_model()
    optimizer = sgd(model)
    with caplog.at_level(logging.WARNING), laconic.Worker(model, optimizer, Silent()) as worker:
        laconic.track(worker, broken, every=2)
        laconic.track(worker, lambda step, metrics: others.append(step), every=2)
        for step in range(9):
            train_step(model, optimizer, 0, step)
    assert worker.step == 9
    assert calls == [2, 4]
    assert others == [2, 4, 6, 8, 9]
    (record,) = caplog.records
    assert record.name == "laconic"
    assert record.rank == 0  # type: ignore[attr-defined]
    assert record.getMessage() == (
        "rank 0, step 4: tracking is switched off, training goes on: the writer raised ConnectionError: the tracker is "
        "down"
    )


def test_a_full_disk_does_not_stop_training(tmp_path: Path) -> None:
    def run() -> tuple[int, list[str]]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))  # bytes of a file
        seen: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("laconic").addHandler(handler)
        return train(tmp_path / "metrics.csv", steps=9, every=1), seen

    ((steps, seen),) = laconic.spawn(run, 1)
    assert steps == 9
    (text,) = seen
    assert "tracking is switched off, training goes on: the writer raised OSError: [Errno 27] File too large" in text


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (None, "writer must be a SummaryWriter"),
        (3, "writer must be a SummaryWriter"),
        ("metrics.txt", r"a writer that is a path must end in .csv, not 'metrics.txt'"),
    ],
)
def test_bad_writers(writer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(writer)


def test_bad_arguments(tmp_path: Path) -> None:
    for options, message in [
        ({"every": 0}, "every must be a whole number, at least 1, not 0"),
        ({"rank": 1}, "rank must be a rank from 0 to 0, or None for all ranks, not 1"),
        ({"prefix": 3}, "prefix must be a text such as 'laconic/', not 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(print, **options)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        train(tmp_path / "file" / "metrics.csv")
    train(tmp_path / "new" / "folder" / "metrics.csv")
    assert (tmp_path / "new" / "folder" / "metrics.csv").exists()
    with pytest.raises(ValueError, match=r"worker must be a laconic\.Worker, not 3"):
        laconic.track(3, print)  # type: ignore[arg-type]
    model = build_model()
    with laconic.Worker(model, sgd(model), Silent()) as worker:
        pass
    with pytest.raises(ValueError, match="must be called inside the worker's block, and it has ended"):
        laconic.track(worker, print)
