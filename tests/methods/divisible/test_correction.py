"""The correction for non-iid data: it turns local gradients into the mean gradient, and cancels over workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from laconic.compress import Uniform
from laconic.methods.divisible.correction import Correction

D = 30


def constant_gradient(rank: int) -> Tensor:
    return torch.randn(1, D, generator=torch.Generator().manual_seed(rank))


def run(method: laconic.Divisible, steps: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Trains with a gradient that never changes. Returns the corrected gradients, the corrections, and the move."""
    model = nn.Linear(D, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen, shifts = [], []
    with laconic.Worker(model, optimizer, method) as worker:
        start = worker.x.clone()
        assert isinstance(worker.method, laconic.Divisible)
        for _ in range(steps):
            model.weight.grad = constant_gradient(worker.rank)
            optimizer.step()
            seen.append(model.weight.grad.flatten())
            assert worker.method._correction is not None
            shifts.append(worker.method._correction.shift.clone())
    return seen, shifts, worker.x - start


def test_gradients_that_do_not_change_become_the_mean_gradient() -> None:
    method = laconic.Divisible(30, 7, None, corrected=True, delay=2)
    expected = torch.stack([constant_gradient(rank).flatten() for rank in range(3)]).mean(0)
    for rank, (seen, _, _) in enumerate(laconic.spawn(run, 3, method, 10)):
        assert torch.equal(seen[0], constant_gradient(rank).flatten())
        torch.testing.assert_close(seen[-1], expected)


def test_corrections_of_all_workers_sum_to_zero() -> None:
    by_rank = laconic.spawn(run, 3, laconic.Divisible(30, 3, Uniform(4), corrected=True), 8)
    for shifts in zip(*(shifts for _, shifts, _ in by_rank), strict=True):
        torch.testing.assert_close(torch.stack(shifts).sum(0), torch.zeros(D), rtol=0, atol=1e-5)


def test_with_two_hops_they_sum_to_zero_over_time() -> None:
    """An owner's answer is quantized, so single corrections do not cancel, but the errors do not add up."""
    expected = -torch.stack([constant_gradient(rank).flatten() for rank in range(3)]).mean(0)
    errors = {}
    for steps in (20, 80):
        method = laconic.Divisible(30, 3, Uniform(4), corrected=True, hops=2)
        _, _, moved = laconic.spawn(run, 3, method, steps)[0]
        errors[steps] = (moved - steps * expected).abs().max().item()
    assert errors[80] < 1.5 * errors[20]
    assert errors[80] < 3.0  # gradients are of size 1, and levels up to half of that apart


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 20), st.integers(0, 5))
def test_the_mean_gradient_is_over_the_steps_since_the_piece_was_sent(
    waits: list[int], width: int, restart_after: int
) -> None:
    """Gradients are 1 everywhere, so every mean is 1, whenever a piece is sent."""
    d, step = 20, 0
    worker: Any = SimpleNamespace(x=torch.zeros(d), views=lambda vector: [vector], gradients=lambda: [torch.ones(d)])
    correction, start = Correction(worker, has_owners=False), 0
    for i, wait in enumerate(waits):
        for _ in range(wait):
            step += 1
            correction.before_step(worker)
        piece = slice(start, min(start + width, d))
        assert correction.take(piece, step).tolist() == [1.0] * len(range(d)[piece])
        start = piece.stop % d
        if i == restart_after:  # pieces have another width from here on: sums and the sweep begin anew
            correction.restart(step)
            start, width = 0, 21 - width
