"""Divisible with moments="common": workers with unlike data steer by where the others go."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.compress import Compressor, Sign, Uniform
from laconic.methods import steering
from tests.helpers import rank

D = 40_000  # enough for the kernels
STEPS = 40
CODE = Uniform(8)


class Training:
    """Gradients are what this rank's data is like, and noise of 1."""

    def __init__(self, unlike: float, sign: float = 1.0, period: Any = 4, code: Compressor = CODE) -> None:
        self.model = nn.Linear(D, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, maximize=sign < 0)
        self.worker = laconic.Worker(self.model, self.optimizer, laconic.Divisible(1024, period, background=code))
        self.method: Any = self.worker.method
        self.sign = sign
        self.kind = unlike * torch.randn(1, D, generator=torch.Generator().manual_seed(rank()))

    def run(self, start: int, stop: int) -> Tensor:
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(2 * step + rank())
            self.model.weight.grad = self.sign * (self.kind + torch.randn(1, D, generator=generator))
            self.optimizer.step()
        return self.worker.x.clone()

    @property
    def steering(self) -> steering.Steering:
        found: steering.Steering = self.method._common.steering
        return found


def test_alike_data_is_watched_in_some_blocks_and_not_steered() -> None:
    def run() -> tuple[bool, float]:
        training = Training(unlike=0.0)
        with training.worker:
            training.run(0, STEPS)
            return training.steering.is_on, float((training.steering.apart != 0).float().mean())

    for is_on, share in laconic.spawn(run, 2):
        assert not is_on
        assert 0.1 < share < 0.3  # one block of 2048 in each piece of 10,000, and what the foreground took


def test_unlike_data_is_steered_by_what_lasts() -> None:
    """Half the difference of two kinds has a variance of ½ and lasts, that of noise, weighted over four steps, ⅛."""

    def run() -> tuple[float, Tensor, Tensor]:
        with (training := Training(unlike=1.0)).worker:
            steered = training.run(0, STEPS)
            share = training.steering.share
        with pytest.MonkeyPatch.context() as patch, (training := Training(unlike=1.0)).worker:
            patch.setattr(steering, "LEAST_SHARE", 2.0)
            own = training.run(0, STEPS)
            assert not training.steering.is_on
        return share, steered, own

    (share, steered, own), (_, other_steered, other_own) = laconic.spawn(run, 2)
    assert share == pytest.approx(0.8, abs=0.08)
    assert (steered - other_steered).norm() < 0.8 * (own - other_own).norm()  # the rest is noise


def test_one_bit_shows_nothing_to_steer_by() -> None:
    """What it leaves out is told later, so that differences seem to last also where there is nothing but noise."""

    def run() -> tuple[float, float]:
        with (training := Training(unlike=0.0, code=Sign())).worker:
            training.run(0, STEPS)
            return max(training.steering.shares), training.steering.share

    assert laconic.spawn(run, 2) == [(0.0, 0.0)] * 2


def test_ascent_is_steered_the_same_way() -> None:
    def run() -> tuple[Tensor, Tensor]:
        paths = []
        for sign in (1.0, -1.0):
            with (training := Training(unlike=1.0, sign=sign)).worker:
                paths.append(training.run(0, STEPS))
                assert training.steering.share > 0.5
        return paths[0], paths[1]

    for down, up in laconic.spawn(run, 2):
        assert torch.equal(down, up)


@pytest.mark.parametrize(("unlike", "period"), [(0.0, 4.0), (1.0, 3.0)])
def test_auto_takes_a_shorter_period_for_unlike_data(unlike: float, period: float) -> None:
    def run() -> list[float]:
        periods = []
        with (training := Training(unlike, period="auto")).worker:
            pace = training.method._choice
            pace.add = lambda step, computing, transfer, add=pace.add: add(step, 1.0, 1e-3)  # a fast link
            for step in range(60):
                training.run(step, step + 1)
                periods.append(training.method.metrics()["period"])
        return periods

    results = laconic.spawn(run, 2)
    assert results[0] == results[1]
    assert results[0][20] == 4.0
    assert results[0][-1] == period


def test_resumes_bit_for_bit_while_steering() -> None:
    def run() -> tuple[Tensor, Tensor]:
        with (training := Training(unlike=1.0)).worker as worker:
            training.run(0, STEPS)
            assert training.steering.share > 0
            state = worker.state_dict()
            optimizer = training.optimizer.state_dict()
            state, optimizer = torch.load(_saved(state), weights_only=True), torch.load(_saved(optimizer))
            whole = training.run(STEPS, STEPS + 10)
        with (training := Training(unlike=1.0)).worker as worker:
            training.optimizer.load_state_dict(optimizer)
            worker.load_state_dict(state)
            return whole, training.run(STEPS, STEPS + 10)

    for whole, resumed in laconic.spawn(run, 2):
        assert torch.equal(whole, resumed)


def _saved(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file
