from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.compress import Uniform
from laconic.methods.coded_mean import coded_mean_nbytes, shard_slices
from tests.helpers import build_model, rank, sgd, train, train_step
from tests.oracles.allreduce import allreduce


def gradients_seen(gradient: Tensor, bits: int, steps: int) -> Tensor:
    """What the optimizer sees in each step (steps, d) when this worker has the same gradient in all of them."""
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


def own_gradient(worker: int, d: int) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(worker))


@pytest.mark.parametrize(("bits", "workers"), [(8, 3), (2, 2)])
def test_rounding_is_bounded_and_right_on_average(bits: int, workers: int) -> None:
    d, steps = 150, 400

    def run() -> Tensor:
        return gradients_seen(own_gradient(rank(), d), bits, steps)

    seen, *others = laconic.spawn(run, workers)
    assert all(torch.equal(seen, other) for other in others)
    own = torch.stack([own_gradient(worker, d) for worker in range(workers)])
    unit = torch.zeros(d)  # the largest distance of levels of a worker; that of the mean is no larger
    for shard in shard_slices(d, workers):
        for start in range(shard.start, shard.stop, 64):
            block = slice(start, min(start + 64, shard.stop))
            unit[block] = own[:, block].abs().max() / (2 ** (bits - 1) - 1)
    error = seen - own.mean(0)
    assert (error.abs() <= 2 * unit + 1e-6).all()
    assert error.std() > 0.01 * unit.mean(), "and it is by chance"
    # Each end adds a deviation of half a unit at most; beyond 6 deviations of the sum, one false alarm in 10⁶ runs.
    assert (error.mean(0).abs() <= 6 * unit / steps**0.5).all()


def test_eight_bits_stay_near_full_communication() -> None:
    paths = laconic.spawn(train, 3, laconic.QSGD(), sgd, 30)
    expected = allreduce(sgd, 3, 30)
    for path in paths:
        torch.testing.assert_close(path[29], expected[29], rtol=0.05, atol=0.05)
        assert all(torch.equal(x, y) for x, y in zip(path, paths[0], strict=True))
        assert not torch.equal(path[29], expected[29])


def test_parameters_without_a_gradient() -> None:
    """Used on one rank: the other counts as zero in the mean. Used nowhere: no gradient, it stays."""

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


def test_payload_of_shards_that_differ() -> None:
    uniform = Uniform(4, stochastic=True)
    sent = [coded_mean_nbytes(uniform, 10, 5, r, 3) for r in range(3)]  # shards of 3, 3 and 4 entries
    assert sent == [(6 + 6) + 2 * (6 + 5)] * 3


def test_nan_on_one_rank_raises() -> None:
    def run() -> None:
        model = build_model()
        optimizer = sgd(model)
        with laconic.Worker(model, optimizer, laconic.QSGD()) as worker:
            if worker.rank == 1:
                worker.x[3] = float("nan")
            train_step(model, optimizer, worker.rank, 0)

    with pytest.raises(laconic.WorkerFailed, match="entries must be finite") as caught:
        laconic.spawn(run, 2)
    assert caught.value.rank == 1


@pytest.mark.parametrize("bits", [1, 9])
def test_bad_bits(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits must be from 2 to 8, not {bits}"):
        laconic.QSGD(bits)
