"""Divisible with moments="common": Adam on the mean gradient, a few steps late."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from laconic.comm import Solo
from laconic.compress import Compressor, Log, Pick, Sign, Ternary, Uniform
from laconic.methods import windows
from laconic.methods.carried import Codes
from laconic.methods.common import CommonAdam
from laconic.methods.pieces import Piece
from laconic.methods.ranges import Ranges
from laconic.methods.windows import Cut, Run, Step, Vectors, Window
from tests.helpers import adam, build_model, rank, train, train_step
from tests.oracles.allreduce import allreduce
from tests.oracles.common_adam import common_adam


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


OPTIMIZERS = {"adam": adam, "adamw": adamw}
ORACLE: dict[int, list[tuple[str, int, int, int, Compressor | None, int]]] = {
    # workers: optimizer, ratio, period, delay, background, hops
    # (few with many: on two cores, four wait long for each other)
    2: [("adam", 8, 2, 2, None, 1), ("adamw", 1024, 4, 1, Uniform(8), 1), ("adam", 83, 1, 1, None, 1)],
    3: [("adamw", 16, 5, 3, None, 1), ("adam", 16, 4, 1, Uniform(8), 2)],
    4: [("adam", 16, 3, 1, Uniform(8), 1)],
}


@pytest.mark.parametrize("workers", ORACLE)
def test_agrees_with_the_oracle_for_200_steps(workers: int) -> None:
    steps = 200

    def run() -> list[list[Tensor]]:
        return [
            train(
                laconic.Divisible(ratio, period, "common", background, delay=delay, hops=hops),  # type: ignore[arg-type]
                OPTIMIZERS[optimizer],
                steps,
            )
            for optimizer, ratio, period, delay, background, hops in ORACLE[workers]
        ]

    results = laconic.spawn(run, workers)
    for case, (optimizer, *settings) in enumerate(ORACLE[workers]):
        expected = common_adam(OPTIMIZERS[optimizer], workers, steps, *settings)
        for worker in range(workers):
            torch.testing.assert_close(
                torch.stack(results[worker][case][:steps]),
                torch.stack([x[worker] for x in expected]),
                rtol=1e-3,
                atol=1e-3,  # where a code is rounded the other way
                msg=lambda text, case=case: f"case {case}, (step, coordinate): {text}",  # type: ignore[misc]
            )


def test_with_everything_in_the_foreground_it_is_full_communication() -> None:
    def run() -> list[Tensor]:
        return train(laconic.Divisible(ratio=1, period=3, background=None), adamw, 50)

    for path in laconic.spawn(run, 3):
        torch.testing.assert_close(path[-1], allreduce(adamw, 3, 50)[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("workers", "unlike", "settings"),
    [
        (2, 0.0, {"period": 3, "background": None, "delay": 3}),
        (3, 2.0, {"period": 4, "background": Log(3), "delay": 2}),
        (4, 1.0, {"period": 2, "background": Log(3), "hops": 2}),
        (3, 0.0, {"period": "auto", "moments": "common", "background": Log(3)}),
    ],
)
def test_invariants_also_while_messages_are_in_flight(workers: int, unlike: float, settings: Any) -> None:
    """The common vectors are the same everywhere, and the mean of m is that of the mean gradient, whatever codes lose,
    but for what workers steer by. (With two hops, owners hold back what their codes lose.)
    """
    d, steps = 83, 30

    def run() -> list[tuple[Tensor, Tensor, Tensor, int, float]]:
        model = nn.Linear(d, 1, bias=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        own_kind = unlike * torch.randn(1, d, generator=torch.Generator().manual_seed(rank()))
        seen = []
        with laconic.Worker(model, optimizer, laconic.Divisible(8, **settings)) as worker:
            own: Any = worker.method
            for step in range(steps):
                generator = torch.Generator().manual_seed(100 * step + worker.rank)
                gradient = own_kind + torch.randn(1, d, generator=generator)
                model.weight.grad = gradient.clone()
                optimizer.step()
                common = torch.cat([own.x_hat, own._common.m_hat, own._common.v_hat])
                m = worker.moments()["exp_avg"].clone()
                steering = own._common.steering
                for part, _, steered in own._common._runs(slice(0, d)):
                    m[part] -= steering.apart[part] * steered
                mean = worker.comm.mean(gradient.view(-1))
                seen.append((common, m, mean, len(own._flying), steering.share))
        assert len(own._flying) == 0
        return seen

    expected = torch.zeros(d)
    by_step = list(zip(*laconic.spawn(run, workers), strict=True))
    assert max(ranks[0][3] for ranks in by_step) >= settings.get("delay", 1)
    if unlike:
        assert by_step[-1][0][4] > 0.2
    for ranks in by_step:
        assert all(torch.equal(common, ranks[0][0]) for common, *_ in ranks)
        assert ranks[0][0][2 * d :].min() >= 0
        expected = 0.9 * expected + 0.1 * ranks[0][2]
        if settings.get("hops") != 2:
            torch.testing.assert_close(torch.stack([m for _, m, *_ in ranks]).mean(0), expected, rtol=0, atol=2e-6)


@given(
    st.lists(st.floats(1e-4, 1e-2), min_size=1, max_size=6),
    st.lists(st.floats(1e-4, 1e-2), max_size=3),
    st.integers(0, 1000),
    st.floats(0, 0.1),
    st.integers(1, 6000),
    st.lists(st.integers(1, 6000), max_size=3),
    st.booleans(),
    st.sampled_from([0.0, 0.4]),
)
def test_kernels_give_the_same_bits(
    rates: list[float],
    since: list[float],
    count: int,
    weight_decay: float,
    d: int,
    ends: list[int],
    has_units: bool,
    share: float,
) -> None:
    group = {
        "lr": 0.0,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": weight_decay,
        "decoupled_weight_decay": True,
    }
    made, after = ([Step.of(group | {"lr": rate}) for rate in each] for each in (rates, since))
    window = Window.of(group, made, count, [share] * len(made))
    now = Window.of(group, after, count + len(made), [share] * len(after))
    generator = torch.Generator().manual_seed(d)
    values = torch.randn(9, d, generator=generator) * torch.exp(3 * torch.randn(9, d, generator=generator))
    values[[2, 5]] = values[[2, 5]].square() * (torch.rand(2, d, generator=generator) > 0.1)
    from laconic.methods import windows_kernels

    ours, theirs = values.clone(), values.clone()
    mine, yours = Vectors(*ours[:7]), Vectors(*theirs[:7])
    least = torch.rand(-(-d // 2048), generator=generator) if has_units else None
    bounds = sorted({0, d, *(end for end in ends if end < d)})
    parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
    cuts = [Cut(part, window, now) for part in parts[::2]]  # some are passed over
    sums = windows.make_up(mine, ours[7], ours[8], cuts, least, share > 0, True)
    watched = windows_kernels.make_up(
        windows_kernels.arrays_of(yours), theirs[7], theirs[8], cuts, least, share > 0, True
    )
    assert torch.equal(ours[:6], theirs[:6])
    if share == 0:  # kept up in one block of some
        assert torch.equal(yours.apart[:2048], mine.apart[:2048])
        assert torch.equal(yours.apart[2048:], values[6, 2048:])
    else:
        assert torch.equal(yours.apart, mine.apart)
    if cuts == [Cut(slice(0, d), window, now)] and d <= 2048:
        assert watched == pytest.approx(sums, rel=1e-3, abs=1e-5 * abs(values[6]).max().item())
    runs = [Run(part, 0.7**i, share) for i, part in enumerate(parts)]
    gain = windows.gain(mine, runs, least)
    assert torch.equal(gain, windows_kernels.gain(windows_kernels.arrays_of(mine), runs, least))

    least = windows.least_units(ours[2])
    gain = windows.gain(mine, runs, least)
    for compressor in (Uniform(4), Uniform(8), Log(3), Uniform(4, stochastic=True), Ternary(), Pick(), Pick(4), Sign()):
        code, of_block = compressor.encode(gain, step=3), torch.empty_like(least)
        out = torch.empty_like(code)
        assert windows_kernels.encode(windows_kernels.arrays_of(mine), runs, compressor, 3, of_block, out)
        assert torch.equal(out, code)
        assert torch.equal(of_block, least)


@pytest.mark.parametrize(
    ("period", "hops", "background", "rel"),
    # Half of a surprise is taken for noise, and what codes lose looks like noise.
    [(1, 1, None, 0.03), (5, 1, None, 0.3), (5, 1, Uniform(4), 0.2), (3, 2, Uniform(4), 0.2)],
)
def test_v_is_about_that_of_the_mean_gradient(period: int, hops: Any, background: Any, rel: float) -> None:
    """Gradients of 1 with a noise of 2: own squares are 5, those of the mean of three 1 + 4/3."""
    d, steps = 4000, 120

    def run() -> float:
        model = nn.Linear(d, 1, bias=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, betas=(0.9, 0.99))
        method = laconic.Divisible(1024, period, None, background, hops=hops)
        with laconic.Worker(model, optimizer, method) as worker:
            own: Any = worker.method
            generator = torch.Generator().manual_seed(worker.rank)
            for _ in range(steps):
                model.weight.grad = 1 + 2 * torch.randn(1, d, generator=generator)
                optimizer.step()
            v: Tensor = own._common.v_hat / (1 - 0.99**steps)
            return v.mean().item()

    assert laconic.spawn(run, 3)[0] == pytest.approx(1 + 4 / 3, rel=rel)


def test_unlike_data_moves_all_workers_alike() -> None:
    """One has gradients of +3, the other of −1: both go down, as Adam does with the mean of 1.

    (Not quite as far: of gradients that are seen for the first time, any part may be noise.)
    """

    def run() -> Tensor:
        model = nn.Linear(500, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, laconic.Divisible(1024, 4)) as worker:
            for _ in range(60):
                model.weight.grad = torch.full((1, 500), 3.0 if worker.rank == 0 else -1.0)
                optimizer.step()
            return worker.x.clone()

    for x in laconic.spawn(run, 2):
        torch.testing.assert_close(x, torch.full((500,), -6.0), rtol=0.25, atol=0)


@pytest.mark.parametrize("background", [Uniform(4), Ternary(), Pick()])
def test_after_a_drain_own_steps_are_as_long_as_before(background: Any) -> None:
    """Small gradients beside large ones are in no code, so that v̂ does not know of them, and m keeps them."""

    def run() -> list[float]:
        model = nn.Linear(4000, 1, bias=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        lengths = []
        with laconic.Worker(model, optimizer, laconic.Divisible(1024, 4, background=background)) as worker:
            for step in range(12):
                before = worker.x.clone()
                model.weight.grad = torch.full((1, 4000), 1e-4 if step <= 4 else 0.0)
                model.weight.grad[:, ::100] = 1.0
                optimizer.step()
                lengths.append((worker.x - before).abs().max().item())
                if step == 4:
                    worker.method.drain(worker)
        return lengths

    for lengths in laconic.spawn(run, 2):
        assert max(lengths) < 6e-3


def test_parameter_groups_have_their_own_settings() -> None:
    """Two groups, one without a learning rate from step 5 on, and rates that change: as with full communication."""

    def run(method: laconic.Method) -> Tensor:
        model = build_model()
        first, *rest = model.parameters()
        optimizer = torch.optim.AdamW(
            [{"params": rest, "lr": 0.01}, {"params": [first], "betas": (0.8, 0.99)}], lr=0.02
        )
        with laconic.Worker(model, optimizer, method) as worker:
            for step in range(40):
                optimizer.param_groups[1]["lr"] = 0.02 if step < 5 else 0.0
                train_step(model, optimizer, worker.rank, step)
        return worker.x

    for full, ours in laconic.spawn(lambda: (run(laconic.AllReduce()), run(laconic.Divisible(1, 2, None, None))), 2):
        torch.testing.assert_close(ours, full, rtol=1e-4, atol=1e-5)


def test_goes_on_from_an_earlier_training() -> None:
    """v was 5 and m 1 for long; gradients are 1 still, so v falls slowly, as Adam's own does."""
    steps, d = 12, 300

    def run() -> tuple[Tensor, Tensor]:
        model = nn.Linear(d, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        old = {"step": torch.tensor(1e4), "exp_avg": torch.ones(1, d), "exp_avg_sq": torch.full((1, d), 5.0)}
        optimizer.state[model.weight] = old
        with laconic.Worker(model, optimizer, laconic.Divisible(8, 3)) as worker:
            for _ in range(steps):
                model.weight.grad = torch.ones(1, d)
                optimizer.step()
            return worker.moments()["exp_avg_sq"].clone(), worker.x.clone()

    for v, x in laconic.spawn(run, 2):
        torch.testing.assert_close(v, torch.full((d,), 1 + 4 * 0.999**steps), rtol=1e-3, atol=0)
        torch.testing.assert_close(x, torch.full((d,), -steps * 1e-3 / 5**0.5), rtol=1e-2, atol=0)


def test_an_optimizer_that_has_made_other_steps_on_one_rank() -> None:
    def run() -> str:
        model = nn.Linear(5, 1, bias=False)
        optimizer = torch.optim.Adam(model.parameters())
        if rank() == 1:
            old = {"step": torch.tensor(7.0), "exp_avg": torch.ones(1, 5), "exp_avg_sq": torch.ones(1, 5)}
            optimizer.state[model.weight] = old
        with pytest.raises(ValueError) as error, laconic.Worker(model, optimizer, laconic.Divisible(8, 3)):
            model.weight.grad = torch.ones(1, 5)
            optimizer.step()
        return str(error.value)

    for text in laconic.spawn(run, 2):
        assert "the same number of steps with all parameters, on all ranks, not [0] on rank 0; [7] on rank 1" in text


def test_saved_before_the_first_step(tmp_path: Any) -> None:
    """An optimizer with an earlier training's m and v, which a checkpoint at step 0 must not hide."""

    def run() -> tuple[Tensor, Tensor]:
        results = []
        for saves in (True, False):
            model = nn.Linear(50, 1, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            old = {"step": torch.tensor(1e4), "exp_avg": torch.ones(1, 50), "exp_avg_sq": torch.full((1, 50), 5.0)}
            optimizer.state[model.weight] = old
            with laconic.Worker(model, optimizer, laconic.Divisible(8, 3)) as worker:
                if saves:
                    worker.save(tmp_path)
                    worker.load(tmp_path)
                for _ in range(5):
                    model.weight.grad = torch.ones(1, 50)
                    optimizer.step()
            results.append(worker.x.clone())
        return results[0], results[1]

    for with_save, without in laconic.spawn(run, 2):
        assert torch.equal(with_save, without)


@pytest.mark.parametrize(
    ("d", "settings"),
    [
        (6, {"period": 4, "hops": 2}),
        (5, {"period": 4, "delay": 4, "hops": 1}),
        (1, {"period": 2, "background": None}),
        (1103, {"period": 110, "hops": 2}),  # large enough for the kernels
    ],
)
def test_few_coordinates(d: int, settings: Any) -> None:
    """Fewer than workers and pieces: rows that have ended, and sweeps that are shorter than the period."""

    def run() -> Tensor:
        model = nn.Linear(d, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, laconic.Divisible(10**6, moments="common", **settings)) as worker:
            own: Any = worker.method
            for _ in range(max(40, settings["period"] + 5)):
                model.weight.grad = torch.full((1, d), 1.0 + worker.rank)
                optimizer.step()
                flying = [i for piece in own._flying for part in piece.parts for i in range(part.start, part.stop)]
                assert len(flying) == len(set(flying)), "nothing is on its way twice"
        return worker.x.clone()

    results = laconic.spawn(run, 5)
    for x in results:
        assert torch.equal(x, results[0])
        if settings["period"] < 40:
            torch.testing.assert_close(x, torch.full((d,), -4.0), rtol=0.3, atol=0)


def test_a_parameter_that_only_one_worker_has_gradients_for() -> None:
    def run() -> tuple[Tensor, Tensor]:
        model = nn.ParameterList([torch.zeros(40), torch.zeros(60)])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, laconic.Divisible(8, 2)) as worker:
            for _ in range(30):
                model[0].grad = torch.ones(40)
                model[1].grad = torch.ones(60) if worker.rank == 1 else None
                optimizer.step()
            return model[0].detach().clone(), model[1].detach().clone()

    for both, one in laconic.spawn(run, 2):
        torch.testing.assert_close(both, torch.full((40,), -3.0), rtol=0.25, atol=0)
        torch.testing.assert_close(one, torch.full((60,), -3.0), rtol=0.25, atol=0)


@pytest.mark.parametrize(
    ("background", "name", "value"), [(None, "lr", 0.011), (Uniform(4), "lr", 0.011), (Uniform(4), "weight_decay", 0.2)]
)
def test_settings_that_differ_between_ranks_are_noticed(background: Any, name: str, value: float) -> None:
    def run() -> str:
        model = build_model()
        optimizer = adamw(model)
        with (
            pytest.raises(ValueError) as error,
            laconic.Worker(model, optimizer, laconic.Divisible(8, 2, background=background)) as worker,
        ):
            for step in range(10):
                if worker.rank == 1 and step == 6:
                    optimizer.param_groups[0][name] = value
                train_step(model, optimizer, worker.rank, step)
        return str(error.value)

    usual = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    by_rank = [list(usual.values()), list((usual | {name: value}).values()), list(usual.values())]
    for text in laconic.spawn(run, 3):
        assert text == (
            "lr, beta1, beta2, eps, weight_decay must be the same on all ranks, and at step 7 are, group by group, "
            + "; ".join(f"{numbers} on rank {rank}" for rank, numbers in enumerate(by_rank))
        )


def test_weight_decay_that_a_schedule_changes() -> None:
    """What is made up for later has the decay of its step: with no gradients, x is what AdamW alone makes of it."""
    d, steps = 40, 25

    def run() -> tuple[Tensor, Tensor]:
        models = [nn.Linear(d, 1, bias=False) for _ in range(2)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
        torch.nn.init.ones_(models[0].weight)
        torch.nn.init.ones_(models[1].weight)
        with laconic.Worker(models[0], optimizers[0], laconic.Divisible(64, 3, "common", Uniform(4))):
            for step in range(steps):
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.param_groups[0]["weight_decay"] = 0.02 * step
                    model.weight.grad = torch.zeros_like(model.weight)
                    optimizer.step()
        return models[0].weight.detach().clone(), models[1].weight.detach().clone()

    for together, alone in laconic.spawn(run, 2):
        assert alone.max() < 0.7
        torch.testing.assert_close(together, alone)


def some_weights(model: nn.Module) -> None:
    with torch.no_grad():
        model.weight[0, 100:120] += 0.1  # type: ignore[operator,index]


def clamp_in_a_hook(optimizer: Any, args: Any, kwargs: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.data.clamp_(min=-0.0005)


@pytest.mark.parametrize("accident", ["before the first step", "after loading", "once", "one weight", "a hook"])
def test_changes_of_x_beside_the_optimizer_are_refused(accident: str) -> None:
    """They would be lost when x is made anew. Evaluating with other weights is none, when they are back after it."""
    d = 4000

    def run() -> tuple[str, int]:
        model = nn.Linear(d, 1, bias=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        if accident == "a hook":
            optimizer.register_step_post_hook(clamp_in_a_hook)  # before the worker's own
        with (
            pytest.raises((ValueError, laconic.PeerError)) as error,
            laconic.Worker(model, optimizer, laconic.Divisible(1024, 4)) as worker,
        ):
            hit = worker.rank == 1
            for step in range(40):
                if step == 20 and accident == "after loading":
                    worker.load_state_dict(worker.state_dict())
                if hit and (step, accident) in [(0, "before the first step"), (20, "after loading"), (20, "once")]:
                    some_weights(model)
                if hit and accident == "one weight":
                    model.weight.data[0, 77] += 0.1
                if step == 10:
                    with worker.consensus():
                        some_weights(model)
                    own = model.weight.detach().clone()
                    some_weights(model)
                    model.weight.data.copy_(own)
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
        return str(error.value), worker.step

    (other, _), (own, step) = laconic.spawn(run, 2)
    expected = {"before the first step": [1], "after loading": [21], "once": [21], "a hook": range(2, 10)}
    assert step in expected.get(accident, range(2, 18)), "one weight in 256 is looked at, and 15 steps later all were"
    text = (
        f"with moments='common' parameters must be changed by optimizer.step() alone, and between steps {step - 1} and "
        f"{step} something else has changed some: such changes would be lost; moments='local' keeps them (weights to "
        f"begin with: before the worker is made)"
    )
    assert own == text
    assert accident == "a hook" or f"rank 1 failed at step {step}: ValueError: {own}" in other


class Shorter(torch.optim.Adam):
    """Not Adam's steps."""

    def step(self, closure: Any = None) -> Any:
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        super().step(closure)
        with torch.no_grad():
            for p, x in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
                p.copy_(x + 0.1 * (p - x))


class Renamed(torch.optim.AdamW):
    """Its steps are."""


def test_only_steps_of_adam_are_taken_for_such() -> None:
    d, steps = 64, 20

    def run() -> list[tuple[bool, float]]:
        results = []
        adam(build_model())  # from the first on, torch runs hooks also when a subclass calls Adam's step
        for kind in (Shorter, Renamed):
            model = nn.Linear(d, 1, bias=False)
            torch.nn.init.zeros_(model.weight)
            optimizer = kind(model.parameters(), lr=0.01)
            with laconic.Worker(model, optimizer, laconic.Divisible(8, 2)) as worker:
                own: Any = worker.method
                for _ in range(steps):
                    model.weight.grad = torch.ones_like(model.weight)
                    optimizer.step()
                assert worker.step == steps
                is_common = own._common is not None
            results.append((is_common, model.weight.mean().item()))
        return results

    for (shorter_is_common, shorter), (renamed_is_common, renamed) in laconic.spawn(run, 2):
        assert not shorter_is_common
        assert shorter == pytest.approx(-0.001 * steps, rel=0.01)
        assert renamed_is_common
        assert renamed == pytest.approx(-0.01 * steps, rel=0.2)


def test_betas_that_a_schedule_changes() -> None:
    """OneCycleLR changes β₁ beside the learning rate: the mean of m is that of the mean gradient all the same."""
    d, steps = 300, 40

    def run() -> tuple[Tensor, Tensor]:
        model = nn.Linear(d, 1, bias=False)
        optimizer = adamw(model)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)
        expected = torch.zeros(d)
        with laconic.Worker(model, optimizer, laconic.Divisible(64, 3, background=None)) as worker:
            own: Any = worker.method
            for step in range(steps - 1):
                gradient = torch.randn(1, d, generator=torch.Generator().manual_seed(10 * step + worker.rank))
                model.weight.grad = gradient.clone()
                beta = optimizer.param_groups[0]["betas"][0]
                optimizer.step()
                schedule.step()
                expected = beta * expected + (1 - beta) * worker.comm.mean(gradient.view(-1))
            m = worker.moments()["exp_avg"].clone()
            for part, _, steered in own._common._runs(slice(0, d)):
                m[part] -= own._common.steering.apart[part] * steered
            assert 0.85 < beta < 0.96
            return worker.comm.mean(m), expected

    for m, expected in laconic.spawn(run, 2):
        torch.testing.assert_close(m, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_numbers_than_fp32(dtype: torch.dtype) -> None:
    def run() -> Tensor:
        model = nn.Linear(1500, 1, bias=False, dtype=dtype)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, laconic.Divisible(64, 4)) as worker:
            for _ in range(30):
                model.weight.grad = torch.full((1, 1500), 3.0 if worker.rank == 0 else 1.0, dtype=dtype)
                optimizer.step()
            return worker.x.float()

    for x in laconic.spawn(run, 2):
        torch.testing.assert_close(x, torch.full((1500,), -3.0), rtol=0.3, atol=0)


def test_a_gradient_that_is_not_finite_is_named_on_all_ranks() -> None:
    def run() -> str:
        model = nn.Linear(5000, 1, bias=False)
        optimizer = adam(model)
        method = laconic.Divisible(ratio=1)  # so that the foreground has it first
        with pytest.raises(FloatingPointError) as error, laconic.Worker(model, optimizer, method) as worker:
            for step in range(5):
                model.weight.grad = torch.randn(1, 5000)
                if worker.rank == 1 and step == 3:
                    model.weight.grad[0, 77] = float("nan")
                optimizer.step()
        return str(error.value)

    assert laconic.spawn(run, 3) == ["foreground at step 4: NaN or infinity on rank 1"] * 3


def test_which_moments_when_none_are_asked_for() -> None:
    def run() -> list[bool]:
        found = []
        for optimize in (
            torch.optim.Adam,
            torch.optim.AdamW,
            lambda p: torch.optim.Adam(p, weight_decay=0.1),
            lambda p: torch.optim.Adam(p, amsgrad=True),
            torch.optim.NAdam,
            lambda p: torch.optim.SGD(p, lr=0.1),
        ):
            model = nn.Linear(5, 1)
            with laconic.Worker(model, optimize(model.parameters()), laconic.Divisible(8, 2)) as worker:
                own: Any = worker.method
                found.append(own._common is not None)
        return found

    assert laconic.spawn(run, 2) == [[True, True, True, False, False, False]] * 2


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), {}, "moments='common' is for Adam and AdamW, not SGD"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), {}, "moments='common' needs amsgrad=False"),
        (lambda p: torch.optim.Adam(p, eps=0.0), {}, "moments='common' needs eps above 0: "),
        (
            torch.optim.Adam,
            {"period": 2, "hops": 2, "delay": 2},
            "moments='common' needs a period of at least the 4 steps that a piece is on its way, not 2",
        ),
        (torch.optim.Adam, {"max_period": 3, "delay": 5}, "at least the 5 steps that a piece is on its way, not 3"),
    ],
)
def test_what_it_is_not_for(build: Any, settings: Any, message: str) -> None:
    def run() -> str:
        model = nn.Linear(5, 1)
        with pytest.raises(ValueError, match=message) as error:
            laconic.Worker(model, build(model.parameters()), laconic.Divisible(moments="common", **settings))
        return str(error.value)

    assert len(set(laconic.spawn(run, 2))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "moments must be the same on all ranks, and are common; local"),
        ({"maximize": True}, "settings of the optimizer must be the same on all ranks, and are .*False.*; .*True"),
    ],
)
def test_ranks_whose_optimizers_differ(options: Any, message: str) -> None:
    def run() -> str:
        model = nn.Linear(5, 1)
        optimizer = torch.optim.Adam(model.parameters(), **options if rank() == 1 else {})
        with pytest.raises(ValueError, match=message) as error:
            laconic.Worker(model, optimizer, laconic.Divisible(8, 2))
        return str(error.value)

    assert len(set(laconic.spawn(run, 2))) == 1


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 3)), max_size=8))
def test_ranges(d: int, raises: list[tuple[int, int, int]]) -> None:
    ranges, expected = Ranges([[d, 0]]), [0] * d
    for first, second, number in raises:
        part = slice(min(first, second, d), min(max(first, second), d))
        ranges.raise_to(part, number)
        expected[part] = [max(number, before) for before in expected[part]]
        found = [(i, number) for run, number in ranges.within(slice(0, d)) for i in range(run.start, run.stop)]
        assert found == list(enumerate(expected))
        assert [i for run, _ in ranges.within(part) for i in range(run.start, run.stop)] == list(range(d))[part]
        assert all(one[1] != other[1] for one, other in itertools.pairwise(ranges.entries))


def test_codes_are_settled_in_one_pass_as_step_by_step() -> None:
    """Some of the piece is of another age, some has been made up for already, and blocks are cut anywhere."""
    d, workers = 7000, 3
    generator = torch.Generator().manual_seed(1)
    compressor = Uniform(4)
    model = nn.ParameterList([torch.randn(3000, generator=generator), torch.randn(4000, generator=generator)])
    groups = [{"params": [p], "lr": 0.01 + 0.01 * i} for i, p in enumerate(model)]
    optimizer = torch.optim.AdamW(groups)

    def run() -> tuple[Tensor, Tensor]:
        with laconic.Worker(model, optimizer, laconic.AllReduce(), comm=Solo()) as worker:
            for p in model:
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.step()
            optimizer.step()
            results = []
            for in_one_pass in (True, False):
                generator.manual_seed(5)
                own = CommonAdam(worker, torch.zeros(d))
                own.steps = [[Step(rate, 0.9, 0.999, 1e-8, 0.0) for rate in (0.01, 0.02)]] * 3
                own.steering.shares = [0.0, 0.3, 0.3]
                own.since.raise_to(slice(100, 2500), 1)
                own.since.raise_to(slice(2600, 2650), 2)
                vectors = own._own()
                for i, vector in enumerate(vectors):
                    vector[:] = torch.randn(d, generator=torch.Generator().manual_seed(i)).abs()
                codes = [compressor.encode(torch.randn(6000, generator=generator)) for _ in range(workers)]
                piece, part = Piece([slice(500, 6500)], 2, 3), slice(500, 6500)
                piece.kept[500] = windows.least_units(own.v_hat[part])
                said = Codes(compressor, codes, [1 / 3] * 3, 1, 2)
                if in_one_pass:
                    own.settle(piece, part, said)
                else:
                    own.put(piece, part, said.mean(6000), compressor.decode(codes[1], 6000, step=2))
                results.append(torch.stack([torch.as_tensor(vector).clone() for vector in vectors]))
                assert own.since.entries == [[100, 0], [500, 1], [6500, 2], [7000, 0]]
        return results[0], results[1]

    one_pass, step_by_step = run()
    assert torch.equal(one_pass, step_by_step)


@pytest.mark.parametrize("settings", [{"background": None}, {"background": Log(2), "hops": 2}])
def test_with_a_long_period_workers_change_to_local(tmp_path: Any, settings: Any) -> None:
    """ "auto" finds a period of 20 by step 8: what has been said by then counts, and all go on from there."""
    assert not common_is_chosen(laconic.Divisible(8, 9))
    assert common_is_chosen(laconic.Divisible(8, 8))
    assert common_is_chosen(laconic.Divisible(8, 9, "common"))

    def run() -> tuple[list[bool], list[Tensor], Tensor]:
        model = nn.Linear(200, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        chosen, common_x = [], []
        with laconic.Worker(model, optimizer, laconic.Divisible(8, **settings)) as worker:
            own: Any = worker.method
            own._choice._decide = lambda computing, transfer: setattr(own._choice, "period", 20)
            for _ in range(60):
                model.weight.grad = torch.full((1, 200), 3.0 if worker.rank == 0 else 1.0)
                optimizer.step()
                chosen.append(own._common is not None)
                common_x.append(own.x_hat.clone())
                if len(chosen) == 30:
                    worker.save(tmp_path / "checkpoint")
        with laconic.Worker(model, optimizer, laconic.Divisible(8, **settings)) as worker:
            worker.load(tmp_path / "checkpoint")
            own = worker.method
            assert own._common is None
        return chosen, common_x, worker.x.clone()

    results = laconic.spawn(run, 2)
    for chosen, common_x, _ in results:
        assert chosen == [True] * 7 + [False] * 53
        assert all(torch.equal(x, y) for x, y in zip(common_x, results[0][1], strict=True))
        torch.testing.assert_close(common_x[-1], torch.full((200,), -6.0), rtol=0.4, atol=0)


def common_is_chosen(method: laconic.Method) -> bool:
    def run() -> bool:
        model = nn.Linear(5, 1)
        with laconic.Worker(model, torch.optim.Adam(model.parameters()), method) as worker:
            own: Any = worker.method
            return own._common is not None

    return laconic.spawn(run, 2)[0]
