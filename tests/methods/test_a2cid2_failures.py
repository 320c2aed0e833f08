"""Workers that are killed, stopped or cut off are dropped by rank; the others continue and agree on a model."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic import topology
from laconic.comm.pairing import Pairing
from laconic.emulate import EmulationError, hosts_behind

STEPS = 60


def run_worker(
    accident: Callable[[laconic.Worker], None],
    graph: topology.Topology | str,
    timeout: float,
    directory: Path | None = None,
) -> dict[str, Any]:
    """Trains for STEPS steps; `accident` is called at step 10, early enough for all workers to notice it."""
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(20, 3), norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    result: dict[str, Any] = {"error": "", "distance": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            method = laconic.A2CiD2(graph, rate=0.5, slack=4)
            with laconic.Worker(model, optimizer, method, timeout=timeout) as worker:
                for step in range(STEPS):
                    time.sleep(0.005)
                    model(torch.randn(8, 20)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if step == 10:
                        accident(worker)
                with worker.consensus():
                    result["members"] = worker.comm.members
                if directory is not None:
                    worker.save(directory)
                    result["x_saved"] = worker.x.clone()
        except laconic.PeerError as error:
            result["error"] = str(error)
    assert norm.running_mean is not None
    assert isinstance(worker.method, laconic.A2CiD2)
    result |= {"x": worker.x.clone(), "bn": norm.running_mean.clone(), "nodes": worker.method._graph.nodes}
    result["warnings"] = [str(warning.message) for warning in caught]
    return result


def check_survivors(results: list[Any], survivors: list[int], lost: int) -> None:
    first: Tensor = results[survivors[0]]["x"]
    for rank in survivors:
        result = results[rank]
        assert result["error"] == ""
        assert torch.equal(result["x"], first)
        assert torch.equal(result["bn"], results[survivors[0]]["bn"])
        assert torch.isfinite(first).all()
        assert result["members"] == survivors
        assert result["nodes"] == tuple(survivors)
        named = [text for text in result["warnings"] if text.startswith(f"rank {lost} was dropped, the others go on")]
        assert len(named) == 1


def test_one_of_four_is_killed() -> None:
    def accident(worker: laconic.Worker) -> None:
        if worker.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    results = laconic.spawn(run_worker, 4, accident, topology.ring(4), 5.0, spare_survivors=True)
    assert str(results[2]) == "worker 2 of 4 failed: killed by SIGKILL"
    check_survivors(results, [0, 1, 3], lost=2)


def test_one_of_three_is_stopped_for_longer_than_the_timeout() -> None:
    def accident(worker: laconic.Worker) -> None:
        if worker.rank == 0:
            subprocess.Popen(["sh", "-c", f"sleep 11; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    results = laconic.spawn(run_worker, 3, accident, topology.ring(3), 3.0, spare_survivors=True)
    check_survivors(results, [1, 2], lost=0)
    assert results[0]["error"].startswith("rank 0 was dropped, the others go on without it: no ")


def test_an_exception_on_one_of_three_and_a_checkpoint_of_the_others(tmp_path: Path) -> None:
    def accident(worker: laconic.Worker) -> None:
        if worker.rank == 1:
            raise laconic.PeerError("no such image")

    def resume() -> Tensor:
        model = nn.Sequential(nn.Linear(20, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with laconic.Worker(model, optimizer, laconic.A2CiD2("ring", rate=0.5, slack=4)) as worker:
            worker.load(tmp_path)
            assert worker.step == STEPS
            return worker.x.clone()

    results = laconic.spawn(run_worker, 3, accident, "ring", 30.0, tmp_path, spare_survivors=True)
    check_survivors(results, [0, 2], lost=1)
    for x, survivor in zip(laconic.spawn(resume, 2), (0, 2), strict=True):
        assert torch.equal(x, results[survivor]["x_saved"])
    assert results[1]["error"] == "no such image"
    assert any("no such image" in text for text in results[0]["warnings"])


@pytest.mark.parametrize("where", ["consensus()", "the end"])
def test_the_first_of_four_hosts_is_killed_while_models_are_averaged(where: str) -> None:
    """Rank 0 dies after the others have started to average with it. They repeat that without it."""

    def run() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(20_000, 2), nn.BatchNorm1d(2))  # the mean of this goes over gloo
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        result: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="rank 0 was dropped")
            with laconic.Worker(model, optimizer, laconic.A2CiD2("ring", rate=0.5), timeout=30) as worker:
                for _ in range(8):
                    model(torch.randn(8, 20_000)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if worker.rank == 0:
                    worker._control.mean = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
                if where == "consensus()":
                    with worker.consensus():
                        result |= {"averaged": worker.x.clone(), "members": worker.comm.members}
        return result | {"x": worker.x.clone(), "finally": worker.comm.members}

    try:
        with hosts_behind("1gbit", 4) as hosts:
            killed, *survivors = laconic.spawn(run, 4, hosts=hosts, spare_survivors=True)
    except EmulationError as error:
        pytest.skip(str(error))
    assert str(killed) == "worker 0 of 4 failed: killed by SIGKILL"
    for result in survivors:
        assert isinstance(result, dict), result
        assert result["finally"] == [1, 2, 3]
        assert torch.equal(result["x"], survivors[0]["x"])
        if where == "consensus()":
            assert result["members"] == [1, 2, 3]
            assert torch.equal(result["averaged"], survivors[0]["averaged"])


def test_a_disconnected_graph_raises_on_the_smaller_side() -> None:
    def accident(worker: laconic.Worker) -> None:
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    path = topology.from_edges([(0, 1), (1, 2), (2, 3)])
    results = laconic.spawn(run_worker, 4, accident, path, 5.0, spare_survivors=True)
    check_survivors(results, [2, 3], lost=1)
    assert "without rank 1" in results[0]["error"]
    assert "the graph is disconnected, and the workers [0] have no path to [2, 3], which go on" in results[0]["error"]
    assert any(text.startswith("rank 0 was dropped") for text in results[3]["warnings"])


def test_a_worker_that_fails_while_another_one_still_starts_is_dropped() -> None:
    """A rank that had not begun to gossip took the loss of another one for the end of the job."""

    def run() -> dict[str, Any]:
        def accident(worker: laconic.Worker) -> None:
            if worker.rank == 1:
                raise laconic.PeerError("an accident")

        with pytest.MonkeyPatch.context() as patch:
            if int(os.environ["RANK"]) == 0:
                patch.setattr("laconic.comm.distributed.Pairing", start_late)
            return run_worker(accident, topology.ring(3), 10.0)

    def start_late(*args: Any) -> Pairing:
        time.sleep(1.0)
        return Pairing(*args)

    check_survivors(laconic.spawn(run, 3), [0, 2], lost=1)
