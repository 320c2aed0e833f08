"""Ranks without data: worker.serve(), and the errors for its wrong use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.method import Replica
from tests.helpers import batch

SERVER = 0


@dataclass
class MeanOverTrainers(laconic.Method):
    """Averages x over the ranks but 0, which has no data. Rank 1 announces to it each step and pause."""

    paused: bool = laconic.state(False)

    def trains(self, rank: int) -> bool:
        return rank != SERVER

    def before_step(self, worker: Replica) -> None:
        if self.trains(worker.comm.rank):
            worker.comm.broadcast(torch.ones(1), root=1)

    def await_step(self, worker: Replica) -> bool:
        self.paused = not worker.comm.broadcast(torch.empty(1), root=1).item()
        return not self.paused

    def after_step(self, worker: Replica) -> None:
        n, sends = worker.comm.size, self.trains(worker.comm.rank)
        worker.x.copy_(worker.comm.mean(worker.x if sends else 0 * worker.x) * (n / (n - 1)))

    def pause(self, worker: Replica) -> None:
        if self.trains(worker.comm.rank):
            worker.comm.broadcast(torch.zeros(1), root=1)
        elif not self.paused and self.await_step(worker):
            raise RuntimeError("the others train: call worker.serve()")
        self.paused = False


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(worker: laconic.Worker, steps: int) -> None:
    for step in range(steps):
        x, y = batch(worker.rank, worker.step + step)
        nn.functional.mse_loss(worker.model(x), y).backward()
        worker.optimizer.step()
        worker.optimizer.zero_grad()


def test_a_rank_without_data_serves_until_the_others_pause(tmp_path: Path) -> None:
    def run() -> tuple[list[Tensor], int, list[Tensor]]:
        model, optimizer = build()
        with laconic.Worker(model, optimizer, MeanOverTrainers()) as worker:
            for _ in range(2):
                if worker.rank == SERVER:
                    worker.serve()
                else:
                    train(worker, 3)
                with worker.consensus():
                    agreed = [buffer.clone() for buffer in model.buffers()]
            worker.save(tmp_path)
            own = [buffer.clone() for buffer in model.buffers()]
        return [worker.x, *agreed], worker.step, own

    results = laconic.spawn(run, 3)
    for agreed, step, _ in results:
        assert step == 6
        assert all(torch.equal(a, b) for a, b in zip(agreed, results[0][0], strict=True))
    mean = [(a + b) / 2 for a, b in zip(results[1][2], results[2][2], strict=True)]
    # The server's own running statistics do not count.
    for a, b in zip(results[0][0][1:], mean, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("a trainer serves", "rank 1 trains"),
        ("the server steps", r"call worker.serve\(\), not optimizer.step\(\)"),
        ("the server does not serve", "the others train"),
        ("inside consensus", r"not be called inside consensus\(\)"),
    ],
)
def test_mistakes_raise(mistake: str, message: str) -> None:
    def run() -> None:
        model, optimizer = build()
        with laconic.Worker(model, optimizer, MeanOverTrainers()) as worker:
            if mistake == "inside consensus":
                with worker.consensus():
                    worker.serve() if worker.rank == SERVER else train(worker, 1)
            if worker.rank == SERVER and mistake == "the server steps":
                optimizer.step()
            if worker.rank != SERVER:
                worker.serve() if mistake == "a trainer serves" else train(worker, 3)

    with pytest.raises(laconic.WorkerFailed, match=message):
        laconic.spawn(run, 2)


def test_other_methods_have_no_rank_without_data() -> None:
    model, optimizer = build()
    with laconic.Worker(model, optimizer, laconic.AllReduce()) as worker, pytest.raises(RuntimeError, match="trains"):
        worker.serve()
