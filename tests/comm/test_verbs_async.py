"""Tests asynchronous verbs: several in flight, uneven lengths, exact bytes."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.comm import Comm, Solo
from laconic.comm.register import Register
from laconic.comm.work import wait_for
from tests.comm.conftest import Launch


def in_a_worker(fn: Any) -> Any:
    """Returns a function that calls fn(comm) in a worker that has nothing else to do."""

    def run() -> Any:
        model = nn.Linear(1, 1)
        with laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), laconic.LocalSGD(1000)) as worker:
            return fn(worker.comm)

    return run


def test_several_may_be_in_flight_and_inputs_may_be_overwritten(launch: Launch) -> None:
    def run(comm: Comm) -> tuple[list[Tensor], list[Tensor], Tensor, int]:
        mine = torch.full((2,), float(comm.rank))
        before = comm.meter.total.nbytes("foreground")
        exchanged = comm.all_to_all_async([mine + 10 * j for j in range(comm.size)])
        gathered = comm.all_gather_async(mine)
        mean = comm.mean_async(mine)
        mine.fill_(torch.nan)
        first, again = gathered.wait(), gathered.wait()
        assert first is again
        return exchanged.wait(), first, mean.wait(), comm.meter.total.nbytes("foreground") - before

    for rank, (exchanged, gathered, mean, nbytes) in enumerate(launch(in_a_worker(run), 3)):
        assert [chunk.tolist() for chunk in exchanged] == [[i + 10.0 * rank] * 2 for i in range(3)]
        assert [x.tolist() for x in gathered] == [[float(i)] * 2 for i in range(3)]
        assert mean.tolist() == [1.0, 1.0]
        assert nbytes == 16 + 16 + round(2 * 2 / 3 * 8)


def test_all_to_all_of_uneven_lengths_is_a_gather_and_a_scatter(launch: Launch) -> None:
    def run(comm: Comm) -> tuple[list[Tensor], list[Tensor], int]:
        rank, size = comm.rank, comm.size
        nothing = torch.empty(0, dtype=torch.uint8)
        mine = torch.full((rank + 1,), rank, dtype=torch.uint8)
        before = comm.meter.total.nbytes("foreground")
        gathered = comm.all_to_all(
            [nothing, mine, nothing], lengths=[i + 1 for i in range(size)] if rank == 1 else [0] * size
        )
        scattered = comm.all_to_all(
            [mine] * size if rank == 1 else [nothing] * size, lengths=[2 if i == 1 else 0 for i in range(size)]
        )
        return gathered, scattered, comm.meter.total.nbytes("foreground") - before

    results = launch(in_a_worker(run), 3)
    for rank, (gathered, scattered, nbytes) in enumerate(results):
        assert [x.tolist() for x in gathered] == ([[0], [1, 1], [2, 2, 2]] if rank == 1 else [[], [], []])
        assert [x.tolist() for x in scattered] == [[], [1, 1], []]
        assert nbytes == [1, 4, 3][rank]


def test_all_to_all_into_fills_the_given_buffer(launch: Launch) -> None:
    """Rank r sends r + 1 entries to rank 0 and j entries to each other rank j."""

    def run(comm: Comm) -> tuple[list[int], int]:
        rank, size = comm.rank, comm.size
        sent_lengths = [rank + 1, *range(1, size)]
        sent = torch.cat([torch.full((n,), 10 * rank + j, dtype=torch.uint8) for j, n in enumerate(sent_lengths)])
        received_lengths = [i + 1 for i in range(size)] if rank == 0 else [rank] * size
        received = torch.zeros(sum(received_lengths), dtype=torch.uint8)
        before = comm.meter.total.nbytes("foreground")
        pending = comm.all_to_all_into_async(
            received, sent, received_lengths=received_lengths, sent_lengths=sent_lengths
        )
        assert pending.wait() is None
        return received.tolist(), comm.meter.total.nbytes("foreground") - before

    results = launch(in_a_worker(run), 3)
    assert [received for received, _ in results] == [[0, 10, 10, 20, 20, 20], [1, 11, 21], [2, 2, 12, 12, 22, 22]]
    assert [nbytes for _, nbytes in results] == [1 + 2, 2 + 2, 3 + 1]


@pytest.mark.parametrize(
    ("numel", "lengths", "message"),
    [
        (3, {"received_lengths": [3, 0], "sent_lengths": [3]}, "received_lengths .* 1 ranks, not 2"),
        (3, {"received_lengths": [3], "sent_lengths": [4]}, "sent must have 4 entries, .* not 3"),
        (4, {"received_lengths": [4], "sent_lengths": [3]}, r"received_lengths\[0\] must be the length 3 .* not 4"),
    ],
)
def test_buffers_that_do_not_fit_raise(numel: int, lengths: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Solo().all_to_all_into_async(torch.zeros(numel), torch.zeros(3), **lengths)


def test_a_buffer_with_gaps_raises() -> None:
    with pytest.raises(ValueError, match="sent must be a contiguous vector"):
        Solo().all_to_all_into_async(torch.zeros(3), torch.zeros(6)[::2], received_lengths=[3], sent_lengths=[3])


def test_a_rank_that_fails_is_named(launch: Launch) -> None:
    def run(comm: Comm) -> None:
        pending = comm.all_gather_async(torch.zeros(3)) if comm.rank == 0 else None
        if pending is None:
            raise KeyError("lost the data")
        pending.wait()

    with pytest.raises(laconic.WorkerFailed, match="lost the data") as caught:
        launch(in_a_worker(run), 2)
    assert caught.value.rank == 1


class CompletesAfterATimeOut:
    """A work whose first wait times out, and which is completed right afterwards, with or without an error."""

    def __init__(self, error: str) -> None:
        self._error, self._completed = error, False

    def wait(self, timeout: timedelta, /) -> None:
        if not self._completed:
            self._completed = True
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return self._completed


def test_a_work_that_completes_just_after_a_wait_timed_out_is_no_failure() -> None:
    failures = []

    def roll_call(doing: str, why: str, participants: object) -> RuntimeError:
        failures.append(why)
        return RuntimeError(why)

    register = cast(Register, SimpleNamespace(timeout=60.0, roll_call=roll_call))
    wait_for(CompletesAfterATimeOut(""), register, "mean", {}, 1)
    assert failures == []
    with pytest.raises(RuntimeError, match="reset by peer"):
        wait_for(CompletesAfterATimeOut("Connection reset by peer"), register, "mean", {}, 1)
    assert failures == ["Connection reset by peer"]


@pytest.mark.parametrize(
    ("chunks", "lengths", "message"),
    [(2, None, "one chunk for each of 1 ranks, not 2"), (1, [3, 3], "not 2"), (1, [4], "length 3 .* not 4")],
)
def test_chunks_that_do_not_fit_raise(chunks: int, lengths: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Solo().all_to_all([torch.zeros(3)] * chunks, lengths=lengths)


def test_with_one_worker_every_verb_is_the_identity() -> None:
    comm, x = Solo(), torch.arange(3.0)
    for result in (comm.all_to_all_async([x], lengths=[3]).wait(), comm.all_gather_async(x).wait()):
        assert len(result) == 1
        assert torch.equal(result[0], x)
        assert result[0] is not x
    into = torch.zeros(3)
    comm.all_to_all_into_async(into, x, received_lengths=[3], sent_lengths=[3]).wait()
    assert torch.equal(into, x)
    assert comm.meter.total.nbytes() == 0
