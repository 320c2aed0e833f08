"""Tests that when one rank fails or diverges, every rank gets an error that names it, and none hangs."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import cloudpickle
import pytest
import torch
from torch import nn

import laconic
from laconic.comm import connect
from laconic.launch import _environment, open_store
from tests.helpers import build_model, rank, train_step


def error_of(
    loop: Callable[[laconic.Worker], None], method: laconic.Method | None = None, timeout: float = 60.0
) -> str:
    """Runs a loop in a worker. Returns the error that the user of this rank reads."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with laconic.Worker(model, optimizer, method or laconic.LocalSGD(1), timeout=timeout) as worker:
            loop(worker)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "no error"


def train_steps(worker: laconic.Worker, number: int) -> None:
    for step in range(number):
        train_step(worker.model, worker.optimizer, worker.rank, step)


def test_an_exception_on_one_rank() -> None:
    def loop(worker: laconic.Worker) -> None:
        train_steps(worker, 3)
        if worker.rank == 1:
            raise KeyError("no such image")
        train_steps(worker, 1)

    first, culprit, third = laconic.spawn(error_of, 3, loop)
    assert culprit == "KeyError: 'no such image'"
    for text in (first, third):
        assert text.startswith("PeerError: rank ")
        assert "mean at step 4" in text
        assert "rank 1 failed at step 3: KeyError: 'no such image'" in text


def test_an_exception_on_one_rank_while_the_others_have_finished() -> None:
    def loop(worker: laconic.Worker) -> None:
        train_steps(worker, 3)
        if worker.rank == 1:
            raise KeyError("in the last lines")

    first, _, third = laconic.spawn(error_of, 3, loop)
    for text in (first, third):
        assert "the end of the worker at step 3" in text
        assert "rank 1 failed at step 3: KeyError" in text


def test_one_rank_leaves_early() -> None:
    def loop(worker: laconic.Worker) -> None:
        train_steps(worker, 2 if worker.rank == 1 else 4)

    first, early, third = laconic.spawn(error_of, 3, loop)
    for text in (first, third):
        assert text.startswith("PeerError")
        assert "mean at step 3" in text
        assert "rank 1 has been at the end of the worker since its step 2" in text
    assert early.startswith("PeerError: rank 1: the end of the worker at step 2 cannot complete: rank ")


def test_consensus_on_one_rank_only() -> None:
    def loop(worker: laconic.Worker) -> None:
        train_steps(worker, 1)
        if worker.rank == 0:
            with worker.consensus():
                pass
        train_steps(worker, 1)

    first, second = laconic.spawn(error_of, 2, loop)
    assert "rank 0 has been at consensus() since its step 1, and all ranks must come there" in second
    assert "consensus() at step 1 cannot complete" in first


def test_a_rank_that_finishes_sooner_and_goes_to_a_meeting_is_no_failure() -> None:
    """Rank 0 sends its part and goes to the meeting; the message takes seconds to reach the others, and arrives."""

    def run() -> float:
        comm = connect(torch.device("cpu"), 60.0)
        if comm.rank == 0:
            comm.broadcast(torch.ones(3))
            comm.meet("done")
            return 1.0
        if comm.rank == 1:
            time.sleep(3)  # in the broadcast tree of 4 ranks, rank 3 receives from rank 1
        value = comm.broadcast(torch.zeros(3))[0].item()
        comm.meet("done")
        return value

    assert laconic.spawn(run, 4) == [1.0] * 4


def test_ranks_at_different_meetings() -> None:
    def loop(worker: laconic.Worker) -> None:
        if worker.rank == 0:
            with worker.consensus():
                pass

    for text in laconic.spawn(error_of, 2, loop):
        assert "rank 0: consensus() (step 0); rank 1: the end of the worker (step 0)" in text


def test_nan_on_one_rank() -> None:
    def loop(worker: laconic.Worker) -> None:
        train_steps(worker, 2)
        if worker.rank == 2:
            worker.x[5] = float("nan")
        train_steps(worker, 1)

    for text in laconic.spawn(error_of, 4, loop):
        assert text == "FloatingPointError: mean at step 3: NaN or infinity on rank 2"
    for text in laconic.spawn(error_of, 4, loop, laconic.AllReduce()):
        assert "NaN or infinity on rank 2" in text


def test_a_rank_that_hangs() -> None:
    def loop(worker: laconic.Worker) -> None:
        train_steps(worker, 1)
        if worker.rank == 2:
            time.sleep(8)  # longer than the time-out and the roll call of the others
        train_steps(worker, 1)

    first, second, _ = laconic.spawn(error_of, 3, loop, None, 4.0)
    assert "mean at step 2" in first + second
    assert "rank 2" in first
    assert "rank 2" in second


def errors_of_survivors(victim: int, store_in_rank_0: bool) -> dict[int, str]:
    """Runs three ranks as `spawn` does, but without a launcher that ends the others when the victim is killed."""

    def loop(worker: laconic.Worker) -> None:
        train_steps(worker, 2)
        if worker.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        train_steps(worker, 1)

    store = open_store("127.0.0.1", 0)
    environments = [_environment(i, 3, 1, "127.0.0.1", store.port, "lo") for i in range(3)]
    if store_in_rank_0:
        del store
        for environment in environments:
            del environment["TORCHELASTIC_USE_AGENT_STORE"]
    context = mp.get_context("forkserver")
    results = context.SimpleQueue()
    job = cloudpickle.dumps(loop)
    processes = [context.Process(target=run_and_report, args=(e, job, results)) for e in environments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return dict(results.get() for _ in range(2))


def run_and_report(environment: dict[str, str], job: bytes, results: mp.SimpleQueue[tuple[int, str]]) -> None:
    os.environ.update(environment)
    results.put((rank(), error_of(cloudpickle.loads(job))))


def test_a_rank_is_killed() -> None:
    texts = errors_of_survivors(victim=1, store_in_rank_0=False)
    assert texts.keys() == {0, 2}
    for text in texts.values():
        assert text.startswith("PeerError")
        assert "step 3" in text
        assert "cannot complete: rank 1 died: its process ended" in text


def test_the_rank_that_holds_the_store_is_killed() -> None:
    texts = errors_of_survivors(victim=0, store_in_rank_0=True)
    assert texts.keys() == {1, 2}
    for text in texts.values():
        assert "mean at step 3" in text
        assert "rank 0 died" in text


# Differences between the ranks at the start ---------------------------------------------------------------------------


def start(build: Callable[[int], tuple[nn.Module, laconic.Method]]) -> str:
    try:
        model, method = build(rank())
        laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), method, timeout=20)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_different_settings() -> None:
    def build(mine: int) -> tuple[nn.Module, laconic.Method]:
        return build_model(), laconic.LocalSGD(8 if mine == 2 else 4)

    assert (
        laconic.spawn(start, 3, build)
        == ["ValueError: all ranks must agree on LocalSGD.period: 4 on rank 0, 1; 8 on rank 2"] * 3
    )


def test_different_methods() -> None:
    def build(mine: int) -> tuple[nn.Module, laconic.Method]:
        return build_model(), laconic.LocalSGD(4) if mine else laconic.AllReduce()

    assert (
        laconic.spawn(start, 2, build)
        == ["ValueError: all ranks must agree on method: AllReduce on rank 0; LocalSGD on rank 1"] * 2
    )


def test_different_models() -> None:
    def build(mine: int) -> tuple[nn.Module, laconic.Method]:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + mine)), laconic.AllReduce()

    difference = "1.weight (4, 4) torch.float32 on rank 0; 1.weight (5, 4) torch.float32 on rank 1"
    expected = f"ValueError: all ranks must agree on parameters[2]: {difference}"
    assert laconic.spawn(start, 2, build) == [expected] * 2


def test_different_versions() -> None:
    def build(mine: int) -> tuple[nn.Module, laconic.Method]:
        if mine:
            pytest.MonkeyPatch().setattr("laconic.agreement.__version__", "0.0.1")
        return build_model(), laconic.AllReduce()

    for text in laconic.spawn(start, 2, build):
        assert f"agree on laconic: {laconic.__version__} on rank 0; 0.0.1 on rank 1" in text


def test_a_bad_model_on_one_rank_is_reported_on_all() -> None:
    def build(mine: int) -> tuple[nn.Module, laconic.Method]:
        return build_model().requires_grad_(mine != 1), laconic.AllReduce()

    first, culprit, third = laconic.spawn(start, 3, build)
    assert culprit.startswith("ValueError: the model must have a trainable parameter")
    assert first == third
    assert first.startswith("ValueError: rank 1: ValueError: the model must have a trainable parameter")


def test_nan_in_the_parameters_of_one_rank() -> None:
    def build(mine: int) -> tuple[nn.Module, laconic.Method]:
        model = build_model()
        if mine == 1:
            nn.init.constant_(model.get_parameter("0.bias"), float("nan"))
        return model, laconic.AllReduce()

    for text in laconic.spawn(start, 2, build):
        assert text == "ValueError: parameters must be finite, and there are NaNs or infinities on rank 1"


def test_a_rank_that_comes_too_late_to_the_start() -> None:
    def run() -> str:
        import_module("laconic.comm.connect").ARRIVAL_SECONDS = 2.0  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo")
        time.sleep(4.5 * rank())
        return error_of(lambda worker: None, timeout=1.0)

    first, late = laconic.spawn(run, 2)
    assert first == "PeerError: rank 0: the start at step 0 waited 2 s for rank 1"
    assert late == f"PeerError: rank 1: the start cannot complete: {first.removeprefix('PeerError: ')}"


def test_a_rank_that_starts_later_than_the_time_out_of_a_step() -> None:
    def run() -> str:
        time.sleep(4.5 * rank())
        return error_of(lambda worker: train_steps(worker, 2), timeout=4.0)

    assert laconic.spawn(run, 2) == ["no error", "no error"]


@dataclass
class Fragile(laconic.Method):
    """A method whose setup fails on rank 1."""

    def setup(self, worker: laconic.Replica) -> None:
        if worker.comm.rank == 1:
            raise MemoryError("no room for the state")


def test_a_method_that_cannot_be_set_up_on_one_rank() -> None:
    first, culprit = laconic.spawn(error_of, 2, lambda worker: train_steps(worker, 1), Fragile())
    assert culprit == "MemoryError: no room for the state"
    assert "rank 1 failed at step 0: MemoryError: no room for the state" in first
