"""The parameters as one vector: every value and shape is kept, and models that cannot form one are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import laconic
from tests.helpers import Silent, build_model, flat, train_step, worker_of


def test_parameters_are_views_of_x() -> None:
    model = build_model()
    before = flat(model)
    worker = worker_of(model)
    assert torch.equal(worker.x, before)
    worker.x.zero_()
    assert all((p == 0).all() for p in model.parameters())


def test_a_scalar_lies_behind_x_in_the_same_memory() -> None:
    worker = worker_of(build_model())
    before = worker.x.clone()
    worker.x_and_scalar[-1] = 7.0
    assert torch.equal(worker.x, before)
    worker.x_and_scalar.zero_()
    assert all((p == 0).all() for p in worker.model.parameters())


shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)


@given(shapes=shapes, dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_flattening_keeps_every_value_and_shape(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes])
    before = [p.detach().clone() for p in model]
    worker = worker_of(model)
    assert worker.x.dtype == dtype
    assert worker.x.numel() == sum(p.numel() for p in before)
    assert all(torch.equal(p, b) and p.shape == b.shape for p, b in zip(model, before, strict=True))
    worker.x.add_(1)
    assert all(torch.equal(p, b + 1) for p, b in zip(model, before, strict=True))


def test_memory_order_stays() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = model.weight.detach().clone()
    worker_of(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.weight, before)


def test_a_parameter_that_is_a_single_number_and_averaged_moments() -> None:
    """Adam's step counter has the shape of the parameter, but is no moment."""

    def run() -> tuple[list[str], float]:
        model = nn.ParameterList([nn.Parameter(torch.ones(()))])
        optimizer = torch.optim.Adam(model.parameters())
        with laconic.Worker(model, optimizer, laconic.LocalSGD(period=1, moments="averaged")) as worker:
            (model[0] * (worker.rank + 1)).backward()
            optimizer.step()
            return sorted(worker.moments()), optimizer.state[model[0]]["step"].item()

    assert laconic.spawn(run, 2) == [(["exp_avg", "exp_avg_sq"], 1.0)] * 2


def test_parameters_that_leave_x_are_noticed() -> None:
    model = build_model()
    with worker_of(model) as worker:
        train_step(model, worker.optimizer, 0, 0)
        model.load_state_dict(copy.deepcopy(model.state_dict()))  # copies into place: fine
        train_step(model, worker.optimizer, 0, 1)
        model[0].bias.data = torch.zeros(9)
        with pytest.raises(RuntimeError, match=r"'0.bias' has left worker.x"):
            train_step(model, worker.optimizer, 0, 2)


def test_a_frozen_parameter_with_a_gradient_is_noticed() -> None:
    model = build_model()
    model[0].requires_grad_(False)
    with worker_of(model) as worker:
        train_step(model, worker.optimizer, 0, 0)
        next(model[0].parameters()).grad = torch.ones(9, 6)
        with pytest.raises(RuntimeError, match=r"a frozen parameter of shape \(9, 6\) has a gradient.* set its .grad"):
            train_step(model, worker.optimizer, 0, 1)


def expect_refused(match: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    with pytest.raises(ValueError, match=match):
        laconic.Worker(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), Silent())


def test_no_trainable_parameter() -> None:
    model = build_model().requires_grad_(False)
    expect_refused("must have a trainable parameter, and none of its 4 has requires_grad", model)


def test_mixed_dtypes() -> None:
    model = build_model()
    model[2].double()
    expect_refused(r"must all have one dtype, not torch.float32 \('0.bias'\) and torch.float64 \('2.bias'\)", model)


def test_mixed_devices() -> None:
    model = build_model()
    model[2].to("meta")
    expect_refused("must all have one device, not cpu .* and meta", model)


def test_integer_and_complex_parameters() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    expect_refused("must be real floating point numbers, and '0' is torch.complex64", model)


def test_lazy_parameters() -> None:
    model = nn.LazyLinear(3)
    expect_refused("'weight' has no shape yet: run the model once", model)


def test_wrapped_already() -> None:
    expect_refused("and a part of it is in DataParallel", nn.DataParallel(build_model()))


def test_a_part_wrapped_in_ddp() -> None:
    def run() -> str:
        torch.distributed.init_process_group("gloo")
        model = nn.Sequential(nn.parallel.DistributedDataParallel(build_model()))
        try:
            laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), Silent())
        except ValueError as error:
            return str(error)
        return ""

    for text in laconic.spawn(run, 2):
        assert "a part of it is in DistributedDataParallel: pass the bare module" in text


def test_another_models_optimizer() -> None:
    other = torch.optim.SGD(nn.Linear(5, 4).parameters(), lr=0.1)
    expect_refused(
        r"must be the model's, and number 0 of group 0 of SGD, of shape \(4, 5\), is not", build_model(), other
    )
