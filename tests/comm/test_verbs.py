"""Tests each verb over real processes, and simulated: its result, its bytes, its unmodified input, its errors."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.comm import Comm, Solo, connect
from tests.comm.conftest import Launch
from tests.helpers import rank


def comm(timeout: float = 30.0) -> Comm:
    return connect(torch.device("cpu"), timeout)


def everything() -> dict[str, Any]:
    c = comm()
    x = torch.arange(6.0).view(2, 3) + 10 * c.rank
    kept = x.clone()
    chunks = [torch.full((j + 1,), 10 * c.rank + j, dtype=torch.uint8) for j in range(c.size)]
    pending = c.channel().mean_async(x)
    results = {
        "mean": c.mean(x),
        "all_gather": c.all_gather(x),
        "broadcast": c.broadcast(x, root=1),
        "broadcast_async": c.broadcast_async(x, root=1).wait(),
        "all_to_all": c.all_to_all(chunks),
        "exchange": c.exchange(x, c.rank ^ 1) if c.rank < 2 else None,
        "strided": c.mean(x.t()),
        "mean_async": pending.wait(),
        "again": pending.wait(),
        "empty": c.mean(torch.empty(0)),
        "untouched": torch.equal(x, kept),
        "nbytes": {f"{channel}.{verb}": tally.nbytes for (channel, verb), tally in c.meter.total.tallies.items()},
        "seconds": c.meter.total.seconds(),
    }
    out = torch.empty(2, 3)
    assert c.mean(x, out=out) is out
    assert torch.equal(out, results["mean"])  # type: ignore[arg-type]
    assert c.mean(x, out=x) is x
    assert torch.equal(x, out)
    return results


def test_every_verb(launch: Launch) -> None:
    base = torch.arange(6.0).view(2, 3)
    results = launch(everything, 3)
    for i, r in enumerate(results):
        assert torch.equal(r["mean"], base + 10)
        assert torch.equal(r["strided"], (base + 10).t())
        assert torch.equal(r["mean_async"], base + 10)
        assert torch.equal(r["again"], base + 10)
        assert r["empty"].shape == (0,)
        assert torch.equal(torch.stack(r["all_gather"]), torch.stack([base, base + 10, base + 20]))
        assert torch.equal(r["broadcast"], base + 10)
        assert torch.equal(r["broadcast_async"], base + 10)
        assert [chunk.tolist() for chunk in r["all_to_all"]] == [[10 * sender + i] * (i + 1) for sender in range(3)]
        if i < 2:
            assert torch.equal(r["exchange"], base + 10 * (1 - i))
        assert r["untouched"]
        assert r["seconds"] > 0
        assert r["nbytes"] | {"foreground.exchange": 24} == {
            "foreground.mean": 2 * round(2 * 2 / 3 * 24),
            "background.mean": round(2 * 2 / 3 * 24),
            "foreground.all_gather": 2 * 24,
            "foreground.broadcast": 2 * {1: 2 * 24, 2: 0, 0: 0}[i],
            "foreground.all_to_all": 6 - (i + 1),
            "foreground.exchange": 24,
        }


def test_one_worker_alone_has_the_same_verbs() -> None:
    c = Solo()
    x = torch.randn(4)
    for result in (c.mean(x), c.mean_async(x).wait(), c.broadcast(x), c.all_gather(x)[0], c.all_to_all([x])[0]):
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()
    assert c.mean(x, out=x) is x
    assert c.meet("anything", {"a": 1}) == [{"a": 1}]
    assert c.meter.total.nbytes() == 0
    with pytest.raises(FloatingPointError, match="mean at step 0: NaN or infinity on rank 0"):
        c.mean(torch.tensor([1.0, float("inf")]))


def test_the_input_of_an_asynchronous_mean_may_be_overwritten_at_once(launch: Launch) -> None:
    def run() -> Tensor:
        c = comm()
        x = torch.ones(1_000_000) * c.rank
        pending = c.mean_async(x)
        x.zero_()
        return pending.wait()[[0, -1]]

    assert [result.tolist() for result in launch(run, 2)] == [[0.5, 0.5]] * 2


def test_asynchronous_verbs_write_to_out(launch: Launch) -> None:
    def run() -> bool:
        c = comm()
        x, out = torch.ones(1_000_000) * c.rank, torch.empty(3)
        in_place, broadcast = c.mean_async(x, out=x), c.broadcast_async(torch.ones(3) * c.rank, root=1, out=out)
        assert in_place.wait() is x
        assert broadcast.wait() is out
        return bool((x == 0.5).all() and (out == 1).all())

    assert launch(run, 2) == [True, True]


@pytest.mark.parametrize("numel", [1, 2, 5, 16_384, 16_385])
def test_the_mean_and_its_bytes_do_not_depend_on_how_it_is_sent(launch: Launch, numel: int) -> None:
    """Up to 64 KiB a blocking mean bypasses gloo's ring."""

    def run() -> tuple[bool, int, int]:
        c = comm()
        x = torch.randint(-99, 99, (numel,), generator=torch.Generator().manual_seed(c.rank)).float()
        blocking = c.mean(x)
        nbytes = c.meter.total.nbytes()
        asynchronous = c.mean_async(x).wait()
        assert torch.equal(torch.stack(c.all_gather(blocking)), blocking.expand(c.size, -1)), "the same on all ranks"
        return torch.allclose(blocking, asynchronous), nbytes, c.meter.total.calls("foreground", "mean")

    assert launch(run, 3) == [(True, round(2 * 2 / 3 * 4 * numel), 2)] * 3


def test_channels_do_not_mix(launch: Launch) -> None:
    """The two ranks start two means in opposite order, each mean on its own channel."""

    def run() -> list[float]:
        c = comm()
        one, two = c.channel("one"), c.channel("two")
        first, second = torch.tensor([1.0 + c.rank]), torch.tensor([10.0 + c.rank])
        if c.rank == 0:
            a, b = one.mean_async(first), two.mean_async(second)
        else:
            b, a = two.mean_async(second), one.mean_async(first)
        return [a.wait().item(), b.wait().item()]

    assert launch(run, 2) == [[1.5, 10.5]] * 2


def test_dtypes(launch: Launch) -> None:
    def run() -> list[tuple[str, float]]:
        c = comm()
        kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        means = [c.mean(torch.full((3,), float(c.rank), dtype=kind)) for kind in kinds]
        return [(str(mean.dtype), mean[0].item()) for mean in means]

    names = ["float64", "float32", "bfloat16", "float16"]
    assert launch(run, 2) == [[(f"torch.{name}", 0.5) for name in names]] * 2


def test_a_sum_that_overflows_is_named(launch: Launch) -> None:
    def run() -> str:
        try:
            comm().mean(torch.full((4,), 3e38))
        except FloatingPointError as error:
            return str(error)
        return ""

    assert launch(run, 2) == ["mean at step 0: NaN or infinity in the sum, though finite on every rank"] * 2


def test_large_finite_values_are_no_error() -> None:
    """The first check sums the vector, which overflows here though every entry and the mean are finite."""
    assert torch.equal(Solo().mean(torch.full((4,), 3e38)), torch.full((4,), 3e38))


def test_bad_ranks_and_lengths(launch: Launch) -> None:
    def run() -> list[str]:
        c = comm()
        texts = []
        calls = (
            lambda: c.exchange(torch.ones(1), c.rank),
            lambda: c.exchange(torch.ones(1), 2),
            lambda: c.broadcast(torch.ones(1), root=-1),
            lambda: c.all_to_all([torch.ones(1)]),
            lambda: c.mean(torch.ones(2, 3), out=torch.ones(3, 2).t()),
        )
        for call in calls:
            with pytest.raises(ValueError) as info:
                call()
            texts.append(str(info.value))
        return texts

    for i, texts in enumerate(launch(run, 2)):
        assert texts == [
            f"peer must be another rank, not this one ({i})",
            "peer must be a rank from 0 to 1, not 2",
            "root must be a rank from 0 to 1, not -1",
            "all_to_all takes one chunk for each of 2 ranks, not 1",
            "out must be contiguous, not of strides (1, 2)",
        ]


def test_an_exchange_that_gets_no_answer_names_the_peer() -> None:
    def run() -> str:
        c = comm(timeout=1.0)
        if rank() == 1:
            return ""
        try:
            c.exchange(torch.ones(3), 1)
        except laconic.PeerError as error:
            return str(error)
        return "no error"

    text, _ = laconic.spawn(run, 2)
    assert "exchange with rank 1 at step 0 failed" in text
    assert "did not answer within 2 s: rank 1 (it lives, and may be computing)" in text


@pytest.mark.parametrize("background", [False, True])
def test_an_all_gather_names_the_rank_that_does_not_take_part(background: bool) -> None:
    def run() -> str:
        c = comm(timeout=1.0)
        c = c.channel() if background else c
        if rank() == 1:
            return ""
        try:
            c.all_gather(torch.ones(3))
        except laconic.PeerError as error:
            return str(error)
        return "no error"

    text, _ = laconic.spawn(run, 2)
    assert "all_gather at step 0 failed, did not answer within 2 s: rank 1 (it lives" in text


def test_meetings_return_the_notes_and_delete_old_ones(launch: Launch) -> None:
    def run() -> list[Any]:
        c = comm()
        for _ in range(5):
            notes = c.meet("here", {"rank": c.rank})
        return notes

    assert launch(run, 3) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_an_exchange_with_a_peer_that_comes_late() -> None:
    """Waits time out every second to check the store, and gloo breaks a connection when a wait on it times out."""

    def run() -> float:
        model = torch.nn.Linear(3, 1)
        with laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), laconic.LocalSGD(1)) as worker:
            time.sleep(1.5 * worker.rank)
            return worker.comm.exchange(torch.tensor([float(worker.rank)]), 1 - worker.rank).item()

    assert laconic.spawn(run, 2) == [1.0, 0.0]
