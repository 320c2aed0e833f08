"""Whatever is edited in a checkpoint, it is refused on all ranks before anything has changed, or it trains."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from fuzz.checkpoint import METHODS, at, checksum, edited, rewrite, run
from laconic.compress import TopK
from tests.helpers import adam, build_model, train_step

METHOD = ("worker", "method")
FLIGHT = (*METHOD, "flights", 0)
GROUP = ("optimizer", "param_groups", 0)


def with_entry(value: Any) -> Any:
    """Returns a function that replaces a tensor's first entry."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[0] = value
        return changed

    return change


# Where, what the value there becomes, and what the error says. All are edits of rank 1's file alone.
EDITS: list[tuple[tuple[Any, ...], Any, str]] = [
    ((*GROUP, "lr"), lambda lr: -1e30, "lr must be a finite number from 0 to inf, not -1e"),
    ((*GROUP, "lr"), lambda lr: math.nan, "lr must be finite|lr must be a finite number"),
    ((*GROUP, "betas"), lambda betas: (1.5, 0.999), "Invalid beta parameter at index 0: 1.5"),
    ((*GROUP, "betas"), lambda betas: (0.9,), "betas must have 2 entries"),
    ((*GROUP, "amsgrad"), lambda flag: True, "amsgrad must be False as in this run"),
    ((*GROUP, "params"), lambda numbers: numbers[:-1], "parameter groups have other sizes"),
    (("optimizer", "state", 0, "exp_avg"), with_entry(math.nan), r"exp_avg must be finite|has NaN or infinity"),
    (("optimizer", "state", 0, "exp_avg_sq"), with_entry(-1.0), "exp_avg_sq must not be less than 0"),
    (("optimizer", "state", 0, "exp_avg"), lambda m: m[:-1], r"exp_avg must have the shape \(9, 6\), not \(8, 6\)"),
    (("optimizer", "state", 0), lambda entry: {"step": entry["step"]}, "must have 'exp_avg', 'exp_avg_sq'"),
    (("optimizer", "state"), lambda state: {**state, 99: state[0]}, "optimizer.state must be of the parameters"),
    (("model", "0.weight"), with_entry(math.inf), "model.0.weight must be finite"),
    (("model",), lambda model: {"0.weight": model["0.weight"]}, "model must have the entries"),
    (("random", "cpu"), lambda state: state[:-1], "must be the state of a random number generator"),
    (("extra",), lambda extra: 3, "extra must be a dict"),
    (("worker", "x"), with_entry(math.nan), "worker.x must be finite"),
    (("worker", "step"), lambda step: step + 1, "is of step 6, not 5"),
    ((*METHOD, "x_hat"), with_entry(7.0), "differ in state that must be the same on all ranks"),
    ((*METHOD, "next_entry"), lambda entry: 83, "next_entry must be a whole number from 0 to 82"),
    ((*METHOD, "stretch", "q"), with_entry(-1.0), "stretch.q must not be less than 0"),
    ((*METHOD, "stretch", "counts"), lambda counts: counts[:-1], "one count for each of 4 parameters"),
    ((*METHOD, "stretch"), lambda stretch: None, "stretch: the saved state must have the keys"),
    ((*FLIGHT, "piece"), lambda piece: [0, 10**6], r"piece\[1\] must be a whole number from 1 to 83"),
    ((*FLIGHT, "piece"), lambda piece: piece[::-1], "pieces that do not overlap|whole number"),
    ((*FLIGHT, "due"), lambda due: 0, "due must be a whole number from 6 to 7"),
    ((*FLIGHT, "answered"), lambda answered: 1, "answered must be a whole number from 0 to 0"),
    ((*FLIGHT, "codes", 0), lambda code: "log:4", "must be one of 'topk:0.3', not 'log:4'"),
    ((*FLIGHT, "transfers"), lambda transfers: [], "transfers must be a list of 1 entries"),
    ((*FLIGHT, "transfers", 0, "sent"), lambda sent: sent[:-1], "sent must be "),
    ((*FLIGHT, "transfers", 0, "arrived", 0), lambda code: torch.full_like(code, 200), "the code is damaged|finite"),
]


def refusals(directory: Path) -> list[str]:
    """Runs on each rank; returns the error of each edit, or what was wrong."""
    model = build_model()
    worker = laconic.Worker(model, adam(model), laconic.Divisible(8, 3, TopK(0.3), delay=2))
    for step in range(5):
        train_step(model, worker.optimizer, worker.rank, step)
    worker.save(directory / "whole")
    before = checksum(worker)
    texts = []
    for number, (place, change, _) in enumerate(EDITS):
        copy = directory / str(number)
        if worker.rank == 0:
            shutil.copytree(directory / "whole", copy)
            path = copy / "000001-step5" / "rank-00001.pt"
            content = torch.load(path, weights_only=True)
            rewrite(path, edited(content, place, change(at(content, place))))
        worker.comm.meet("edited")
        try:
            worker.load(copy)
        except ValueError as error:
            texts.append(str(error) if checksum(worker) == before else f"something has changed: {error}")
        else:
            texts.append("it was loaded")
            worker.load(directory / "whole")
    return texts


def test_every_edit_is_refused_by_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    first, second = laconic.spawn(refusals, 2, tmp_path)
    assert first == second
    failures = [
        f"{place}: expected {expected!r}, not {text!r}"
        for (place, _, expected), text in zip(EDITS, first, strict=True)
        if not re.search(expected, text) or text.startswith("something has changed")
    ]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", ["../../secret.pt", "/etc/passwd", "rank-00000.pt/../x", "rank-1.pt", 5, None])
def test_a_manifest_names_only_files_beside_it(tmp_path: Path, name: Any) -> None:
    model = build_model()
    worker = laconic.Worker(model, adam(model), laconic.LocalSGD(4))
    worker.save(tmp_path)
    path = tmp_path / "000001-step0" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][0]["file"] = name
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        ValueError, match=r"must name files such as rank-00000.pt beside it|is not a manifest of laconic"
    ):
        worker.load(tmp_path)


def test_a_method_that_fails_while_it_loads_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """On one rank only, and after model and optimizer are loaded: all ranks put everything back."""

    def refuse() -> tuple[str, bool]:
        model = build_model()
        worker = laconic.Worker(model, adam(model), laconic.LocalSGD(4))
        train_step(model, worker.optimizer, worker.rank, 0)
        worker.save(tmp_path)
        train_step(model, worker.optimizer, worker.rank, 1)
        before, load = checksum(worker), worker.method.load_state_dict
        if worker.rank == 1:

            def fail(saved: dict[str, Any]) -> None:
                worker.method.load_state_dict = load  # type: ignore[method-assign]
                raise RuntimeError("out of memory")

            worker.method.load_state_dict = fail  # type: ignore[method-assign]
        try:
            worker.load(tmp_path)
        except ValueError as error:
            return str(error), checksum(worker) == before
        return "", False

    for text, unchanged in laconic.spawn(refuse, 2):
        assert text == "rank 1: RuntimeError: out of memory"
        assert unchanged


def test_a_short_run_of_the_fuzzer_finds_nothing() -> None:
    counts, finds = run(seed=1, edits=12, seconds=60, methods=METHODS[1::3])
    assert not finds, "\n".join(finds)
    assert counts["refused"] > 15
