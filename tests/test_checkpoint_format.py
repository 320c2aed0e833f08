"""Checkpoints written by earlier versions of laconic load and continue. See tests/fixtures/checkpoint.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

import laconic
from laconic.checkpoint import FORMAT
from tests.fixtures.checkpoint import FOLDER, STEPS, WORKERS, describe, train, worker_with_adam

GOLDEN = json.loads((FOLDER / "golden.json").read_text()) if FOLDER.exists() else {}


def resume(directory: Path) -> list[dict[str, Any]]:
    with worker_with_adam() as worker:
        assert worker.load(directory) == {"note": "halfway"}
        loaded = describe(worker)
        train(worker, STEPS)
        return [loaded, describe(worker)]


def numbers(state: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([[float.fromhex(value) for value in state[name]] for name in ("x", "exp_avg", "exp_avg_sq")])


def test_the_format_has_a_saved_checkpoint() -> None:
    assert GOLDEN, f"format {FORMAT} is new: run `python -m tests.fixtures.checkpoint` and commit what it writes"


def test_a_saved_checkpoint_loads_and_continues_as_it_did_when_it_was_written(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    for (loaded, end), (golden_loaded, golden_end) in zip(
        laconic.spawn(resume, WORKERS, tmp_path), GOLDEN["ranks"], strict=True
    ):
        assert loaded == golden_loaded, "what is loaded is what was saved, bit for bit"
        assert end["step"] == golden_end["step"] == STEPS
        assert end["calls"] == golden_end["calls"]
        # Another version of torch may round Adam's step differently in the last bit.
        if torch.__version__.split("+")[0] == GOLDEN["torch"]:
            assert end == golden_end
        else:
            torch.testing.assert_close(numbers(end), numbers(golden_end))
