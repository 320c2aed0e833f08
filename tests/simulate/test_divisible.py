"""Divisible on simulated links with delay: what "auto" chooses, and that steps do not wait."""

from __future__ import annotations

import pytest

import laconic
from tests.helpers import adam, build_model, train_step

STEPS = 36


def run(method: laconic.Divisible) -> tuple[dict[str, float], float]:
    """Returns the last metrics, and the seconds waited for after the first comparisons and measurements."""
    model = build_model()
    optimizer = adam(model)
    with laconic.Worker(model, optimizer, method) as worker:
        for step in range(STEPS):
            if step == 20:
                before = worker.meter.total.waited
            train_step(model, optimizer, worker.rank, step)
        return worker.method.metrics(), worker.meter.total.waited - before


@pytest.mark.parametrize(
    ("workers", "link", "chosen"),
    [
        (4, "100mbit", (1, 1, True)),  # period, delay, foreground
        (4, "100mbit+15ms", (1, 1, False)),
        (4, "100mbit+25ms", (2, 2, False)),  # 1.1 · 25 ms
        (4, "100mbit+50ms", (3, 3, False)),
        (8, "100mbit+25ms", (4, 2, False)),  # two hops
    ],
)
def test_the_delay_covers_that_of_the_link(workers: int, link: str, chosen: tuple[int, int, bool]) -> None:
    results = laconic.simulate(run, workers, laconic.Divisible(), link=link, compute=0.02)
    for metrics, waited in results:
        assert (metrics["period"], metrics["delay"], metrics["foreground"]) == chosen
        # The settings of the optimizers are compared once, one step after they were sent.
        assert waited < 0.05


def test_a_given_delay_stays_and_a_short_one_waits() -> None:
    results = laconic.simulate(run, 4, laconic.Divisible(delay=1), link="100mbit+50ms", compute=0.02)
    for metrics, waited in results:
        assert (metrics["delay"], metrics["foreground"]) == (1, False)
        assert waited > 16 * 0.02


def test_a_foreground_in_fp32_takes_two_rounds_with_any_number_of_workers() -> None:
    """gloo's ring, which it took before, would take 28 delays of 25 ms with 8 workers."""

    def run() -> float:
        model = build_model()
        optimizer = adam(model)
        with laconic.Worker(model, optimizer, laconic.Divisible(period=None)) as worker:
            start = worker.comm.now()
            for step in range(10):
                train_step(model, optimizer, worker.rank, step)
            return (worker.comm.now() - start) / 10

    for seconds in laconic.simulate(run, 8, link="100mbit+25ms", compute=0.02):
        assert 0.07 <= seconds < 0.1  # the settings of the optimizers are compared, too
