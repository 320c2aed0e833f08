import pytest
import torch

import laconic
from tests.helpers import OPTIMIZERS, train
from tests.oracles.allreduce import allreduce


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("workers", [2, 3])
def test_agrees_with_the_oracle(optimizer: str, workers: int) -> None:
    paths = laconic.spawn(train, workers, laconic.AllReduce(), OPTIMIZERS[optimizer], 30)
    for path in paths:
        for x, expected in zip(path, allreduce(OPTIMIZERS[optimizer], workers, 30), strict=False):
            torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)
        assert all(torch.equal(x, y) for x, y in zip(path, paths[0], strict=True))


def test_parameters_without_a_gradient() -> None:
    """A parameter used on one rank counts as zero on the other; a parameter used nowhere has no gradient and stays."""

    def run() -> tuple[float, bool, float]:
        model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(())) for name in ("both", "one", "none")})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
        with laconic.Worker(model, optimizer, laconic.AllReduce()) as worker:
            value = 3 * model["both"]
            if worker.rank == 0:
                value = value + 4 * model["one"]
            value.backward()
            optimizer.step()
            return model["one"].item(), model["none"].grad is None, model["none"].item()

    # one: 1 − (mean gradient 4/2 + weight decay 0.5)
    assert laconic.spawn(run, 2) == [(-1.5, True, 1.0)] * 2


def test_gradients_kept_in_place_are_not_lost() -> None:
    """After zero_grad(set_to_none=False), the next backward pass adds into the memory that holds the mean."""

    def run() -> list[float]:
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        seen = []
        with laconic.Worker(model, optimizer, laconic.AllReduce()) as worker:
            for step in range(3):
                (model.weight * (step + 1) * (worker.rank + 1)).sum().backward()
                optimizer.step()
                assert model.weight.grad is not None
                seen.append(model.weight.grad.item())
                optimizer.zero_grad(set_to_none=False)
        return seen

    assert laconic.spawn(run, 2) == [[1.5, 3.0, 4.5]] * 2


def test_payload_is_the_formula() -> None:
    def run() -> tuple[int, int, int]:
        model = torch.nn.Linear(100, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, laconic.AllReduce()) as worker:
            for _ in range(3):
                model(torch.randn(4, 100)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            total = worker.meter.total
            return total.nbytes("foreground"), worker.meter.last_step.nbytes(), total.calls("foreground", "mean")

    d, p, n = 1010, 2, 4
    a_step = round(2 * (n - 1) / n * 4 * (d + p))
    assert laconic.spawn(run, n) == [(3 * a_step, a_step, 3)] * n


def test_sparse_gradients_raise() -> None:
    model = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(ValueError, match="must be dense, and the gradient of parameter 'weight'"),
        laconic.Worker(model, optimizer, laconic.AllReduce()),
    ):
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
