import pytest
import torch

import laconic
from laconic.methods.averaging import Moments
from tests.helpers import OPTIMIZERS, train
from tests.oracles.local_sgd import local_sgd


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("moments", "moments_every"), [("local", 1), ("averaged", 1), ("averaged", 3)])
def test_agrees_with_the_oracle(optimizer: str, moments: Moments, moments_every: int) -> None:
    workers, steps, period = 3, 31, 4
    method = laconic.LocalSGD(period, moments=moments, moments_every=moments_every)
    paths = laconic.spawn(train, workers, method, OPTIMIZERS[optimizer], steps)
    expected = local_sgd(OPTIMIZERS[optimizer], workers, steps, period, moments, moments_every)
    for step in range(steps):
        for worker in range(workers):
            torch.testing.assert_close(paths[worker][step], expected[step][worker], rtol=1e-4, atol=1e-5)
        if (step + 1) % period == 0:
            assert all(torch.equal(path[step], paths[0][step]) for path in paths)
        else:
            assert not torch.equal(paths[0][step], paths[1][step])


def test_payload_is_the_formula() -> None:
    def run(moments: Moments, moments_every: int = 1) -> int:
        torch.manual_seed(0)
        model = torch.nn.Linear(100, 10)
        optimizer = torch.optim.Adam(model.parameters())
        with laconic.Worker(model, optimizer, laconic.LocalSGD(2, moments, moments_every=moments_every)) as worker:
            for _ in range(5):
                model(torch.randn(4, 100)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return worker.meter.total.nbytes("foreground")

    rounds, d, n = 2, 1010, 2
    assert laconic.spawn(run, n, "local") == [rounds * round(2 * (n - 1) / n * 4 * (d + 1))] * n
    assert laconic.spawn(run, n, "averaged") == [rounds * round(2 * (n - 1) / n * 4 * (3 * d + 1))] * n
    assert laconic.spawn(run, n, "averaged", 2) == [round(2 * (n - 1) / n * 4 * (2 * (d + 1) + 2 * d))] * n


def test_averaged_moments_where_a_rank_has_none() -> None:
    """Each rank has a gradient, and so momentum, for one of two parameters only: the missing momentum counts as 0."""

    def run() -> list[float]:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        with laconic.Worker(model, optimizer, laconic.LocalSGD(1, moments="averaged")) as worker:
            (model[worker.rank] * 8).sum().backward()
            optimizer.step()
            return [optimizer.state[p]["momentum_buffer"][0].item() for p in model if p in optimizer.state]

    assert laconic.spawn(run, 2) == [[4.0], [4.0]]


@pytest.mark.parametrize("period", [0, -1, 1.5, "8", True, None])
def test_bad_period(period: object) -> None:
    with pytest.raises(ValueError, match=f"period must be a whole number, at least 1, not {period!r}"):
        laconic.LocalSGD(period)  # type: ignore[arg-type]


def test_bad_moments() -> None:
    with pytest.raises(ValueError, match="moments must be one of local, averaged, not 'global'"):
        laconic.LocalSGD(4, "global")  # type: ignore[arg-type]


def test_bad_moments_every() -> None:
    for method in (laconic.LocalSGD, laconic.ADPSGD):
        with pytest.raises(ValueError, match="moments_every must be a whole number, at least 1, not 0"):
            method(moments="averaged", moments_every=0)
