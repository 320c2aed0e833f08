"""The examples of docs/tracking.md for trackers run, with stand-ins for packages that are not installed."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import laconic
from tests.helpers import build_model, sgd, train_step
from tests.tracking.test_writers import MLflow, TensorBoard, WandB

PAGE = (Path(__file__).parent.parent.parent / "docs" / "tracking.md").read_text()
BLOCKS = re.findall(r"```python\n(?!>>> )(.*?)```", PAGE, re.DOTALL)


def block(word: str) -> str:
    (found,) = [text for text in BLOCKS if word in text]
    return found


def run(code: str, **names: object) -> None:
    """Runs a block of the page inside the block of a worker that trains."""
    model = build_model()
    optimizer = sgd(model)
    with laconic.Worker(model, optimizer, laconic.LocalSGD()) as worker:
        exec(code, {"worker": worker, "laconic": laconic, "torch": torch, "logging": logging, **names})
        for step in range(10):
            train_step(model, optimizer, 0, step)


def test_every_block_is_run_by_a_test_below() -> None:
    words = ["wandb", "SummaryWriter", "mlflow", "metrics.csv", "dashboard=8080", "StreamHandler"]
    assert sorted(map(block, words)) == sorted(BLOCKS)


def test_wandb() -> None:
    tracker = WandB()
    run(block("wandb"), wandb=SimpleNamespace(init=lambda project: tracker))
    assert tracker.logged[0]["laconic/bytes_foreground"] == 0.0


def test_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = TensorBoard()
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda folder: tracker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(torch.utils, "tensorboard", module, raising=False)
    run(block("SummaryWriter"))
    assert ("laconic/steps", 10.0, 10) in tracker.scalars


def test_mlflow() -> None:
    tracker = MLflow()
    module = SimpleNamespace(set_experiment=lambda name: None, log_metrics=tracker.log_metrics)
    run(block("mlflow"), mlflow=module)
    assert [step for step, _ in tracker.logged] == [10]


def test_files_and_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(block("metrics.csv"))
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.csv", "metrics-0.csv"}
    assert capsys.readouterr().out.startswith("10 0.")


def test_live_view() -> None:
    model = build_model()
    names = {"model": model, "optimizer": sgd(model), "laconic": laconic}
    exec(block("dashboard=8080").replace("8080", "0"), names)  # port 8080 may be taken
    assert names["worker"].dashboard.startswith("http://127.0.0.1:")  # type: ignore[attr-defined]


def test_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("laconic")
    monkeypatch.setattr(logger, "handlers", [])
    exec(block("StreamHandler"), {"logging": logging})
    logger.warning("a text")
    assert capsys.readouterr().err.endswith(" rank 0 WARNING a text\n")
