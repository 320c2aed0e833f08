"""What every method must keep. A new method is one row in CASES."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import laconic
from tests.helpers import OPTIMIZERS, batch, build_model, rank, train, train_alone, train_step

# One deterministic instance of each, with settings that make it act within a few steps.
CASES: dict[str, laconic.Method] = {
    "allreduce": laconic.AllReduce(),
    "local_sgd": laconic.LocalSGD(period=3, moments="averaged"),
    "qsgd": laconic.QSGD(),
    "adpsgd": laconic.ADPSGD(initial_period=2, warmup=2, calibration=2),
    "efficient_adam": laconic.EfficientAdam(exact_below=10, moments="averaged", moments_every=4),
    "divisible": laconic.Divisible(ratio=8, period=3, background=None, delay=2),
    "a2cid2": laconic.A2CiD2(topology="ring", rate=1.0, background=False),
}
# Methods that lose nothing: the mean of the models moves by exactly the mean of the own steps.
LOSSLESS = ["allreduce", "local_sgd", "adpsgd", "divisible", "a2cid2"]


def test_every_method_is_here() -> None:
    assert CASES.keys() == laconic.METHODS.keys()
    assert all(type(case) is laconic.METHODS[name] for name, case in CASES.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_one_worker_alone_is_the_plain_optimizer(name: str, optimizer: str) -> None:
    path = train(CASES[name], OPTIMIZERS[optimizer], 12)
    alone = train_alone(OPTIMIZERS[optimizer], 12)
    assert all(torch.equal(x, y) for x, y in zip(path, alone, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_all_start_from_rank_0_and_end_with_the_same_model(name: str) -> None:
    def run() -> tuple[Tensor, Tensor]:
        model = build_model(seed=rank())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        with laconic.Worker(model, optimizer, CASES[name]) as worker:
            start = worker.x.clone()
            for step in range(5):
                train_step(model, optimizer, worker.rank, step)
        return start, worker.x

    results = laconic.spawn(run, 3)
    first = torch.cat([p.reshape(-1) for p in build_model(seed=0).parameters()])
    assert all(torch.equal(start, first) for start, _ in results)
    assert all(torch.equal(end, results[0][1]) for _, end in results)


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_mean_moves_by_the_mean_of_the_own_steps(name: str) -> None:
    """With plain SGD and gradients that do not depend on x, the own steps are known beforehand."""

    def run() -> tuple[Tensor, Tensor]:
        model = nn.Linear(30, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, CASES[name]) as worker:
            start, moved = worker.x.clone(), torch.zeros(30)
            for step in range(11):
                gradient = torch.randn(30, generator=torch.Generator().manual_seed(50 * step + worker.rank))
                moved -= 0.1 * gradient
                (model.weight * gradient).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return moved, worker.x - start

    results = laconic.spawn(run, 4)
    expected = torch.stack([moved for moved, _ in results]).mean(dim=0)
    for _, difference in results:
        torch.testing.assert_close(difference, expected, rtol=1e-5, atol=1e-6)


def continue_from(directory: Path, name: str, optimizer: str, steps: int, resume: bool) -> list[Tensor]:
    model = build_model(seed=17 + rank())
    optimizer_ = OPTIMIZERS[optimizer](model)
    path = []
    with laconic.Worker(model, optimizer_, CASES[name]) as worker:
        if resume:
            assert worker.load(directory) == {"note": "halfway"}
        for step in range(worker.step, worker.step + steps):
            train_step(model, optimizer_, worker.rank, step)
            path.append(worker.x.clone())
            if worker.step == 5 and not resume:
                worker.save(directory, {"note": "halfway"})
    return [*path, worker.x.clone()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_resumed_in_new_processes_it_goes_on_bit_for_bit(tmp_path: Path, name: str, optimizer: str) -> None:
    whole = laconic.spawn(continue_from, 2, tmp_path, name, optimizer, 12, False)
    resumed = laconic.spawn(continue_from, 2, tmp_path, name, optimizer, 7, True)
    for rank_, path in enumerate(resumed):
        assert all(torch.equal(x, y) for x, y in zip(path, whole[rank_][5:], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_consensus_in_the_middle_changes_nothing(name: str) -> None:
    def run(look: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        path, seen = [], []
        with laconic.Worker(model, optimizer, CASES[name]) as worker:
            for step in range(7):
                nn.functional.mse_loss(model(batch(worker.rank, step)[0]), batch(worker.rank, step)[1]).backward()
                if look:
                    with worker.consensus() as agreed, torch.no_grad():
                        agreed.eval()
                        seen.append(agreed(batch(0, 99)[0]))
                        agreed.train()
                        agreed(batch(0, 98)[0])  # moves the running statistics of the agreed model only
                optimizer.step()
                optimizer.zero_grad()
                path.append(torch.cat([worker.x, model[1].running_mean]))
        return [*path, torch.cat([worker.x, model[1].running_mean])], seen

    without, within = laconic.spawn(run, 2, False), laconic.spawn(run, 2, True)
    for (expected, _), (path, seen) in zip(without, within, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(path, expected, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(seen, within[0][1], strict=True)), (
            "every rank lends the same model"
        )
