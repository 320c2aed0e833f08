"""A checkpoint of n workers continues with m: every mode of every method, from 4 workers to 2, to 3, and to 4 again."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from tests.helpers import adam, batch, train_step
from tests.test_conformance import ROWS, Row, loss_of, model_with_statistics

SIZES = (4, 2, 3, 4)
STEPS = 5
# A server must be one of the ranks, in the smallest run too.
POSSIBLE = [
    row for row in ROWS if not isinstance(row.method, laconic.EfficientAdam) or row.method.server in ("sharded", 0)
]


@dataclass
class Stage:
    """What one rank has seen of a row in a run of one size."""

    loaded: dict[str, Tensor]  # just after loading
    saved: dict[str, Tensor]  # just before saving
    end: Tensor  # x after the block, which is the average with everything in flight
    loss: float


def quantities(worker: laconic.Worker) -> dict[str, Tensor]:
    """Returns what must be kept: by "mean_", as its mean over workers; by "sum_", as its sum over ranks."""
    method: Any = worker.method
    found = {"mean_worker_step": torch.tensor(float(worker.step))}
    if worker.method.trains(worker.rank):
        for name in ("residual", "e"):
            if getattr(method, name, None) is not None:
                found[f"mean_{name}"] = getattr(method, name).clone()
        state = worker.optimizer.state_dict()["state"]
        for name in ("exp_avg", "exp_avg_sq", "step"):
            found[f"mean_{name}"] = torch.cat(
                [state[i][name].reshape(-1).clone() for i in sorted(state)] or [torch.zeros(0)]
            )
    if isinstance(method, laconic.LocalSGD | laconic.ADPSGD):
        found["mean_anchor"] = method.anchor.double()
    for name in ("owner_residual", "e_server"):
        vector = getattr(method, name, None)
        # Messages in flight, which are applied, change it.
        in_flight = isinstance(method, laconic.Divisible | laconic.DiLoCo | laconic.EfficientAdam) and method.delay
        if vector is not None and not in_flight:
            found[f"sum_{name}"] = torch.stack([vector.double().sum(), vector.double().square().sum()])
    return found


def run_stage(row: Row, directory: Path, resume: bool, steps: int) -> Stage:
    model = model_with_statistics(0)
    optimizer = adam(model)
    with laconic.Worker(model, optimizer, row.method) as worker:
        if resume:
            assert worker.load(directory) == {"note": 7}
        loaded = {"x": worker.x.clone(), **quantities(worker)}
        if worker.method.trains(worker.rank):
            while worker.step < steps:
                x, y = batch(worker.rank, worker.step)
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            worker.serve()
        saved = quantities(worker)
        worker.save(directory, {"note": 7})
    return Stage(loaded, saved, worker.x.clone(), loss_of(model))


def run_rows(directory: Path, resume: bool, steps: int) -> dict[str, Stage]:
    found = {}
    for i, row in enumerate(POSSIBLE):
        try:
            found[row.name] = run_stage(row, directory / str(i), resume, steps)
        except BaseException as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"in the row {row.name!r}")
            raise
    return found


def over_ranks(stages: list[dict[str, Tensor]], name: str) -> Tensor:
    values = [stage[name].double() for stage in stages if name in stage]
    return torch.stack(values).sum(0) / (len(values) if name.startswith("mean_") else 1)


@pytest.mark.timeout(400)  # trains all rows in four runs
def test_every_method_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    runs = [laconic.spawn(run_rows, size, tmp_path, i > 0, (i + 1) * STEPS) for i, size in enumerate(SIZES)]
    failures = []
    for row in POSSIBLE:
        stages = [[ranks[row.name] for ranks in run] for run in runs]
        for i in range(1, len(SIZES)):
            before, after = stages[i - 1], stages[i]
            where = f"{row.name}, from {SIZES[i - 1]} to {SIZES[i]}"
            if not all(torch.equal(stage.loaded["x"], after[0].loaded["x"]) for stage in after):
                failures.append(f"{where}: the new workers start from different parameters")
            if not torch.allclose(after[0].loaded["x"], before[0].end, rtol=1e-5, atol=1e-6):
                failures.append(f"{where}: they do not start from the average of the saved ones")
            names = sorted({name for stage in before for name in stage.saved} & {n for s in after for n in s.loaded})
            failures += [
                f"{where}: {name} is not kept"
                for name in names
                if not torch.allclose(
                    over_ranks([stage.saved for stage in before], name),
                    over_ranks([stage.loaded for stage in after], name),
                    rtol=1e-5,
                    atol=1e-7,
                )
            ]
        losses = [stage[0].loss for stage in stages]
        if not losses[-1] < losses[0]:
            failures.append(f"{row.name}: the loss has not gone on falling: {losses}")
    assert not failures, "\n".join(failures)


def test_random_numbers_of_new_ranks_are_their_own(tmp_path: Path) -> None:
    """Ranks that share a stream would draw the same dropout and the same order of data."""

    def save() -> None:
        model = model_with_statistics(0)
        worker = laconic.Worker(model, adam(model), laconic.LocalSGD(2))
        torch.manual_seed(100 + worker.rank)
        train_step(model, worker.optimizer, worker.rank, 0)
        worker.save(tmp_path)

    def load() -> float:
        model = model_with_statistics(0)
        worker = laconic.Worker(model, adam(model), laconic.LocalSGD(2))
        torch.manual_seed(200 + worker.rank)
        worker.load(tmp_path)
        return torch.rand(1).item()

    laconic.spawn(save, 2)
    drawn = laconic.spawn(load, 3)
    assert len(set(drawn)) == 3


@dataclass
class Unsaid(laconic.Method):
    """Has state that differs between ranks, and does not say how it is merged."""

    mine: int = laconic.state(0)

    def setup(self, worker: laconic.Replica) -> None:
        self.mine = 2 * worker.comm.rank


@dataclass
class Said(Unsaid):
    mine: int = laconic.state(0, merge="mean")


def test_a_method_of_the_user_that_does_not_say_how_is_refused(tmp_path: Path) -> None:
    def worker_of(method: laconic.Method) -> laconic.Worker:
        model = model_with_statistics(0)
        return laconic.Worker(model, adam(model), method)

    def save() -> None:
        for kind in (Unsaid, Said):
            worker_of(kind()).save(tmp_path / kind.__name__)

    laconic.spawn(save, 2)
    with pytest.raises(ValueError, match=r"Unsaid.mine differs between the ranks of the checkpoint and does not say"):
        worker_of(Unsaid()).load(tmp_path / "Unsaid")
    worker = worker_of(Said())
    worker.load(tmp_path / "Said")
    assert worker.method.state_dict() == {"mine": 1}
