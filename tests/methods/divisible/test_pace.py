"""The automatic period, delay and quantizer: scripted times give an exact path; in virtual time nothing waits."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.comm import Pending, Solo
from laconic.comm.solo import Arrived
from laconic.methods.divisible.pace import FIRST, INTERVAL, PROBING, ROUNDS, WINDOW, Pace, Times
from tests.methods.divisible.comms import Virtual

SIZES = (100.0, 25.0)  # bytes of a sweep with the finer and with the coarser quantizer


class Uneven(Solo):
    """Two workers, of which the other computes twice as slowly, never waits, and sends in half the time."""

    size = 2

    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]:
        return Arrived([x, x * torch.tensor([2.0, 0.0, 1.0, 0.5, 1.0, 1.0, 1.0], dtype=torch.float64)])


def make_pace(hops: int = 1, delays: range = range(1, 65), usual: int = 4, most: int = 64, sizes: Any = SIZES) -> Pace:
    return Pace(Uneven(), delays, usual, most, {hops: sizes})


def measure(
    pace: Pace, finest: float, computing: float = 0.5, working: float = 1.0, latency: float = 0.0, waiting: float = 0.0
) -> tuple[int, int]:
    """Fills a window; the finest quantizer takes `finest` seconds. Returns the quantizer's number and the period.

    As a default, quantizing costs so much that a period below the first is not worth it."""
    for step in range(pace.next_window, pace.next_window + WINDOW):
        assert pace.is_measuring(step)
        sizes = pace.sizes[pace.hops]
        sending = finest * sizes[pace.choice] / sizes[0]
        pace.add(step, Times(computing, waiting, latency, latency + sending, working))
    return pace.choice, pace.period


def test_a_script_of_times_gives_an_exact_path() -> None:
    """A step takes 1 s, on the slower worker."""
    pace = make_pace()
    assert (pace.choice, pace.period) == (0, PROBING), "training starts with the finest, in small pieces"
    assert not pace.is_measuring(FIRST - 1)
    script = [
        (1.9, (0, 4)),  # twice 1.9 s fit into 4 steps of 1 s
        (2.1, (1, 4)),  # twice 2.1 s do not; a quarter of that does
        (8.0, (1, 4)),
        (40.0, (1, 11)),  # ⌈1.1 · 10 s / 1 s⌉
        (36.0, (1, 11)),  # 10 would do, but that is not worth a change
        (28.0, (1, 8)),
        (1.7, (1, 4)),  # the finer one would fit, but only just
        (1.55, (0, 4)),  # 2.5 · 1.55 s ≤ 4 s
        (1000.0, (1, 64)),
    ]
    for seconds, expected in script:
        if seconds < 1000:
            assert measure(pace, seconds) == expected, f"{seconds} s"
            continue
        with pytest.warns(UserWarning, match="needs a period of 275") as caught:
            assert measure(pace, seconds) == expected
        assert "max_period=64: sending the model takes 250 s and computing a step 1 s" in str(caught[0].message)


def test_windows_follow_one_another_at_the_start_and_are_rare_later() -> None:
    pace = make_pace()
    starts = []
    for _ in range(ROUNDS + 2):
        starts.append(pace.next_window)
        measure(pace, 1.0)
    later = FIRST + ROUNDS * WINDOW - 1
    at_the_start = [FIRST + i * WINDOW for i in range(ROUNDS)]
    assert starts == [*at_the_start, later + INTERVAL, later + 2 * INTERVAL + WINDOW - 1]
    assert not pace.is_measuring(pace.next_window - 1)


def test_one_slow_step_of_a_window_does_not_count() -> None:
    pace = make_pace()
    for step, sending in enumerate((1.0, 500.0, 1.0), start=FIRST):
        pace.add(step, Times(0.5, 0.0, 0.0, sending, 1.0))
    assert (pace.choice, pace.period) == (0, 4)


def test_a_period_below_the_first_is_taken_where_its_work_costs_little() -> None:
    """A step takes 1 s, so quantizing and applying everything may take 0.05 s a step."""
    pace = make_pace()
    script = [
        (0.4, 0.19, (0, 4)),
        (0.4, 0.04, (0, 1)),  # twice 0.4 s fit into one step
        (0.6, 0.04, (1, 1)),  # twice 0.6 s do not; the coarser one does: shorter periods before finer quantizers
        (3.5, 0.04, (1, 1)),  # 0.875 s of the coarser one
        (4.5, 0.04, (1, 2)),  # ⌈1.1 · 1.125 s⌉
        (0.39, 0.09, (0, 2)),
        (0.39, 9.0, (0, 4)),  # costly quantizing never makes it longer than the first
    ]
    for sending, working, expected in script:
        assert measure(pace, sending, working=working) == expected, f"{sending} s, {working} s"


def test_the_shortest_period_may_be_more_than_one() -> None:
    """Two hops: a piece must have come back before it is sent again."""
    pace = make_pace(hops=2)
    assert measure(pace, 1e-3, working=0.0) == (0, 2)


def test_the_delay_is_the_shortest_in_which_a_message_arrives() -> None:
    """Computing takes 1 s, and a sweep of the only quantizer 0.4 s on the slower link."""
    pace = make_pace(sizes=SIZES[:1])
    script = [
        (0.0, 0.0, 1, 1),
        (0.4, 0.0, 1, 1),  # 1.1 · (0.4 + 0.4) s
        (0.6, 0.0, 2, 2),  # 1.1 · (0.6 + 0.4) s are too much for a step
        (3.0, 0.0, 4, 4),  # 1.1 · (3.0 + 0.1) s
        (2.7, 0.0, 4, 4),
        (2.0, 0.0, 3, 3),  # 1.1 · (2.0 + 0.13) s are at most 0.8 · 3 s
        (1.5, 0.0, 3, 3),  # 2 would do, but only just
        (30.0, 0.0, 34, 34),  # the period is never shorter than the delay
        (0.0, 0.0, 1, 1),
        (0.85, 0.04, 2, 2),
        (1.9, 2.0, 2, 4),  # a step takes 1.5 s, with the work on a quarter
    ]
    for latency, working, delay, period in script:
        _, found = measure(pace, 0.4, working=working, latency=latency)
        assert (pace.delay, found) == (delay, period), f"{latency} s"


def test_each_of_two_hops_has_the_delay() -> None:
    pace = make_pace(hops=2)
    assert measure(pace, 0.1, working=0.04, latency=1.6) == (0, 4)
    assert pace.delay == 2


def test_two_hops_are_taken_where_one_would_need_a_longer_period_than_usual() -> None:
    """A step takes 1 s. Two hops send half of the bytes; the measured seconds are those of the present hops."""
    pace = Pace(Uneven(), range(1, 65), 4, 64, {1: SIZES[:1], 2: [size / 2 for size in SIZES[:1]]})
    found = []
    for one_hop in (3.6, 3.7, 40.0, 3.3, 3.0, 2.9, 3.7):
        measure(pace, one_hop / pace.hops, working=9.0)
        found.append((pace.hops, pace.period))
    assert found[:3] == [(1, 4), (2, 4), (2, 22)]
    assert found[3:] == [(2, 4), (2, 4), (1, 4), (2, 4)], "1.1 · 3 s would fit into 4 steps, but only just"
    measure(pace, 5.0 / 2, working=0.0, latency=9.0)
    assert pace.hops == 1, "a sweep of 5 s fits into the delay of the link, which two hops would have twice"


def test_a_delay_that_is_given_stays() -> None:
    pace = make_pace(delays=range(3, 4))
    for latency in (0.0, 30.0):
        assert measure(pace, 0.1, working=0.04, latency=latency) == (0, 3)
        assert pace.delay == 3


def test_a_link_that_is_too_slow_for_the_longest_period_gets_no_longer_delay() -> None:
    pace = make_pace(most=8)
    for _ in range(ROUNDS - 1):
        measure(pace, 1000.0)
    with pytest.warns(UserWarning, match="the link is too slow for max_period=8"):
        assert measure(pace, 1000.0) == (1, 8)
    assert pace.delay == 1


def test_a_delay_is_never_above_the_longest() -> None:
    pace = make_pace(delays=range(1, 9), most=8)
    assert measure(pace, 0.1, latency=100.0) == (0, 8)
    assert pace.delay == 8


def test_there_is_a_foreground_where_waiting_for_it_costs_little() -> None:
    """A step takes 1 s. One of two workers waits, so waiting costs half of that."""
    pace = make_pace()
    assert pace.has_foreground, "until times are measured"
    found = []
    for waiting in (0.09, 0.11, 0.09, 0.11, 0.09, 0.07, 0.09):
        measure(pace, 1e-3, waiting=waiting)
        found.append(pace.has_foreground)
    expected = [True, False, True, False, False, True, True]
    assert found == expected, "0.09 s are not worth a change once decisions are settled"


def test_there_is_no_foreground_where_its_bytes_would_wait_for_the_link() -> None:
    """A step takes 1 s, and sending a byte 1 ms; a sweep of 4 steps has 100 bytes."""
    pace = Pace(Uneven(), range(1, 65), 4, 64, {1: SIZES[:1]}, foreground_nbytes=24.0)
    measure(pace, 0.1)
    assert pace.has_foreground, "1 ms · (24 + 100 / 4) ≤ 0.05 s"
    pace = Pace(Uneven(), range(1, 65), 4, 64, {1: SIZES[:1]}, foreground_nbytes=26.0)
    measure(pace, 0.1)
    assert not pace.has_foreground


def test_steps_are_stretched_with_their_pieces_where_stretching_all_costs_much() -> None:
    """A step takes 1 s."""
    pace = make_pace()
    assert pace.stretches_every_step
    found = []
    for seconds in (0.05, 0.06, 0.05, 0.06, 0.05, 0.04, 0.05):
        for step in range(pace.next_window, pace.next_window + WINDOW):
            pace.add(step, Times(0.5, 0.0, 0.0, 1e-3, 1.0, seconds))
        found.append(pace.stretches_every_step)
    assert found == [True, False, True, False, False, True, True], "0.05 s are not worth a change once settled"


# Seconds of an empty message and of a message, and how many of these are a sweep: measured in the first two windows on
# 4 workers that share 2 cores, at 100 Mbit/s. 4 bits need 0.223 s a sweep and `Pick(7)` 0.033 s.
SHARED_CORES = [
    [(4.1e-3, 3.5e-3, 64), (3.0e-3, 3.6e-3, 64), (5.2e-3, 3.5e-3, 64)],
    [(1.6e-3, 63.0e-3, 4), (4.4e-3, 66.0e-3, 4), (4.8e-3, 68.5e-3, 4)],
    [(4.9e-3, 8.4e-3, 4), (3.4e-3, 8.3e-3, 4), (5.1e-3, 9.0e-3, 4)],
]


def test_waiting_for_a_core_is_not_taken_for_latency() -> None:
    """Subtracting the latency measured beside each message gave 0.013 s for `Pick(7)`, and then 4 bits again."""
    pace = Pace(Uneven(), range(1, 65), 4, 64, {1: (2.79e6, 0.41e6)})
    for window in SHARED_CORES:
        for latency, message, messages in window:
            pace.add(pace.next_window, Times(0.025, 0.0, latency, message * messages, 0.1, messages=messages))
    assert (pace.choice, pace.period) == (1, 4)


def test_a_state_of_a_version_with_one_delay_loads() -> None:
    pace, old = make_pace(), make_pace()
    measure(pace, 40.0, latency=3.0)
    saved = old.state_dict()
    del saved["delay"], saved["has_foreground"], saved["hops"], saved["stretches_every_step"]
    saved |= {"period": 11, "samples": [[0.5, 3.0, 1.0]]}
    pace.form(5).check("pace", saved)
    pace.load_state_dict(saved)
    assert (pace.delay, pace.has_foreground, pace.period, pace.samples) == (1, True, 11, [])
    merged = pace.merge([saved, saved], 5)
    pace.form(5).check("pace", merged)
    assert (merged["delay"], merged["has_foreground"], merged["period"]) == (1, True, 11)
    with pytest.raises(ValueError, match="delay must be a whole number from 1 to 64, not 65"):
        pace.form(5).check("pace", saved | {"delay": 65})


def test_one_quantizer_leaves_only_the_period() -> None:
    pace = make_pace(usual=2, sizes=SIZES[:1], delays=range(2, 3))
    assert measure(pace, 9.0) == (0, 10)
    assert measure(pace, 8.0) == (0, 9)
    assert measure(pace, 1e-4) == (0, 2)


def test_it_warns_once_and_only_on_rank_0_and_not_before_pieces_have_the_right_size() -> None:
    pace = make_pace()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measure(pace, 1e4)
        assert not caught
        for _ in range(4):
            measure(pace, 1e4)
    assert len(caught) == 1
    assert pace.has_warned


def test_the_shortest_period_is_not_above_the_longest() -> None:
    pace = make_pace(most=2)
    assert pace.period == 2
    assert measure(pace, 1e-3) == (0, 2)


def test_a_copy_by_its_state_goes_on_in_the_same_way() -> None:
    pace, other = make_pace(), make_pace()
    measure(pace, 40.0)
    pace.add(pace.next_window, Times(0.5, 0.0, 0.0, 3.0, 1.0))  # in the middle of a window
    other.load_state_dict(copy.deepcopy(pace.state_dict()))
    for one in (pace, other):
        for step in (one.next_window + 1, one.next_window + 2):
            one.add(step, Times(0.5, 0.0, 0.0, 3.0, 1.0))
    assert other.state_dict() == pace.state_dict()


def steps(worker: laconic.Worker, comm: Virtual, number: int, computing: float = 1.0) -> list[float]:
    """Trains with zero gradients; returns the seconds waited in each step."""
    waited = []
    for _ in range(number):
        comm.seconds += computing
        for p in worker.parameters:
            p.grad = torch.zeros_like(p)
        worker.optimizer.step()
        waited.append(worker.meter.last_step.seconds())
    return waited


@pytest.mark.parametrize(("latency", "delay"), [(0.0, 1), (0.3, 2), (3.0, 5)])
def test_auto_hides_the_background_and_follows_the_link(latency: float, delay: int) -> None:
    d = 1000
    model = nn.Linear(d, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    comm = Virtual(bandwidth=4 * d / 6.0, latency=latency)  # 6 s for everything
    with laconic.Worker(model, optimizer, laconic.Divisible(1000, background=None), comm=comm) as worker:

        def found() -> tuple[float, float, float]:
            metrics = worker.method.metrics()
            return metrics["period"], metrics["delay"], metrics["foreground"]

        steps(worker, comm, FIRST + ROUNDS * WINDOW)
        assert found() == (7, delay, False)  # ⌈1.1 · 6 s / 1 s⌉; the link is never idle
        # Every 16 steps the settings are compared, which takes a message.
        waited = steps(worker, comm, 50)
        assert sum(seconds > 0.05 for seconds in waited) <= 4
        assert max(waited) < latency + 0.05
        comm.bandwidth *= 3
        steps(worker, comm, INTERVAL)
        assert found()[0] == max(3, delay)
        comm.bandwidth /= 9
        steps(worker, comm, 2 * INTERVAL)
        assert found()[0] == 20
        comm.latency = 0.0
        comm.bandwidth *= 1000
        steps(worker, comm, INTERVAL + WINDOW)
        assert found() == (1, 1, True)


def test_a_given_period_measures_nothing_and_has_a_delay_of_1() -> None:
    model = nn.Linear(100, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    comm = Virtual(bandwidth=1e9, latency=5.0)
    with laconic.Worker(model, optimizer, laconic.Divisible(10, 4), comm=comm) as worker:
        steps(worker, comm, 3 * FIRST)
        metrics = worker.method.metrics()
        assert (metrics["delay"], metrics["foreground"], metrics["period"]) == (1, 1, 4)


def test_auto_takes_picks_on_a_slow_link_and_4_bits_again_on_a_fast_one() -> None:
    d = 1 << 15
    model = nn.Linear(d, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    comm = Virtual(bandwidth=d / 2 / 0.3)  # 0.3 s for everything in 4 bits, and no work
    with laconic.Worker(model, optimizer, laconic.Divisible(), comm=comm) as worker:

        def found() -> tuple[float, float]:
            metrics = worker.method.metrics()
            return metrics["bits"], metrics["period"]

        steps(worker, comm, FIRST + ROUNDS * WINDOW)
        assert found() == (4.0, 1.0)
        comm.bandwidth /= 4
        steps(worker, comm, INTERVAL + WINDOW)
        assert found() == (0.6, 1.0)
        comm.bandwidth /= 16
        steps(worker, comm, INTERVAL + WINDOW)
        bits, period = found()
        assert bits == 0.6
        assert 3 <= period <= 5
        comm.bandwidth *= 64
        steps(worker, comm, INTERVAL + 20 * WINDOW)
        assert found() == (4.0, 1.0)
