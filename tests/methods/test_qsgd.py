from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.comm.coded_mean import split
from tests.helpers import build_model, rank, sgd, train, train_step
from tests.oracles.allreduce import allreduce


def gradients_seen(gradient: Tensor, bits: int, steps: int) -> Tensor:
    """Returns the gradients that the optimizer sees (steps, d) when this worker has the same gradient in each step."""
    model = nn.Linear(gradient.numel(), 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    with laconic.Worker(model, optimizer, laconic.QSGD(bits, block=64)):
        for _ in range(steps):
            model.weight.grad = gradient.view(1, -1).clone()
            optimizer.step()
            assert model.weight.grad is not None
            seen.append(model.weight.grad.flatten().clone())
    return torch.stack(seen)


def local_gradient(worker: int, d: int) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(worker))


@pytest.mark.parametrize(("bits", "workers"), [(8, 3), (2, 2)])
def test_rounding_is_bounded_and_right_on_average(bits: int, workers: int) -> None:
    d, steps = 150, 150

    def run() -> Tensor:
        return gradients_seen(local_gradient(rank(), d), bits, steps)

    seen, *others = laconic.spawn(run, workers)
    assert all(torch.equal(seen, other) for other in others)
    local = torch.stack([local_gradient(worker, d) for worker in range(workers)])
    unit = torch.zeros(d)  # the largest distance between two levels of any worker; for the mean it is no larger
    for part in split(0, d, owners=range(workers)):
        for start in range(part.start, part.stop, 64):
            block = slice(start, min(start + 64, part.stop))
            unit[block] = local[:, block].abs().max() / (2 ** (bits - 1) - 1)
    error = seen - local.mean(0)
    assert (error.abs() <= 2 * unit + 1e-6).all()
    assert error.std() > 0.01 * unit.mean(), "rounding is stochastic"
    # Each end adds a standard deviation of at most half a unit; 6 of them would be exceeded in one of 10⁶ runs.
    assert (error.mean(0).abs() <= 6 * unit / steps**0.5).all()


def test_eight_bits_stay_near_full_communication() -> None:
    paths = laconic.spawn(train, 3, laconic.QSGD(), sgd, 30)
    expected = allreduce(sgd, 3, 30)
    for path in paths:
        torch.testing.assert_close(path[29], expected[29], rtol=0.05, atol=0.05)
        assert all(torch.equal(x, y) for x, y in zip(path, paths[0], strict=True))
        assert not torch.equal(path[29], expected[29])


def test_parameters_without_a_gradient() -> None:
    """A parameter used on one rank counts as zero on the other; a parameter used nowhere has no gradient and stays."""

    def run() -> tuple[float, bool, float]:
        model = nn.ParameterDict({name: nn.Parameter(torch.ones(())) for name in ("both", "one", "none")})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
        with laconic.Worker(model, optimizer, laconic.QSGD()) as worker:
            value = 3 * model["both"]
            if worker.rank == 0:
                value = value + 4 * model["one"]
            value.backward()
            optimizer.step()
            return model["one"].item(), model["none"].grad is None, model["none"].item()

    for one, is_none, none in laconic.spawn(run, 2):
        assert one == pytest.approx(1 - (4 / 2 + 0.5), abs=0.05)
        assert (is_none, none) == (True, 1.0)


def test_payload_is_the_formula() -> None:
    def run() -> int:
        model = nn.Linear(4095, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, laconic.QSGD()) as worker:
            for _ in range(3):
                model(torch.randn(4, 4095)).sum().backward()
                optimizer.step()
            return worker.meter.total.nbytes("foreground")

    n, d, p = 4, 4096 * 2, 2
    assert laconic.spawn(run, n) == [3 * (2 * (n - 1) * (d + 4 * n) // n + (n - 1) * p)] * n


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_raises_on_all_ranks_and_names_the_rank(bad: float) -> None:
    def run() -> str:
        model = build_model()
        optimizer = sgd(model)
        try:
            with laconic.Worker(model, optimizer, laconic.QSGD()) as worker:
                train_step(model, optimizer, worker.rank, 0)
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                if worker.rank == 1:
                    next(model.parameters()).grad.view(-1)[3] = bad  # type: ignore[union-attr]
                optimizer.step()
        except FloatingPointError as error:
            return str(error)
        return "no error"

    for message in laconic.spawn(run, 3):
        assert message.startswith("NaN or infinity in the gradient of rank 1 at step 2: ")


@pytest.mark.parametrize("bits", [1, 9])
def test_bad_bits(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits must be a whole number from 2 to 8, not {bits}"):
        laconic.QSGD(bits)
