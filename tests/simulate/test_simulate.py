"""Tests `laconic.simulate`: time, determinism, failures, deadlocks and bad input."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.comm import Comm, connect
from laconic.simulate import Host, memory
from tests.helpers import build_model, loss, rank, sgd, train


def comm() -> Comm:
    return connect(torch.device("cpu"), 30.0)


def train_steps(method: laconic.Method, steps: int = 6) -> tuple[float, float, Tensor]:
    """Returns when training ended, how long this worker waited, and its x."""
    model = build_model()
    optimizer = sgd(model)
    with laconic.Worker(model, optimizer, method) as worker:
        for step in range(steps):
            loss(model, worker.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        end, waited = worker.comm.now(), worker.meter.total.waited
    return end, waited, worker.x.clone()


# Time


def test_a_mean_takes_the_time_of_its_bytes_and_rounds() -> None:
    def run() -> tuple[float, float]:
        c = comm()
        c.mean(torch.ones(250_000))  # a ring: 2 · 3/4 MB at 0.9 MB/s, and at least 4 rounds of 10 ms
        long = c.now()
        c.mean(torch.ones(100))  # direct messages: 600 bytes and 2 rounds
        return long, c.now() - long

    for long, short in laconic.simulate(run, 4, link="8mbit+10ms"):
        assert long == pytest.approx(1.5 / 0.9 + 4 * 0.01)
        assert short == pytest.approx(600e-6 / 0.9 + 2 * 0.01)


def test_gloos_ring_has_two_segments_under_way() -> None:
    """Against a plain simulation of its segments, on one link: a buffer is announced when the segment two before it has
    arrived, and a segment is sent when it has been announced, its content has arrived, and the link is free."""

    def one_pass(segment_seconds: float, delay: float, size: int) -> float:
        arrived: list[float] = []
        free = 0.0
        for i in range(2 * (size - 1)):
            ready = arrived[i - 2] if i >= 2 else 0.0
            free = max(ready + delay, free) + segment_seconds
            arrived.append(free + delay)
        return arrived[-1]

    def run() -> float:
        c = comm()
        c.mean(torch.ones(50_000))
        return c.now()

    for size, rate, delay in [
        (2, 10, 0.025),
        (4, 10, 0.025),
        (8, 10, 0.025),
        (8, 100, 0.025),
        (5, 10, 0.001),
        (3, 1, 0.1),
    ]:
        segment = 200_000 / (2 * size) / (0.9 * rate * 1e6 / 8)
        end = laconic.simulate(run, size, link=f"{rate}mbit+{1e3 * delay:g}ms")[0]
        assert end == pytest.approx(2 * one_pass(segment, delay, size), rel=1e-5), (size, rate, delay)


def test_rounds_that_are_hidden_by_bytes_have_no_jitter() -> None:
    def run() -> float:
        c = comm()
        c.mean(torch.ones(250_000))  # as above: 4 of its 12 rounds are left
        return c.now()

    for seed in range(5):
        end = laconic.simulate(run, 4, link="8mbit+10ms~10ms", seed=seed)[0]
        assert 1.5 / 0.9 <= end <= 1.5 / 0.9 + 4 * 0.02


def test_steps_take_the_given_seconds_and_the_rest_is_waiting() -> None:
    results = laconic.simulate(train_steps, 3, laconic.LocalSGD(period=100), link="1gbit", compute=[0.1, 0.2, 0.4])
    assert [end for end, _, _ in results] == pytest.approx([0.6, 1.2, 2.4], abs=1e-3)
    together = laconic.simulate(train_steps, 3, laconic.AllReduce(), link="1gbit", compute=[0.1, 0.2, 0.4])
    assert [end for end, _, _ in together] == pytest.approx([2.4] * 3, abs=1e-3)
    assert [waited for _, waited, _ in together] == pytest.approx([1.8, 1.2, 0.0], abs=1e-2)


def test_computing_is_no_overhead_of_the_method() -> None:
    def run() -> dict[str, float]:
        model = build_model()
        optimizer = sgd(model)
        with laconic.Worker(model, optimizer, laconic.AllReduce()) as worker:
            for step in range(4):
                loss(model, worker.rank, step).backward()
                optimizer.step()
            return worker.metrics()

    for metrics in laconic.simulate(run, 2, compute=0.5):
        assert metrics["overhead_seconds"] == 0
        assert metrics["seconds"] == pytest.approx(4 * 0.5, abs=0.1)


def test_seconds_may_depend_on_the_step() -> None:
    results = laconic.simulate(
        train_steps, 2, laconic.LocalSGD(100), compute=lambda rank, step: 1.0 if step == 3 else 0
    )
    assert [end for end, _, _ in results] == pytest.approx([1.0, 1.0], abs=1e-3)


def test_a_slow_uplink_slows_down_the_ring_and_a_worker_that_starts_late_is_awaited() -> None:
    def run() -> float:
        c = comm()
        c.mean(torch.ones(250_000))
        return c.now()

    links: list[str | Host] = ["8mbit", "8mbit", Host("2mbit", down="8mbit")]
    assert laconic.simulate(run, 3, link=links) == pytest.approx([4 / 3 * 4 / 0.9] * 3)
    assert laconic.simulate(run, 3, link="8mbit", starts={1: 5.0}) == pytest.approx([5.0 + 4 / 3 / 0.9] * 3)


def test_two_channels_share_a_link() -> None:
    def run() -> float:
        c = comm()
        pending = [channel.mean_async(torch.ones(250_000)) for channel in (c.channel("a"), c.channel("b"))]
        for one in pending:
            one.wait()
        return c.now()

    assert laconic.simulate(run, 2, link="8mbit") == pytest.approx([2.0 / 0.9] * 2)


@pytest.mark.parametrize("host", [Host("1gbit+25ms", window=100_000), Host("1gbit+25ms%0.01")])
def test_a_connection_is_limited_by_window_and_loss(host: Host) -> None:
    def run() -> float:
        c = comm()
        c.exchange(torch.ones(250_000), 1 - c.rank)
        return c.now()

    round_trip = 0.05
    rate = 100_000 / round_trip if host.window else 1448 / round_trip * (1.5 / 1e-4) ** 0.5
    assert laconic.simulate(run, 2, link=host) == pytest.approx([1e6 / rate + 2 * 0.025] * 2, rel=1e-6)


# Determinism


def test_the_same_seed_gives_the_same_bits_and_times_and_another_seed_another_jitter() -> None:
    def run(seed: int) -> list[tuple[float, float, Tensor]]:
        return laconic.simulate(train_steps, 5, laconic.A2CiD2(rate=1.0), link="1mbit+20ms~10ms", seed=seed)

    first, again, other = run(0), run(0), run(1)
    assert [(end, waited) for end, waited, _ in first] == [(end, waited) for end, waited, _ in again]
    assert all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(first, again, strict=True))
    assert [end for end, _, _ in first] != [end for end, _, _ in other]


def test_every_worker_has_its_own_random_numbers_and_environment() -> None:
    def run() -> tuple[Any, ...]:
        c = comm()
        torch.manual_seed(rank())
        np.random.seed(rank())
        random.seed(rank())
        seen = []
        for _ in range(3):
            c.meet("here")
            seen.append((torch.randn(1).item(), np.random.rand(), random.random(), os.environ["RANK"]))
        return tuple(seen)

    before = torch.get_rng_state(), np.random.rand(0), os.environ.get("RANK")
    found = laconic.simulate(run, 3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert os.environ.get("RANK") == before[2]
    alone = [laconic.simulate(lambda r=r: _draw(r), 1)[0] for r in range(3)]
    assert [[entry[:3] for entry in seen] for seen in found] == alone
    assert [seen[0][3] for seen in found] == ["0", "1", "2"]


def _draw(seed: int) -> list[tuple[float, float, float]]:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return [(torch.randn(1).item(), np.random.rand(), random.random()) for _ in range(3)]


def test_grad_mode_and_autocast_stay_with_their_worker() -> None:
    def run() -> bool:
        c = comm()
        if c.rank == 0:
            with torch.no_grad(), torch.autocast("cpu"):
                c.meet("here")
                return torch.is_grad_enabled() or not torch.is_autocast_enabled("cpu")
        c.meet("here")
        return not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")

    assert laconic.simulate(run, 3) == [False, False, False]


# Failures and deadlocks


def test_a_deadlock_names_who_waits_where() -> None:
    def run() -> None:
        c = comm()
        c.meter.begin_step(7 + c.rank)
        if c.rank == 0:
            c.channel("slow").mean_async(torch.ones(3)).wait()
        elif c.rank == 1:
            c.meet("the party")
        else:
            c.exchange(torch.ones(3), 0)

    with pytest.raises(laconic.WorkerFailed) as caught:
        laconic.simulate(run, 4)
    text = str(caught.value)
    assert "rank 0 is in mean at step 7 on the channel 'slow', and waits for ranks 1, 2, 3" in text
    assert "rank 1 is at the party, step 8, and waits for ranks 0, 2, 3" in text
    assert "rank 2 is in exchange with rank 0 at step 9 on the channel 'foreground', and waits for rank 0" in text


def test_a_rank_that_returns_early_is_named_and_the_error_can_be_caught() -> None:
    def run() -> str:
        c = comm()
        if c.rank == 1:
            return ""
        with pytest.raises(laconic.PeerError) as caught:
            c.all_gather(torch.ones(3))
        return str(caught.value)

    text, _ = laconic.simulate(run, 2)
    assert "all_gather at step 0" in text
    assert "rank 1 has returned" in text


def test_different_verbs_and_different_meetings_raise() -> None:
    def verbs() -> None:
        c = comm()
        (c.mean if c.rank else c.all_gather)(torch.ones(3))

    with pytest.raises(laconic.WorkerFailed, match=r"rank 1 calls mean of \(3,\) .*, rank 0 all_gather of \(3,\)"):
        laconic.simulate(verbs, 2)
    with pytest.raises(laconic.WorkerFailed, match=r"rank 0: tea .*; rank 1: coffee"):
        laconic.simulate(lambda: comm().meet(["tea", "coffee"][rank()]), 2)


def test_the_first_worker_that_fails_is_reported_with_its_traceback() -> None:
    def run() -> None:
        with laconic.Worker(model := nn.Linear(3, 1), sgd(model), laconic.AllReduce()) as worker:
            if worker.rank == 2:
                raise KeyError("lost the data")
            worker.comm.mean(torch.ones(3))

    with pytest.raises(
        laconic.WorkerFailed, match=r"simulated worker 2 of 4 failed: Traceback[^$]*lost the data"
    ) as caught:
        laconic.simulate(run, 4)
    assert caught.value.rank == 2


def test_a_worker_that_is_killed_ends_the_others_of_a_synchronous_method() -> None:
    ends: list[tuple[float, str]] = []

    def run() -> None:
        c = comm()
        with pytest.raises(laconic.PeerError) as caught:
            train(laconic.AllReduce(), sgd, 100)
        ends.append((c.now(), str(caught.value)))

    with pytest.raises(laconic.WorkerFailed, match="killed by a simulated failure") as failed:
        laconic.simulate(run, 3, compute=0.1, failures={1: 2.05})
    assert failed.value.rank == 1
    assert [end for end, _ in ends] == pytest.approx([3.05, 3.05])
    assert all("rank 1 died" in text for _, text in ends)


@pytest.mark.filterwarnings("ignore:rank 1 was dropped")
def test_gossip_goes_on_without_a_worker_that_is_killed() -> None:
    results = laconic.simulate(
        train_steps, 4, laconic.A2CiD2(rate=1.0), 60, compute=0.1, failures={1: 2.05}, spare_survivors=True
    )
    assert isinstance(results[1], laconic.WorkerFailed)
    survivors = [result[2] for i, result in enumerate(results) if i != 1]
    assert all(torch.equal(x, survivors[0]) for x in survivors)


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers must be .* not 0"),
        ({"link": "fast"}, r"a link must be written RATE\[\+DELAY\]\[~JITTER\]\[%LOSS\], as in .* not 'fast'"),
        ({"link": ["1gbit"] * 3}, "one for each of the 2"),
        ({"link": 3}, "link must be"),
        ({"link": ["1gbit", 3]}, 'link must be a text such as "100mbit\\+25ms" or a Link, not 3'),
        ({"compute": -1.0}, "compute .* at least 0, not -1.0"),
        ({"compute": [0.1]}, "for each of the 2"),
        ({"failures": {2: 1.0}}, "failures must be by rank, from 0 to 1, not 2"),
        ({"starts": {0: -1.0}}, r"starts\[0\] .* at least 0, not -1.0"),
        ({"seed": -1}, "seed must be"),
        ({"fn": 3}, "fn must be a function, not 3"),
    ],
)
def test_bad_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"fn": lambda: None, "workers": 2}
    with pytest.raises(ValueError, match=message):
        laconic.simulate(**good | arguments)


def _wait_for_event() -> None:
    threading.Event().wait(0.1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: time.sleep(0.1), r"time.sleep\(0.1\) waits in real time"),
        (_wait_for_event, "a wait with a time-out of 0.1 s is in real time"),
        (lambda: dist.init_process_group("gloo"), "torch.distributed has no processes to connect in a simulation"),
        (lambda: dist.all_reduce(torch.ones(1)), "torch.distributed has no processes to connect in a simulation"),
        (lambda: nn.parallel.DistributedDataParallel(nn.Linear(1, 1)), "torch.distributed has no processes"),
        (lambda: laconic.simulate(lambda: None, 2), "a simulated worker must not call laconic.simulate"),
    ],
)
def test_real_time_and_torch_distributed_are_errors_inside(function: Callable[[], Any], message: str) -> None:
    with pytest.raises(laconic.WorkerFailed, match=message):
        laconic.simulate(function, 2)
    time.sleep(0)  # outside it is what it was


def test_a_wait_that_no_other_thread_can_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # the process of the tests may have others
    with pytest.raises(laconic.WorkerFailed, match="a wait for another thread would never end, since there is none"):
        laconic.simulate(lambda: threading.Event().wait(), 2)


def test_more_workers_than_memory_allows_are_predicted_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def run() -> None:
        started.append(rank())
        train(laconic.AllReduce(), sgd, 3)

    monkeypatch.setattr(memory, "_available_nbytes", lambda: 1 << 24)
    with pytest.raises(MemoryError, match=r"1000 simulated workers would take about .* simulate at most \d+ workers"):
        laconic.simulate(run, 1000)
    assert started == [0, 1]
    with pytest.raises(MemoryError, match=r"30\.0 MiB each, and 1\.0 GiB are free: simulate at most 34 workers"):
        memory.MemoryWatch(64).check(10 << 20, available=1 << 30)
    memory.MemoryWatch(34).check(10 << 20, available=1 << 30)


def test_files_that_workers_map_are_not_counted_as_their_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(1 << 25))

    def run() -> int:
        shared = np.memmap(data, np.uint8, mode="r")
        total = int(shared.sum())
        comm().mean(torch.ones(3))
        return total + len(shared)

    monkeypatch.setattr(memory, "_available_nbytes", lambda: 1 << 26)
    assert laconic.simulate(run, 4) == [1 << 25] * 4


def test_inference_mode_is_an_error() -> None:
    def run() -> None:
        with torch.inference_mode():
            comm().mean(torch.ones(3))

    with pytest.raises(laconic.WorkerFailed, match=r"must not communicate inside torch.inference_mode\(\)"):
        laconic.simulate(run, 2)
