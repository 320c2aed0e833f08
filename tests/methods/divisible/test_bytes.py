"""Metered bytes are those of the formula in the docstring of `laconic.Divisible`; metrics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laconic
from laconic.compress import Compressor, Log, Pick, Uniform
from laconic.methods.divisible.pieces import foreground_block, next_piece, overlap
from tests.helpers import adam, build_model, train_step

D, STEPS = 4 * 4 * 2048, 20  # with four workers and a period of 4, each owns one block of each piece
RATIO, PERIOD = 1024, 4


def run(method: laconic.Divisible) -> tuple[int, int]:
    model = nn.Linear(D, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    with laconic.Worker(model, optimizer, method) as worker:
        for _ in range(STEPS):
            model.weight.grad = torch.randn(1, D)
            optimizer.step()
        total = worker.meter.total
        return total.nbytes("foreground"), total.nbytes("background")


def foreground_messages() -> int:
    """Returns the number of steps whose block is not in flight: a piece is, from its step to the next one."""
    count, start, flying = 0, 0, slice(0, 0)
    for step in range(1, STEPS + 1):
        count += not overlap(foreground_block(step, D, RATIO), flying)
        flying = next_piece(start, D, PERIOD)
        start = flying.stop % D
    return count


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_are_those_of_the_formula(n: int) -> None:
    codes: list[Compressor] = [Uniform(4), Pick(7), Log(4)]
    methods = {
        "fp32": laconic.Divisible(RATIO, PERIOD, None),
        "fp32, corrected": laconic.Divisible(RATIO, PERIOD, None, corrected=True),
        "default": laconic.Divisible(RATIO, PERIOD),
        "corrected": laconic.Divisible(RATIO, PERIOD, corrected=True),
        "no background": laconic.Divisible(RATIO, None),
        **{f"one hop, {code}": laconic.Divisible(RATIO, PERIOD, code) for code in codes},
        **{f"two hops, {code}": laconic.Divisible(RATIO, PERIOD, code, hops=2) for code in codes},
    }
    ring, length = 2 * (n - 1) / n, D // RATIO
    # A message of two hops travels in two steps, so that of the last step is halfway.
    steps_of_two_hops = STEPS - 0.5

    def foreground(coded: bool, messages: int = foreground_messages()) -> float:
        return messages * ((n - 1) * Uniform(8).nbytes(length) if coded else ring * 4 * length)

    def one_hop(code: Compressor) -> float:
        return STEPS * (n - 1) * code.nbytes(D) / PERIOD

    def two_hops(code: Compressor) -> float:
        return steps_of_two_hops * ring * code.nbytes(D) / PERIOD

    fp32 = STEPS * ring * 4 * D / PERIOD
    expected = {
        "fp32": (foreground(False), fp32),
        "fp32, corrected": (foreground(False), 2 * fp32),
        "default": (foreground(True), one_hop(Uniform(4))),
        "corrected": (foreground(True), one_hop(Uniform(4)) + one_hop(Log(4))),
        "no background": (foreground(True, STEPS), 0),
        **{f"one hop, {code}": (foreground(True), one_hop(code)) for code in codes},
        **{f"two hops, {code}": (None, two_hops(code)) for code in codes},
    }
    for found in laconic.spawn(lambda: {name: run(method) for name, method in methods.items()}, n):
        for name, (in_foreground, in_background) in expected.items():
            assert found[name][1] == in_background, name
            if in_foreground is not None:
                assert found[name][0] == in_foreground, name
            else:  # pieces are in flight twice as long, so more blocks are left out
                assert 0 < found[name][0] <= foreground(False, STEPS), name


def test_metrics() -> None:
    def run() -> list[dict[str, float]]:
        model = build_model()
        optimizer = adam(model)
        seen = []
        with laconic.Worker(model, optimizer, laconic.Divisible(16, 5, delay=3)) as worker:
            for step in range(8):
                train_step(model, optimizer, worker.rank, step)
                seen.append(worker.method.metrics())
        return seen

    for seen in laconic.spawn(run, 2):
        assert [m["period"] for m in seen] == [5.0] * 8
        assert [m["bits"] for m in seen] == [4.0] * 8
        assert [m["backlog"] for m in seen] == [1, 2, 3, 3, 3, 3, 3, 3]
        assert all(0 <= m["waiting"] <= 1 for m in seen)
        assert seen[-1]["waiting"] > 0
        assert seen[0]["stretch"] == pytest.approx(1.0), "one gradient shows no noise"
        assert all(1 <= m["stretch"] <= 2**0.5 for m in seen)


def test_bits_of_each_background() -> None:
    def bits(method: laconic.Divisible) -> float:
        model = nn.Linear(2, 1)
        with laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), method) as worker:
            return worker.method.metrics()["bits"]

    assert bits(laconic.Divisible()) == 4.0
    assert bits(laconic.Divisible(background=Pick(7))) == 0.6
    assert bits(laconic.Divisible(background=None)) == 32.0
    assert bits(laconic.Divisible(period=None)) == 0.0
