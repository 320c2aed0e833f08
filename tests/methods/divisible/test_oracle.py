"""Real processes agree with the one-process loop of tests/oracles/divisible.py, and x̂ is the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.compress import Log, Pick, Sign, Uniform
from laconic.methods.divisible.pace import Times
from tests.helpers import Optimize, adam, batch, build_model, rank, sgd
from tests.methods.divisible.comms import scripted_times
from tests.oracles.divisible import Path, Schedule, SetGradient, Settings, divisible

STEPS = 40


def build(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    return build_model(seed).to(dtype)


def set_gradient(model: nn.Module, worker: int, step: int) -> None:
    x, y = batch(worker, step)
    dtype = next(model.parameters()).dtype
    nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype)).backward()


def set_some_gradients(model: nn.Module, worker: int, step: int) -> None:
    """The first layer has no gradient in some steps: on all workers in the first one, on one worker in others."""
    set_gradient(model, worker, step)
    if step <= 2 or step % 5 == worker:
        for p in list(model.parameters())[:2]:
            p.grad = None


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """The groups are interleaved in x: matrices and biases."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": biases, "lr": 3e-3, "weight_decay": 0.0},
        {"params": matrices, "betas": (0.8, 0.95)},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def constant(optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


def warm_up_and_decay(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        peak = group.setdefault("peak", group["lr"])
        group["lr"] = peak * min(1.0, step / 10, (STEPS - step) / 20)


@dataclass
class Case:
    """`latency`, and `sending` for a sweep at the start: by step, of the link that "auto" measures. Steps: 1 s."""

    method: laconic.Divisible
    settings: Settings
    optimize: Optimize = adam
    gradient: SetGradient = set_gradient
    schedule: Schedule = constant
    dtype: torch.dtype = torch.float64  # so that rounding seldom changes a quantized level
    tolerance: float = 1e-6
    latency: Callable[[int], float] | None = None
    sending: Callable[[int], float] = lambda step: 0.4
    stretching: float = 0.0


U4 = Uniform(4)
CASES: dict[int, dict[str, Case]] = {
    2: {
        "defaults with a fixed period": Case(laconic.Divisible(period=4), Settings(1024, 4, U4)),
        "in fp32": Case(laconic.Divisible(period=4), Settings(1024, 4, U4), dtype=torch.float32, tolerance=2e-3),
        "in bf16": Case(laconic.Divisible(8, 4), Settings(8, 4, U4), dtype=torch.bfloat16, tolerance=6e-2),
        "not quantized": Case(laconic.Divisible(8, 3, None), Settings(8, 3)),
        "everything in each step": Case(laconic.Divisible(8, 1), Settings(8, 1, U4)),
        "slower than a sweep": Case(laconic.Divisible(8, 2, delay=5), Settings(8, 2, U4, delay=5)),
        "AdamW, two groups, schedule": Case(
            laconic.Divisible(8, 5), Settings(8, 5, U4), two_groups, schedule=warm_up_and_decay
        ),
        "SGD, picks": Case(laconic.Divisible(8, 3, Pick(7)), Settings(8, 3, Pick(7)), sgd),
    },
    3: {
        "three pieces": Case(laconic.Divisible(16, 3, delay=2), Settings(16, 3, U4, delay=2)),
        "foreground alone": Case(laconic.Divisible(4, None), Settings(4, None, U4)),
        "foreground alone, not quantized": Case(laconic.Divisible(1, None, None), Settings(1, None)),
        "corrected": Case(laconic.Divisible(8, 3, corrected=True), Settings(8, 3, U4, corrected=True)),
        "corrected, not quantized": Case(
            laconic.Divisible(8, 5, None, corrected=True, delay=2), Settings(8, 5, corrected=True, delay=2), sgd
        ),
        "gradients in some steps": Case(
            laconic.Divisible(8, 3), Settings(8, 3, U4), gradient=set_some_gradients, schedule=warm_up_and_decay
        ),
        "a link whose latency changes": Case(
            laconic.Divisible(8, background=U4),
            # The first windows end with the steps 5, 8 and 11; later ones begin 5 steps after the end of the last.
            Settings(8, 64, U4, changes={5: (3, 3, 1, False), 8: (1, 1, 1, False), 18: (2, 2, 1, False)}),
            latency=lambda step: 2.0 if step <= 5 else 0.0 if step <= 15 else 1.2,
        ),
        "a link that becomes slow": Case(
            laconic.Divisible(8, background=U4),
            # With one hop a sweep would take 9 s, so a period of 10; with two hops it takes 6 s.
            Settings(8, 64, U4, changes={5: (1, 1, 1, False), 18: (7, 1, 2, False)}),
            latency=lambda step: 0.0,
            sending=lambda step: 0.4 if step <= 15 else 9.0,
        ),
        "two hops": Case(laconic.Divisible(8, 3, U4, hops=2), Settings(8, 3, U4, hops=2)),
        "stretched when sent": Case(
            laconic.Divisible(8, background=U4),
            Settings(8, 64, U4, changes={5: (3, 1, 1, False)}, stretched_when_sent=5),
            latency=lambda step: 0.0,
            sending=lambda step: 2.6,
            stretching=0.06,
        ),
        "stretched when sent, gradients in some steps": Case(
            laconic.Divisible(8, background=U4),
            Settings(8, 64, U4, changes={5: (3, 1, 1, False)}, stretched_when_sent=5),
            gradient=set_some_gradients,
            latency=lambda step: 0.0,
            sending=lambda step: 2.6,
            stretching=0.06,
        ),
    },
    4: {
        "two hops, late": Case(laconic.Divisible(8, 5, Log(4), delay=2, hops=2), Settings(8, 5, Log(4), 2, 2), sgd),
        "two hops, corrected": Case(
            laconic.Divisible(8, 3, U4, corrected=True, hops=2), Settings(8, 3, U4, hops=2, corrected=True)
        ),
        "signs": Case(laconic.Divisible(8, 2, Sign()), Settings(8, 2, Sign()), sgd),
    },
}


@dataclass
class Run:
    x: list[Tensor] = field(default_factory=list)
    x_hat: list[Tensor] = field(default_factory=list)
    end: Tensor = field(default_factory=lambda: torch.empty(0))


def run_case(case: Case) -> Run:
    model = build(case.dtype, seed=rank())
    optimizer = case.optimize(model)
    run = Run()

    def times(step: int, share: float) -> Times:
        assert case.latency is not None
        latency = case.latency(step)
        return Times(1.0, latency, latency, latency + case.sending(step) * share, 0.0, case.stretching)

    told = nullcontext() if case.latency is None else scripted_times(times)
    with told, laconic.Worker(model, optimizer, case.method) as worker:
        assert isinstance(worker.method, laconic.Divisible)
        for step in range(1, STEPS + 1):
            case.schedule(optimizer, step)
            optimizer.zero_grad()
            case.gradient(model, worker.rank, step)
            optimizer.step()
            run.x.append(worker.x.clone())
            run.x_hat.append(worker.method.x_hat.clone())
    run.end = worker.x.clone()
    return run


def run_cases(workers: int) -> dict[str, Run]:
    return {name: run_case(case) for name, case in CASES[workers].items()}


def expected_path(case: Case, workers: int) -> Path:
    # The oracle of a model in 16 bits has more of them: what the model rounds away is the tolerance.
    dtype = torch.float32 if case.dtype == torch.bfloat16 else case.dtype
    return divisible(
        lambda: build(case.dtype).to(dtype),
        case.optimize,
        case.gradient,
        workers,
        STEPS,
        case.settings,
        case.schedule,
    )


@pytest.mark.parametrize("workers", CASES)
def test_agrees_with_the_oracle(workers: int) -> None:
    ranks = laconic.spawn(run_cases, workers, workers)
    for name, case in CASES[workers].items():
        runs, expected = [results[name] for results in ranks], expected_path(case, workers)
        for step in range(STEPS):
            hats = [run.x_hat[step] for run in runs]
            assert all(torch.equal(hat, hats[0]) for hat in hats), f"{name}: x̂ differs between ranks at step {step + 1}"
            close(hats[0], expected.x_hat[step], case, f"{name}: x̂ at step {step + 1}")
            for i, run in enumerate(runs):
                close(run.x[step], expected.x[step][i], case, f"{name}: x of rank {i} at step {step + 1}")
        for run in runs:
            assert torch.equal(run.end, runs[0].end)
            close(run.end, expected.end, case, f"{name}: the model at the end")
        if case.settings.ratio > 1:
            assert not torch.equal(runs[0].x[-1], runs[1].x[-1]), f"{name}: workers differ between messages"


def close(found: Tensor, expected: Tensor, case: Case, text: str) -> None:
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=0, atol=case.tolerance, msg=lambda details: f"{text}: {details}"
    )


def test_workers_that_have_the_same_data_stay_equal() -> None:
    """Then every average is what each has sent, and only the stretch differs from a worker alone."""

    def run(method: laconic.Method) -> list[Tensor]:
        model = build(torch.float64)
        optimizer = sgd(model)
        path = []
        with laconic.Worker(model, optimizer, method) as worker:
            for step in range(1, 20):
                optimizer.zero_grad()
                set_gradient(model, 0, step)
                optimizer.step()
                path.append(worker.x.clone())
        return path

    alone = run(laconic.Divisible())
    methods = [laconic.Divisible(8, 3), laconic.Divisible(8, 3, None, delay=2), laconic.Divisible(8, 3, U4, hops=2)]
    for method in methods:
        for path in laconic.spawn(run, 3, method):
            tolerance = 1e-2 if method.hops == 2 else 1e-7  # averages are in fp32; the second hop quantizes them
            for x, expected in zip(path, alone, strict=True):
                torch.testing.assert_close(x, expected, rtol=0, atol=tolerance)
