"""A2CiD2 on real processes: against the oracle, the mean under asynchrony, the rate, checkpoints, settings, NaN."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic import topology
from laconic.emulate import EmulationError, hosts_behind
from laconic.methods.gossip_rate import due_exchanges
from tests.helpers import OPTIMIZERS, train
from tests.oracles.a2cid2 import a2cid2

D = 40


@pytest.mark.parametrize(
    ("workers", "name", "rate", "momentum", "optimizer"),
    [(4, "ring", 1.0, True, "sgd"), (3, "complete", 0.3, True, "adam"), (5, "exponential", 2.0, False, "sgd")],
)
def test_the_deterministic_mode_agrees_with_the_oracle(
    workers: int, name: str, rate: float, momentum: bool, optimizer: str
) -> None:
    steps = 15
    method = laconic.A2CiD2(name, rate=rate, momentum=momentum, background=False)
    paths = laconic.spawn(train, workers, method, OPTIMIZERS[optimizer], steps)
    expected = a2cid2(OPTIMIZERS[optimizer], topology.named(name, workers), steps, rate, momentum)
    for step in range(steps):
        for worker in range(workers):
            torch.testing.assert_close(paths[worker][step], expected[step][worker], rtol=1e-4, atol=1e-5)
    mean = torch.stack(expected[-1]).mean(dim=0)
    for path in paths:
        torch.testing.assert_close(path[-1], mean, rtol=1e-4, atol=1e-5)


def local_step(model: nn.Linear, optimizer: torch.optim.Optimizer, rank: int, step: int) -> Tensor:
    """Makes a step with a gradient that does not depend on x, and returns the change of x."""
    gradient = torch.randn(D, generator=torch.Generator().manual_seed(7919 * step + rank))
    (model.weight * gradient).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return -0.1 * gradient


def run_worker(
    method: laconic.A2CiD2, steps: int, seconds: float = 0.0, directory: Path | None = None
) -> dict[str, Any]:
    """Trains on random gradients; returns the sum of local steps and the change of the averaged model."""
    model = nn.Linear(D, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.Worker(model, optimizer, method) as worker:
        start, steps_sum = worker.x.clone(), torch.zeros(D)
        if directory is not None and directory.exists():
            extra = worker.load(directory)
            start, steps_sum = extra["start"], extra["steps_sum"]
            steps *= 2
        while worker.step < steps:
            time.sleep(seconds * (1 + worker.rank % 2))  # workers of different speed
            steps_sum += local_step(model, optimizer, worker.rank, worker.step)
        if directory is not None and not directory.exists():
            worker.save(directory, {"start": start, "steps_sum": steps_sum})
            # The first run continues for a while; its steps after saving must not affect the resumed run.
            for step in range(3):
                local_step(model, optimizer, worker.rank, step)
    assert isinstance(worker.method, laconic.A2CiD2)
    partners = torch.tensor([worker.method.partners[peer] for peer in range(worker.size)])
    return {
        "steps_sum": steps_sum,
        "change": worker.x - start,
        "partners": partners,
        "meter": worker.meter.total,
        "exchanges": worker.method.exchanges,
    }


def check_the_mean(results: list[dict[str, Any]]) -> None:
    mean = torch.stack([result["steps_sum"] for result in results]).mean(dim=0)
    for result in results:
        error = (result["change"] - mean).abs().max() / mean.abs().max()
        assert error < 3e-6, "1e-6 relative, plus the rounding of the sums in this test"


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_the_mean_is_kept_by_asynchronous_processes(workers: int) -> None:
    # Fewer cases with many workers, which wait long for each other on two cores.
    names = topology.TOPOLOGIES if workers < 5 else ("ring", "exponential")
    methods = [laconic.A2CiD2(name, rate=1.0) for name in names]
    if workers < 5:
        methods += [laconic.A2CiD2("ring", rate="auto"), laconic.A2CiD2("ring", rate=2, momentum=False)]

    def run() -> list[dict[str, Any]]:
        return [run_worker(method, steps=16, seconds=0.002) for method in methods]

    for method, results in zip(methods, zip(*laconic.spawn(run, workers), strict=True), strict=True):
        check_the_mean(list(results))
        made = torch.stack([result["partners"] for result in results])
        assert torch.equal(made, made.T)
        edges = topology.named(str(method.topology), workers).edges
        assert all((min(pair), max(pair)) in edges for pair in made.nonzero().tolist())
        for rank, result in enumerate(results):
            exchanges = int(result["partners"].sum())
            assert exchanges >= 1
            if method.rate != "auto":
                due = sum(due_exchanges(method.rate, rank, step + 1) for step in range(16))
                assert exchanges >= due - method.rate * method.slack
            assert result["meter"].nbytes("background") == exchanges * (4 * D + 44)


def test_the_mean_is_kept_after_resuming(tmp_path: Path) -> None:
    """In new processes, the averaged model contains all local steps before and after the checkpoint."""
    method = laconic.A2CiD2("ring", rate=1.0)
    laconic.spawn(run_worker, 3, method, 12, 0.002, tmp_path / "checkpoint")
    saved = [torch.load(path) for path in sorted(tmp_path.rglob("rank-*.pt"))]
    results = laconic.spawn(run_worker, 3, method, 12, 0.002, tmp_path / "checkpoint")
    check_the_mean(results)
    for rank, result in enumerate(results):
        before = saved[rank]["worker"]["method"]["exchanges"]
        due = [due_exchanges(1.0, rank, step + 1) for step in range(24)]
        assert before >= sum(due[:12]) - method.slack
        assert result["exchanges"] == before + result["partners"].sum()
        assert result["exchanges"] >= sum(due) - method.slack


def test_the_rate_is_met() -> None:
    planned = {0.25: 1000, 1.0: 1000, 2.0: 500}  # steps

    def run() -> list[int]:
        return [run_worker(laconic.A2CiD2("ring", rate), steps, 0.0002)["exchanges"] for rate, steps in planned.items()]

    results = laconic.spawn(run, 2)
    for i, (rate, steps) in enumerate(planned.items()):
        due = [sum(due_exchanges(rate, rank, step + 1) for step in range(steps)) for rank in range(2)]
        # Two workers make their exchanges together, so that both make as many as the one with more of them due.
        for made in results:
            assert max(due) - rate * 8 <= made[i] <= max(due) + 8


def test_every_edge_is_used_on_a_slow_link(tmp_path: Path) -> None:
    """Both ends of a long exchange become free at the same moment, and must not take each other again."""

    def run() -> dict[str, float]:
        model = nn.Linear(200_000, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        deadline = time.monotonic() + 60
        with laconic.Worker(model, optimizer, laconic.A2CiD2("ring"), timeout=60) as worker:
            while len(list(tmp_path.iterdir())) < 4:  # a rank that ends early would no longer answer the others
                assert time.monotonic() < deadline, f"rank {worker.rank}: {worker.method.metrics()}"
                time.sleep(0.008)
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
                if worker.method.metrics()["exchanges"] >= 12:
                    (tmp_path / str(worker.rank)).touch()
            return worker.method.metrics()

    try:
        with hosts_behind("100mbit", 4) as hosts:
            results = laconic.spawn(run, 4, hosts=hosts)
    except EmulationError as error:
        pytest.skip(str(error))
    for result in results:
        assert result["smallest_edge_share"] >= 0.5


def test_gossip_and_meetings_leave_no_keys_in_the_store() -> None:
    def run() -> list[int]:
        model = nn.Linear(D, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keys = []
        with laconic.Worker(model, optimizer, laconic.A2CiD2("ring", rate=2.0)) as worker:
            for _ in range(4):
                for step in range(20):
                    local_step(model, optimizer, worker.rank, step)
                    with worker.consensus():
                        pass
                worker.comm.meet("all are here")
                keys.append(torch.distributed.distributed_c10d._get_default_store().num_keys())
                worker.comm.meet("all have counted")
        return keys

    for keys in laconic.spawn(run, 2):
        # Wake-ups that are on their way, and keys of the last two meetings, may be there or not.
        assert max(keys) - min(keys) <= 8


def test_a_worker_that_is_slower_or_finishes_early_still_answers() -> None:
    def run() -> dict[str, Any]:
        slow = int(os.environ["RANK"]) == 0
        return run_worker(
            laconic.A2CiD2("ring", rate=1.0, slack=4), steps=12 if slow else 60, seconds=0.008 if slow else 0.001
        )

    results = laconic.spawn(run, 4)
    check_the_mean(results)
    for rank, result in enumerate(results):
        due = sum(due_exchanges(1.0, rank, step + 1) for step in range(12 if rank == 0 else 60))
        assert result["partners"].sum() >= due - 4


def test_consensus_distance() -> None:
    def run() -> tuple[float | None, Tensor, float | None]:
        model = nn.Linear(D, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, laconic.A2CiD2("ring", rate=0.01)) as worker:
            before = worker.consensus_distance
            local_step(model, optimizer, worker.rank, 0)
            x = worker.x.clone()
            with worker.consensus():
                pass
        assert worker.state_dict()["step"] == 1, "state_dict() must work after the worker is closed"
        return before, x, worker.consensus_distance

    results = laconic.spawn(run, 3)
    x = torch.stack([x for _, x, _ in results])
    for before, _, distance in results:
        assert before is None
        assert distance == pytest.approx((x - x.mean(dim=0)).norm().item() / 3**0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"topology": "rign"}, "no topology is called 'rign'; did you mean ring"),
        ({"topology": 4}, "topology must be a name or a laconic.topology.Topology, not 4"),
        ({"rate": 0}, 'or "auto"\\) must be a finite number above 0 and at most 1000, not 0'),
        ({"rate": -1.0}, "not -1.0"),
        ({"rate": "often"}, "not 'often'"),
        ({"rate": float("nan")}, "not nan"),
        ({"momentum": 1}, "momentum must be True or False, not 1"),
        ({"background": None}, "background must be True or False, not None"),
        ({"slack": 0}, "slack must be a whole number, at least 1, not 0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        laconic.A2CiD2(**settings)


def test_a_topology_of_another_size() -> None:
    def run() -> None:
        model = nn.Linear(2, 1)
        laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), laconic.A2CiD2(topology.ring(4)))

    with pytest.raises(laconic.WorkerFailed, match="nodes 0 to 1, one for each of 2 workers, not"):
        laconic.spawn(run, 2)


def test_nan_is_not_sent_to_other_workers() -> None:
    def run() -> str:
        try:
            return str(torch.isfinite(run_with_nan()).all().item())
        except FloatingPointError as error:
            return str(error)

    def run_with_nan() -> Tensor:
        model = nn.Linear(D, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            warnings.catch_warnings(),
            laconic.Worker(model, optimizer, laconic.A2CiD2(rate=1.0), timeout=20) as worker,
        ):
            warnings.simplefilter("ignore")
            for step in range(30):
                if worker.rank == 1 and step == 5:
                    worker.x[3] = float("nan")
                time.sleep(0.003)
                local_step(model, optimizer, worker.rank, step)
        return worker.x

    first, second, third = laconic.spawn(run, 3)
    assert (first, third) == ("True", "True")
    assert second.startswith("rank 1: the parameters contain NaN or infinity after step ")
