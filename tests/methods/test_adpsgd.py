from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from laconic.methods.averaging import Moments
from tests.helpers import OPTIMIZERS, build_model, rank, sgd, train, train_step
from tests.oracles.adpsgd import adpsgd
from tests.oracles.allreduce import allreduce

D = sum(p.numel() for p in build_model().parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_agrees_with_the_oracle_through_a_drop_of_the_learning_rate(optimizer: str) -> None:
    workers, steps = 4, 200
    lr = OPTIMIZERS[optimizer](build_model()).param_groups[0]["lr"]
    lr_at = {101: lr / 10}
    method = laconic.ADPSGD(initial_period=3, warmup=5, calibration=40, min_period=2, max_period=12)

    def run() -> tuple[list[Tensor], list[int], list[int], list[float]]:
        model = build_model(seed=rank())
        optimizer_ = OPTIMIZERS[optimizer](model)
        path, periods, rounds, variances = [], [], [], []
        with laconic.Worker(model, optimizer_, method) as worker:
            assert isinstance(worker.method, laconic.ADPSGD)
            for step in range(1, steps + 1):
                for group in optimizer_.param_groups:
                    group["lr"] = lr_at.get(step, group["lr"])
                train_step(model, optimizer_, worker.rank, step - 1)
                path.append(worker.x.clone())
                periods.append(worker.method.period)
                if worker.meter.last_step.calls("foreground"):
                    assert worker.meter.last_step.calls("foreground") == 1, "a round is one all-reduce"
                    rounds.append(step)
                    assert worker.method.variance is not None
                    variances.append(worker.method.variance)
        weights = [b - a for a, b in itertools.pairwise([0, *rounds])]
        assert worker.method.metrics() == {
            "period": periods[-1],
            "bits": 32.0,
            "rounds": len(rounds),
            "variance": variances[-1],
            "mean_variance": pytest.approx(sum(map(math.prod, zip(weights, variances, strict=True))) / rounds[-1]),
        }
        return path, periods, rounds, variances

    expected = adpsgd(
        OPTIMIZERS[optimizer], workers, steps, lr_at,
        initial_period=3, warmup=5, calibration=40, low=0.7, high=1.3, min_period=2, max_period=12,
    )  # fmt: skip
    results = laconic.spawn(run, workers)
    assert max(expected.period) > 6, "the drop of the learning rate must increase the period, or this test shows little"
    for worker, (path, periods, rounds, variances) in enumerate(results):
        assert rounds == expected.rounds
        assert periods == expected.period
        assert variances == results[0][3]
        assert variances == pytest.approx(expected.variance, rel=2e-2)
        for step in range(steps):
            torch.testing.assert_close(path[step], expected.x[step][worker], rtol=2e-3, atol=2e-4)
    for step in expected.rounds:
        assert all(torch.equal(path[step - 1], results[0][0][step - 1]) for path, *_ in results)
    assert not torch.equal(results[0][0][rounds[-2]], results[1][0][rounds[-2]]), "a step after a round"


def test_a_round_after_each_step_is_synchronous_sgd() -> None:
    """With momentum, Nesterov and weight decay, all linear in the gradient."""
    method = laconic.ADPSGD(initial_period=1, max_period=1, calibration=5)
    for path in laconic.spawn(train, 3, method, sgd, 30):
        for x, expected in zip(path, allreduce(sgd, 3, 30), strict=False):
            torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)


def test_without_bounds_it_is_local_sgd() -> None:
    unbounded = laconic.ADPSGD(initial_period=4, calibration=1, low=0.0, high=math.inf)
    for mine, other in zip(
        laconic.spawn(train, 3, unbounded, sgd, 30),
        laconic.spawn(train, 3, laconic.LocalSGD(4), sgd, 30),
        strict=True,
    ):
        assert all(torch.equal(x, y) for x, y in zip(mine, other, strict=True))


def rounds_of_noise(settings: list[tuple[float, float]], d: int = D, dtype: torch.dtype = torch.float32) -> list[Any]:
    """For each (scale, shift), moves x by scale · (noise + shift) and runs a round. Returns S, x before and x after."""
    results = []
    for scale, shift in settings:
        model = nn.Linear(d, 1, bias=False, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with laconic.Worker(model, optimizer, laconic.LocalSGD(1)) as worker:
            assert isinstance(worker.method, laconic.LocalSGD)
            start = worker.x.clone()
            noise = torch.randn(d, generator=torch.Generator().manual_seed(worker.rank), dtype=torch.float64)
            model.weight.grad = (-scale * (noise + shift)).to(dtype).view(1, d)
            optimizer.step()
            before = start + (scale * (noise + shift)).to(dtype)  # the step of SGD
            results.append((worker.method.variance, before.double(), worker.x.double().clone()))
    return results


@pytest.mark.parametrize(("d", "dtype"), [(500, torch.float32), (70_000, torch.float32), (500, torch.float64)])
def test_the_variance_is_that_of_the_definition(d: int, dtype: torch.dtype) -> None:
    """It is not negative, is unchanged by a common shift, and scales with the square."""
    settings = [(0.1, 0.0), (0.1, 3.0), (0.3, 0.0), (0.0, 0.0)]
    by_rank = laconic.spawn(rounds_of_noise, 3, settings, d, dtype)
    variances = []
    for of_setting in zip(*by_rank, strict=True):
        S = of_setting[0][0]
        assert all(other == S for other, _, _ in of_setting), "the same number on all ranks"
        before = torch.stack([x for _, x, _ in of_setting])
        assert pytest.approx((before - before.mean(0)).square().sum(1).mean().item(), rel=1e-4, abs=1e-12) == S
        for _, _, x in of_setting:
            torch.testing.assert_close(x, before.mean(0), rtol=1e-6, atol=1e-6)
        variances.append(S)
    assert variances[1] == pytest.approx(variances[0], rel=1e-4)
    assert variances[2] == pytest.approx(9 * variances[0], rel=1e-4)
    assert variances[3] == 0


def test_models_in_16_bits_have_a_variance_too() -> None:
    """x is bfloat16, and is sent in fp32."""
    by_rank = laconic.spawn(rounds_of_noise, 2, [(1.0, 0.0)], 500, torch.bfloat16)
    before = torch.stack([x for [(_, x, _)] in by_rank])
    assert by_rank[0][0][0] == pytest.approx((before - before.mean(0)).square().sum(1).mean().item(), rel=1e-2)
    assert torch.equal(by_rank[0][0][2], by_rank[1][0][2])


def test_payload_is_the_formula() -> None:
    def run(moments: Moments) -> tuple[int, int]:
        model = build_model()
        optimizer = torch.optim.Adam(model.parameters())
        method = laconic.ADPSGD(initial_period=2, warmup=3, calibration=4, moments=moments)
        with laconic.Worker(model, optimizer, method) as worker:
            for step in range(7):
                train_step(model, optimizer, worker.rank, step)
            return worker.meter.total.nbytes("foreground"), worker.meter.total.calls("foreground")

    n, rounds = 4, 5  # after steps 1, 2, 3, 5, 7
    assert laconic.spawn(run, n, "local") == [(rounds * round(2 * (n - 1) / n * (4 * D + 4)), rounds)] * n
    both = round(2 * (n - 1) / n * (4 * D + 4)) + 2 * round(2 * (n - 1) / n * 4 * D)
    assert laconic.spawn(run, n, "averaged") == [(rounds * both, 3 * rounds)] * n


def scripted(method: laconic.ADPSGD, script: list[tuple[float, float]]) -> list[int]:
    """Returns the periods after each of a sequence of (S, γ), one round per step."""
    periods = []
    for step, (S, lr) in enumerate(script, start=1):
        method.adapt(S, lr, step)
        periods.append(method.period)
    return periods


def test_a_scripted_variance_gives_an_exact_path() -> None:
    method = laconic.ADPSGD(initial_period=4, calibration=3, min_period=1, max_period=6)
    calibrating = [(0.1, 0.1), (0.4, 0.2), (0.3, 0.1)]  # S/γ = 1, 2, 3
    assert scripted(method, calibrating) == [4, 4, 4]
    assert pytest.approx(2.0) == method.C
    script = [
        (0.20, 0.1), (0.15, 0.1), (0.25, 0.1),  # between 0.7·γC and 1.3·γC
        (0.13, 0.1), (0.13, 0.1), (0.13, 0.1), (0.20, 0.2),  # below: up, as far as max_period
        (0.27, 0.1), (0.53, 0.2), (1.0, 0.1), (1.0, 0.1), (1.0, 0.1), (1.0, 0.1),  # above: down, as far as 1
    ]  # fmt: skip
    method.calibration = 0  # steps are counted from 1 again
    assert scripted(method, script) == [4, 4, 4, 5, 6, 6, 6, 5, 4, 3, 2, 1, 1]
    method.min_period, method.period = None, 4
    assert scripted(method, script) == [4, 4, 4, 5, 6, 6, 6, 5, 4, 4, 4, 4, 4], "down as far as initial_period"


@pytest.mark.parametrize("blank", [(0.0, 0.1), (0.2, 0.0), (0.0, 0.0)])
def test_where_there_is_nothing_to_compare_the_period_stays(blank: tuple[float, float]) -> None:
    method = laconic.ADPSGD(initial_period=4, calibration=1)
    assert scripted(method, [(0.2, 0.1), blank, blank]) == [4, 4, 4]
    assert pytest.approx(2.0) == method.C


def test_a_calibration_without_variance_or_learning_rate() -> None:
    no_variance = laconic.ADPSGD(initial_period=4, calibration=2)
    assert scripted(no_variance, [(0.0, 0.1)] * 3 + [(5.0, 0.1)] * 3) == [4] * 6, "C = 0: nothing to compare with"
    no_rate = laconic.ADPSGD(initial_period=4, calibration=2)
    assert scripted(no_rate, [(0.0, 0.0)] * 4 + [(0.2, 0.1), (0.1, 0.1), (0.1, 0.1)]) == [4] * 5 + [5, 6]
    assert pytest.approx(2.0) == no_rate.C, "the first round with a learning rate above 0 ends the calibration"


@given(
    script=st.lists(st.tuples(st.floats(0, 1e30), st.floats(0, 1e3)), max_size=60),
    least=st.none() | st.just(1),
    initial=st.integers(1, 9),
    maximum=st.integers(9, 12),
)
def test_the_period_stays_in_its_bounds_and_moves_by_one(
    script: list[tuple[float, float]], least: int | None, initial: int, maximum: int
) -> None:
    method = laconic.ADPSGD(initial_period=initial, min_period=least, max_period=maximum, calibration=5)
    periods = [initial, *scripted(method, script)]
    assert all((least or initial) <= period <= maximum for period in periods)
    assert all(abs(a - b) <= 1 for a, b in itertools.pairwise(periods))
    assert periods[:6] == [initial] * len(periods[:6])


def test_calibration_by_default() -> None:
    assert laconic.ADPSGD().calibration_end == 80, "10 rounds"
    assert laconic.ADPSGD(initial_period=3, warmup=5).calibration_end == 35
    assert laconic.ADPSGD(total_steps=1000, warmup=50).calibration_end == 300
    assert laconic.ADPSGD(total_steps=1000, warmup=50, calibration=10).calibration_end == 60


def test_with_defaults_there_are_never_more_rounds_than_with_local_sgd_8() -> None:
    """In runs of every length, also where workers drift apart faster after the calibration."""

    def run(lr_at: dict[int, float]) -> list[int]:
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        rounds = []
        with laconic.Worker(model, optimizer, laconic.ADPSGD()) as worker:
            assert isinstance(worker.method, laconic.ADPSGD)
            for step in range(1, 201):
                optimizer.param_groups[0]["lr"] = lr_at.get(step, optimizer.param_groups[0]["lr"])
                train_step(model, optimizer, worker.rank, step - 1)
                rounds.append(worker.method.rounds)
        return rounds

    def both() -> list[list[int]]:
        return [run({81: 0.1}), run({81: 1e-4})]

    growing, falling = laconic.spawn(both, 2)[0]
    local_sgd = [step // 8 for step in range(1, 201)]
    assert growing == local_sgd, "S / γ grows with γ: the period would fall below 8"
    assert all(mine <= other for mine, other in zip(falling, local_sgd, strict=True))
    assert falling[-1] < local_sgd[-1], "the period follows the variance"


def go_on(directory: Path, load: bool, steps: int, save_at: tuple[int, ...]) -> list[tuple[Tensor, int, float | None]]:
    model = build_model(seed=rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    method = laconic.ADPSGD(initial_period=3, warmup=2, calibration=12, moments="averaged")
    path = []
    with laconic.Worker(model, optimizer, method) as worker:
        assert isinstance(worker.method, laconic.ADPSGD)
        if load:
            worker.load(directory)
        for step in range(worker.step, steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 if step < 15 else 1e-3
            train_step(model, optimizer, worker.rank, step)
            path.append((worker.x.clone(), worker.method.period, worker.method.variance))
            if step + 1 in save_at:
                worker.save(directory / str(step + 1))
    return path


def test_resumed_in_the_middle_of_calibration_and_after_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    steps, save_at = 50, (9, 31)  # neither ends with a round
    whole = laconic.spawn(go_on, 3, tmp_path, False, steps, save_at)
    assert len({period for _, period, _ in whole[0]}) > 2
    for saved in save_at:
        resumed = laconic.spawn(go_on, 3, tmp_path / str(saved), True, steps, ())
        for mine, expected in zip(resumed, whole, strict=True):
            assert len(mine) == steps - saved
            for (x, period, variance), (x_, period_, variance_) in zip(mine, expected[saved:], strict=True):
                assert torch.equal(x, x_)
                assert (period, variance) == (period_, variance_)


def test_identical_workers_have_no_variance_and_hold_the_period() -> None:
    def run() -> tuple[float | None, int]:
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, laconic.ADPSGD(initial_period=2, calibration=4)) as worker:
            assert isinstance(worker.method, laconic.ADPSGD)
            for step in range(20):
                train_step(model, optimizer, 0, step)  # the data of rank 0 on all
            return worker.method.variance, worker.method.period

    assert laconic.spawn(run, 3) == [(0.0, 2)] * 3


def test_a_learning_rate_of_0_holds_the_period() -> None:
    def run() -> tuple[float | None, int, float]:
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with laconic.Worker(model, optimizer, laconic.ADPSGD(initial_period=2, calibration=4)) as worker:
            assert isinstance(worker.method, laconic.ADPSGD)
            for step in range(12):
                train_step(model, optimizer, worker.rank, step)
            return worker.method.variance, worker.method.period, worker.method.C

    assert laconic.spawn(run, 2) == [(0.0, 2, 0.0)] * 2


def test_alone_the_period_stays_and_the_variance_is_0() -> None:
    model = build_model()
    optimizer = sgd(model)
    with laconic.Worker(model, optimizer, laconic.ADPSGD(initial_period=2, calibration=2)) as worker:
        for step in range(9):
            train_step(model, optimizer, 0, step)
        assert worker.method.metrics() == {
            "period": 2.0,
            "bits": 32.0,
            "rounds": 4.0,
            "variance": 0.0,
            "mean_variance": 0.0,
        }


def test_nan_on_one_rank_raises_on_all_and_names_it() -> None:
    def run() -> str:
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with laconic.Worker(model, optimizer, laconic.ADPSGD(initial_period=2)) as worker:
                for step in range(4):
                    if worker.rank == 1 and step == 2:
                        worker.x[3] = math.nan
                    train_step(model, optimizer, worker.rank, step)
        except FloatingPointError as error:
            return str(error)
        return "nothing happened"

    assert laconic.spawn(run, 3) == ["mean at step 4: NaN or infinity on rank 1"] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial_period": 0}, "initial_period must be a whole number, at least 1, not 0"),
        ({"initial_period": 65}, "initial_period must be at most max_period=64, not 65"),
        ({"min_period": 0}, "min_period must be a whole number, at least 1, not 0"),
        ({"min_period": 9}, "min_period must be at most initial_period=8, not 9"),
        ({"warmup": -1}, "warmup must be a whole number, at least 0, not -1"),
        ({"total_steps": 1.5}, "total_steps must be a whole number, at least 1, not 1.5"),
        ({"calibration": 0}, "calibration must be a whole number, at least 1, not 0"),
        ({"low": -0.1}, "low must be a finite number at least 0, not -0.1"),
        ({"low": 2.0}, "low must be at least 0 and less than high=1.3, not 2.0"),
        ({"high": math.nan}, "high must be a finite number, not nan"),
        ({"moments": "all"}, "moments must be one of local, averaged, not 'all'"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        laconic.ADPSGD(**settings)


def test_learning_rates_that_differ_between_ranks_are_noticed() -> None:
    """Rank 1's learning rate falls, as by a scheduler that sees the local validation loss: the periods would differ."""

    def run() -> str:
        model = build_model()
        optimizer = sgd(model)
        method = laconic.ADPSGD(initial_period=1, calibration=4)
        try:
            with laconic.Worker(model, optimizer, method, timeout=60) as worker:
                for step in range(40):
                    if step == 10 and worker.rank == 1:
                        optimizer.param_groups[0]["lr"] /= 1e6
                    train_step(model, optimizer, worker.rank, step)
        except (ValueError, laconic.PeerError) as error:
            return str(error)
        return "no error"

    for text in laconic.spawn(run, 2):
        assert "a new period" in text or "the learning rate must be the same on all ranks" in text
