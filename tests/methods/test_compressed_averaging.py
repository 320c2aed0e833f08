"""ADPSGD and LocalSGD that send quantized differences with error feedback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.compress import Compressor, Half, Identity, Sign, TopK, Uniform
from tests.helpers import build_model, rank, sgd, train, train_alone, train_step

D = 301
COMPRESSORS: list[Compressor] = [
    Uniform(4),
    Uniform(3, stochastic=True),
    Sign(block=64),
    TopK(0.1),
    Half("bf16"),
    Identity(),
]


def run_all(steps: int) -> list[tuple[list[Tensor], Tensor, Tensor, Tensor, float | None]]:
    """For each compressor: x after each round, the sum of the local steps, both residuals at the end, and S."""
    results = []
    for compressor in COMPRESSORS:
        torch.manual_seed(0)
        model = nn.Linear(D, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = laconic.ADPSGD(initial_period=2, calibration=4, max_period=3, compressor=compressor)
        rounds, moved = [], torch.zeros(D, dtype=torch.float64)
        with laconic.Worker(model, optimizer, method) as worker:
            assert isinstance(worker.method, laconic.ADPSGD)
            for step in range(steps):
                generator = torch.Generator().manual_seed(50 * step + worker.rank)
                gradient = torch.randn(D, generator=generator) + torch.linspace(-1, 1, D)
                moved -= 0.1 * gradient.double()
                model.weight.grad = gradient.view(1, D)
                optimizer.step()
                if worker.meter.last_step.calls("foreground"):
                    rounds.append(worker.x.clone())
            assert worker.method.steps_since_round == 0, "otherwise the x of the others lacks the latest local steps"
            residual, owner_residual = worker.method.residual, worker.method.owner_residual
            assert residual is not None
            assert owner_residual is not None
            results.append((rounds, moved, residual, owner_residual, worker.method.variance))
    return results


def test_only_the_residuals_are_missing_and_x_is_the_same_everywhere() -> None:
    """x + mean(residuals) + residual of the mean = x₀ + Σ mean(local steps)."""
    n = 3
    torch.manual_seed(0)
    start = nn.Linear(D, 1, bias=False).weight.detach().flatten().double()
    by_rank = laconic.spawn(run_all, n, 4)
    exact = None
    for compressor, *of_ranks in reversed(list(zip(COMPRESSORS, *by_rank, strict=True))):
        rounds = [x for x, *_ in of_ranks]
        assert len(rounds[0]) == 2
        for other in rounds[1:]:
            assert all(torch.equal(x, y) for x, y in zip(rounds[0], other, strict=True)), compressor
        expected = start + torch.stack([moved for _, moved, *_ in of_ranks]).mean(0)
        residuals = torch.stack([residual for _, _, residual, *_ in of_ranks]).double().mean(0)
        residuals += torch.cat([owner_residual for _, _, _, owner_residual, _ in of_ranks]).double()
        torch.testing.assert_close(rounds[0][-1].double() + residuals, expected, rtol=1e-5, atol=1e-6)
        variances = [variance for *_, variance in of_ranks]
        assert variances == [variances[0]] * n
        if compressor == Identity():
            exact = variances[0]
            torch.testing.assert_close(rounds[0][-1].double(), expected, rtol=1e-5, atol=1e-6)
        else:
            assert not torch.allclose(rounds[0][-1].double(), expected, rtol=1e-5, atol=1e-6), "it does compress"
        if compressor in (Half("bf16"), Uniform(4)):
            assert exact == pytest.approx(variances[0], rel=0.15)


def test_identity_is_the_uncompressed_method() -> None:
    coded = laconic.spawn(train, 3, laconic.LocalSGD(3, compressor=Identity()), sgd, 20)
    plain = laconic.spawn(train, 3, laconic.LocalSGD(3), sgd, 20)
    for mine, other in zip(coded, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_alone_it_is_the_plain_optimizer() -> None:
    path = train(laconic.ADPSGD(initial_period=2, compressor=Uniform(2)), sgd, 9)
    assert all(torch.equal(x, y) for x, y in zip(path, train_alone(sgd, 9), strict=True))


def test_payload_is_the_formula() -> None:
    def run() -> int:
        model = build_model()
        optimizer = sgd(model)
        with laconic.Worker(model, optimizer, laconic.LocalSGD(2, compressor=Uniform(4))) as worker:
            for step in range(5):
                train_step(model, optimizer, worker.rank, step)
            return worker.meter.total.nbytes("foreground")

    n, rounds = 3, 2
    d = sum(p.numel() for p in build_model().parameters())
    parts = [Uniform(4).nbytes((r + 1) * d // n - r * d // n) for r in range(n)]
    expected = [rounds * (sum(parts) - own + (n - 1) * (own + 8)) for own in parts]
    assert laconic.spawn(run, n) == expected
    assert expected[0] == pytest.approx(rounds * (2 * (n - 1) / n * sum(parts) + 8 * (n - 1)), abs=rounds * n)


def go_on(directory: Path, load: bool) -> list[Tensor]:
    model = build_model(seed=rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    method = laconic.ADPSGD(initial_period=3, calibration=6, compressor=Uniform(3, stochastic=True, block=64))
    path = []
    with laconic.Worker(model, optimizer, method) as worker:
        if load:
            worker.load(directory)
        for step in range(worker.step, 24):
            train_step(model, optimizer, worker.rank, step)
            path.append(worker.x.clone())
            if step + 1 == 10 and not load:
                worker.save(directory)
    return path


def test_resumed_with_its_residuals_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = laconic.spawn(go_on, 2, tmp_path, False)
    for mine, expected in zip(laconic.spawn(go_on, 2, tmp_path, True), whole, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, expected[10:], strict=True))


def test_nan_on_one_rank_raises_on_all_and_names_it() -> None:
    def run() -> str:
        model = build_model()
        optimizer = sgd(model)
        try:
            with laconic.Worker(model, optimizer, laconic.ADPSGD(4, compressor=Uniform(4))) as worker:
                for step in range(4):
                    if worker.rank == 1:
                        worker.x[3] = float("nan")
                    train_step(model, optimizer, worker.rank, step)
        except FloatingPointError as error:
            return str(error)
        return "no error"

    for message in laconic.spawn(run, 3):
        assert message.startswith("NaN or infinity in the parameter change of rank 1 at step 4: ")


@pytest.mark.parametrize("kind", [laconic.ADPSGD, laconic.LocalSGD])
def test_not_a_compressor(kind: type[laconic.Method]) -> None:
    with pytest.raises(ValueError, match=r"compressor must be None or a compressor such as Uniform\(4\), not 4"):
        kind(compressor=4)  # type: ignore[call-arg]
