"""Moves are conserved whatever the quantizer, x̂ is the same everywhere, and every entry has its turn."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from laconic.compress import Half, Log, Pick, Sign, TopK, Uniform
from laconic.method import Replica
from laconic.methods.divisible.pace import Times
from laconic.methods.divisible.pieces import GRAIN, foreground_block, next_piece
from tests.helpers import OPTIMIZERS, Optimize, rank, train, train_alone
from tests.methods.divisible.comms import Mirror, scripted_times

# A `Mirror` stands for workers with equal data, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:the local gradients of all")
METHODS = {
    "fp32": laconic.Divisible(8, 3, None),
    "fp32, late": laconic.Divisible(16, 5, None, delay=3),
    "slower than a sweep": laconic.Divisible(16, 2, None, delay=5),
    "8 bits in the foreground": laconic.Divisible(8, None),
    "4 bits": laconic.Divisible(8, 4),
    "in every step": laconic.Divisible(8, 1, Log(3)),
    "picks": laconic.Divisible(8, 3, Pick(7)),
    "signs": laconic.Divisible(8, 3, Sign()),
    "at random": laconic.Divisible(8, 3, Uniform(2, stochastic=True)),
    "16 bits": laconic.Divisible(8, 3, Half()),
    "largest": laconic.Divisible(8, 3, TopK(0.1)),
    "corrected": laconic.Divisible(8, 3, Log(3), corrected=True),
    "auto": laconic.Divisible(8),
    "two hops": laconic.Divisible(8, 3, Log(3), hops=2),
    "two hops, late": laconic.Divisible(8, 2, Uniform(4, block=64), delay=2, hops=2),
    "two hops, at random": laconic.Divisible(8, 2, Uniform(2, stochastic=True), hops=2),
    "two hops, corrected": laconic.Divisible(8, 3, Sign(), hops=2, corrected=True),
    "two hops, auto": laconic.Divisible(8, hops=2),
}
D = 83 * 3


class Recorded(laconic.Divisible):
    """Adds up the local steps, after the stretch."""

    def setup(self, worker: Replica) -> None:
        super().setup(worker)
        self.moved = torch.zeros_like(worker.x, dtype=torch.float64)

    def before_step(self, worker: Replica) -> None:
        super().before_step(worker)
        self._before = worker.x.double()

    def _start_foreground(self, worker: Replica) -> Any:
        self.moved += worker.x.double() - self._before
        return super()._start_foreground(worker)

    def _apply_due(self, worker: Replica, step: int) -> None:
        super()._apply_due(worker, step)
        self._before = worker.x.double()

    def _finish_foreground(self, worker: Replica, flight: Any) -> None:
        super()._finish_foreground(worker, flight)
        self._before = worker.x.double()

    def _send(self, worker: Replica, piece: slice) -> None:
        self.moved += worker.x.double() - self._before  # the steps of these entries have been stretched
        super()._send(worker, piece)


def changing_times(step: int, share: float) -> Times:
    """Of a link that is fast, then so slow that "auto" takes two hops, then fast."""
    return Times(1.0, 0.0, 0.0, (9.0 if 8 < step < 18 else 0.1) * share, 0.3)


def recorded(method: laconic.Divisible) -> Recorded:
    return Recorded(**method.settings())


def look(worker: laconic.Worker) -> dict[str, Any]:
    own = worker.method
    assert isinstance(own, Recorded)
    # Two hops: what owners have not passed on, and averages that are in their residuals already but not in x.
    residual = torch.zeros(D) if own.owner_residual is None else own.owner_residual.clone()
    answered = torch.zeros(D)
    for flight in own._flights:
        if flight.answered:
            average, sent = flight.receive()[0]
            answered[flight.piece] += average - sent
    return {
        "x": worker.x.clone(),
        "x_hat": own.x_hat.clone(),
        "moved": own.moved.clone(),
        "residual": residual,
        "answered": answered,
        "in flight": len(own._flights),
    }


def push(method: laconic.Divisible, optimize: Optimize, steps: int) -> list[dict[str, Any]]:
    """Trains with random gradients; returns what a rank holds before, after every step, and after the end."""
    torch.manual_seed(0)
    model = nn.Linear(D, 1, bias=False)
    optimizer = optimize(model)
    with scripted_times(changing_times), laconic.Worker(model, optimizer, recorded(method)) as worker:
        seen = [look(worker)]
        for step in range(steps):
            generator = torch.Generator().manual_seed(50 * step + worker.rank)
            model.weight.grad = torch.randn(1, D, generator=generator)
            optimizer.step()
            seen.append(look(worker))
    return [*seen, look(worker)]


def total(ranks: tuple[dict[str, Any], ...], name: str) -> Tensor:
    return torch.stack([rank[name] for rank in ranks]).double().sum(0)


def check(by_step: list[tuple[dict[str, Any], ...]], text: str) -> None:
    x_0, n = by_step[0][0]["x"], len(by_step[0])
    for step, ranks in enumerate(by_step):
        assert all(torch.equal(rank["x_hat"], ranks[0]["x_hat"]) for rank in ranks), f"{text}: x̂ at step {step}"
        found = (total(ranks, "x") + total(ranks, "answered")) / n + total(ranks, "residual")
        expected = x_0 + total(ranks, "moved") / n
        difference = (found - expected).abs().max().item()
        assert difference < 3e-6, f"{text}: the mean of x at step {step}, in fp32 steps of about 1e-7"
    end = by_step[-1]
    assert all(torch.equal(rank["x"], end[0]["x"]) for rank in end), f"{text}: the averaged model"
    assert not any(bool(rank["residual"].any()) or rank["in flight"] for rank in end), f"{text}: nothing is left"


def test_the_mean_moves_by_the_mean_of_the_local_steps_at_every_step() -> None:
    cases = list(itertools.product(METHODS, OPTIMIZERS))
    results = laconic.spawn(lambda: [push(METHODS[name], OPTIMIZERS[kind], 30) for name, kind in cases], 3)
    for (name, optimizer), runs in zip(cases, zip(*results, strict=True), strict=True):
        by_step = list(zip(*runs, strict=True))
        check(by_step, f"{name} with {optimizer}")
        method = METHODS[name]
        if isinstance(method.period, int):
            expected = min(method._delays[0] * (method.hops or 1), method.period)
            assert max(ranks[0]["in flight"] for ranks in by_step) == expected, name


def test_nothing_is_sent_twice_or_forgotten() -> None:
    """After a sweep without local moves every worker holds the mean, and what is sent from then on is zero."""

    def run() -> tuple[Tensor, Tensor, Tensor]:
        model = nn.Linear(40, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with laconic.Worker(model, optimizer, laconic.Divisible(40, 4, None, delay=2)) as worker:
            assert isinstance(worker.method, laconic.Divisible)
            move = torch.randn(40, generator=torch.Generator().manual_seed(worker.rank))
            expected = worker.x - torch.stack(worker.comm.all_gather(move)).mean(0)
            for step in range(8):
                model.weight.grad = (move if step == 0 else torch.zeros(40)).view_as(model.weight)
                optimizer.step()
            return expected, worker.x.clone(), worker.method._flights[-1].transfers[0].sent

    for expected, x, sent in laconic.spawn(run, 3):
        torch.testing.assert_close(x, expected)
        torch.testing.assert_close(sent, torch.zeros(10), rtol=0, atol=1e-6)


def test_a_slow_rank_changes_nothing_but_time() -> None:
    def run(method: laconic.Method) -> tuple[list[Tensor], list[Tensor]]:
        def slowly(model: nn.Module) -> torch.optim.Optimizer:
            optimizer = OPTIMIZERS["adam"](model)
            if rank() == 1:
                optimizer.register_step_pre_hook(lambda *_: time.sleep(0.01))
            return optimizer

        return train(method, OPTIMIZERS["adam"], 12), train(method, slowly, 12)

    methods = [METHODS["4 bits"], METHODS["two hops, late"]]
    for runs in laconic.spawn(lambda: [run(method) for method in methods], 3):
        for even, uneven in runs:
            assert all(torch.equal(x, y) for x, y in zip(even, uneven, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_alone_is_the_plain_optimizer_bit_for_bit(optimizer: str) -> None:
    alone = train_alone(OPTIMIZERS[optimizer], 12)
    for name, method in METHODS.items():
        path = train(method, OPTIMIZERS[optimizer], 12)
        assert all(torch.equal(x, y) for x, y in zip(path, alone, strict=True)), name


@given(
    d=st.integers(1, 40),
    ratio=st.integers(1, 60),
    period=st.integers(1, 60),
    delay=st.integers(1, 5),
)
def test_a_sweep_sends_every_entry_once_and_workers_that_are_equal_are_as_one(
    d: int, ratio: int, period: int, delay: int
) -> None:
    model = nn.Linear(d, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with laconic.Worker(model, optimizer, laconic.Divisible(ratio, period, None, delay=delay), comm=Mirror()) as worker:
        own = worker.method
        assert isinstance(own, laconic.Divisible)
        expected = worker.x.clone()
        sweep = -(-d // -(-d // period))  # steps
        sent: list[int] = []
        for step in range(max(sweep, delay) + 7):
            gradient = torch.randn(d, generator=torch.Generator().manual_seed(step))
            expected -= gradient
            model.weight.grad = gradient.view_as(model.weight)
            optimizer.step()
            if own._flights and own._flights[-1].due == worker.step + delay:
                sent += range(d)[own._flights[-1].piece]
            assert len(own._flights) == min(step + 1, delay, sweep)
            if step == sweep - 1:
                assert sorted(sent) == list(range(d))
        torch.testing.assert_close(worker.x, expected, rtol=1e-5, atol=1e-5)


@given(d=st.integers(1, 300), ratio=st.integers(1, 400), first=st.integers(1, 10**6))
def test_foreground_blocks_cover_every_entry_once_a_cycle(d: int, ratio: int, first: int) -> None:
    turns = -(-d // -(-d // ratio))
    assert turns <= ratio
    blocks = [foreground_block(step, d, ratio) for step in range(first, first + turns)]
    assert sorted(i for block in blocks for i in range(d)[block]) == list(range(d))
    assert all(len(range(d)[block]) <= -(-d // ratio) for block in blocks)


@given(d=st.integers(1, 2_000_000), period=st.integers(1, 200))
def test_pieces_cover_every_entry_once_a_sweep(d: int, period: int) -> None:
    pieces = [next_piece(0, d, period)]
    while pieces[-1].stop < d:
        pieces.append(next_piece(pieces[-1].stop, d, period))
    assert len(pieces) <= period
    assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
    assert all(piece.start < piece.stop for piece in pieces)
    if d >= 16 * GRAIN * period:
        assert all(piece.start % GRAIN == 0 for piece in pieces)
