"""The worker takes what frameworks hand out: wrapped models and optimizers, closures, parameters that come later."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.helpers import Silent, adam, build_model, flat, loss, rank, sgd, train_step, worker_of

# DistributedDataParallel around the model


def with_buffers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))


def train_in_ddp(method: laconic.Method, wrap: bool) -> tuple[list[Tensor], list[Tensor], list[Any], list[str]]:
    """Returns the parameters after each step, the running means, the wrapper's flags, and what was logged."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = with_buffers()
    wrapped = DistributedDataParallel(model) if wrap else model
    optimizer = adam(model)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("laconic").addHandler(handler)
    path, means = [], []
    with laconic.Worker(wrapped, optimizer, method) as worker:
        assert worker.model is model
        flags = [getattr(wrapped, "require_backward_grad_sync", None)]
        for step in range(6):
            train_step(wrapped, optimizer, worker.rank, step)
            path.append(worker.x.clone())
            means.append(model[1].running_mean.clone())  # type: ignore[operator]
    flags.append(getattr(wrapped, "require_backward_grad_sync", None))
    logging.getLogger("laconic").removeHandler(handler)
    return path, means, flags, lines


def test_a_ddp_wrapper_is_switched_off_and_restored() -> None:
    def run() -> list[Any]:
        return [
            (train_in_ddp(method, wrap=False), train_in_ddp(method, wrap=True))
            for method in (laconic.AllReduce(), laconic.LocalSGD(4))
        ]

    for number, results in enumerate(laconic.spawn(run, 2)):
        for (bare, bare_means, _, _), (wrapped, means, flags, lines) in results:
            assert all(map(torch.equal, bare, wrapped)), "DDP averages nothing"
            assert all(map(torch.equal, bare_means, means)), "DDP broadcasts no buffers"
            assert flags == [False, True]
            assert len(lines) == (number == 0)
            assert all("DistributedDataParallel" in line for line in lines)


def test_a_ddp_wrapper_that_is_switched_on_again_raises() -> None:
    def run() -> str:
        dist.init_process_group("gloo")
        model = build_model()
        wrapped = DistributedDataParallel(model)
        with laconic.Worker(wrapped, sgd(model), laconic.LocalSGD(4), timeout=60) as worker:
            train_step(wrapped, worker.optimizer, worker.rank, 0)
            wrapped.require_backward_grad_sync = True
            with pytest.raises(RuntimeError, match=r"switched the gradient averaging .* on again before step 2"):
                train_step(wrapped, worker.optimizer, worker.rank, 1)
            wrapped.require_backward_grad_sync = False
        with pytest.raises(ValueError, match="with static_graph, whose communication cannot be switched off"):
            laconic.Worker(DistributedDataParallel(model, static_graph=True), sgd(model), laconic.AllReduce())
        return "done"

    assert laconic.spawn(run, 2) == ["done"] * 2


# Wrapped optimizers


class Shell(torch.optim.Optimizer):
    """Like Accelerate's: an Optimizer by its class, without calling its constructor."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class Other:
    """Like Lightning's: another class, with the optimizer in a private attribute."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer


@pytest.mark.parametrize("wrap", [Shell, Other, lambda optimizer: Other(Shell(optimizer))])
def test_wrapped_optimizers_are_unwrapped(wrap: Callable[[Any], Any]) -> None:
    model = build_model()
    optimizer = sgd(model)
    with laconic.Worker(model, wrap(optimizer), laconic.AllReduce()) as worker:
        assert worker.optimizer is optimizer
        train_step(model, optimizer, 0, 0)
    assert worker.step == 1


@pytest.mark.parametrize("given", [None, 3, [], Shell(None), Other(4), "adam"])
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"optimizer must be a torch.optim.Optimizer"):
        laconic.Worker(build_model(), given, laconic.AllReduce())


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"number 0 of group 0 of SGD, of shape \(9, 6\), is not: create"):
        laconic.Worker(build_model(), sgd(build_model()), laconic.AllReduce())


# Closures


def steps_with_closures(model: nn.Module, optimizer: torch.optim.Optimizer, by_name: bool) -> list[float]:
    def closure() -> float:
        optimizer.zero_grad()
        found = loss(model, rank(), len(losses))
        found.backward()
        return found.item()

    losses: list[float] = []
    for _ in range(5):
        losses.append(optimizer.step(closure=closure) if by_name else optimizer.step(closure))
    return losses


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_is_evaluated_once_by_the_worker(by_name: bool) -> None:
    alone, model = build_model(), build_model()
    expected = steps_with_closures(alone, adam(alone), by_name)
    optimizer = adam(model)
    with laconic.Worker(model, optimizer, laconic.AllReduce()), torch.no_grad():
        assert steps_with_closures(model, optimizer, by_name) == expected
    assert torch.equal(flat(model), flat(alone))


def test_closures_train_on_the_mean_gradient() -> None:
    def run() -> tuple[Tensor, Tensor]:
        results = []
        for with_closure in (False, True):
            model = build_model()
            optimizer = sgd(model)
            with laconic.Worker(model, optimizer, laconic.AllReduce()):
                if with_closure:
                    steps_with_closures(model, optimizer, by_name=False)
                else:
                    for step in range(5):
                        train_step(model, optimizer, rank(), step)
            results.append(flat(model))
        return results[0], results[1]

    (plain, closures), other = laconic.spawn(run, 2)
    assert torch.equal(plain, closures)
    assert torch.equal(plain, other[1])


def test_an_error_in_a_closure_leaves_the_worker_as_it_was() -> None:
    def closure() -> float:
        raise KeyError("no such sample")

    model = build_model()
    with worker_of(model) as worker:
        with pytest.raises(KeyError):
            worker.optimizer.step(closure)
        train_step(model, worker.optimizer, 0, 0)
        assert worker.step == 1


class Twice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def test_optimizers_that_evaluate_closures_repeatedly_are_refused() -> None:
    model = build_model()
    with pytest.raises(ValueError, match=r"LBFGS does so several times.* such as SGD or AdamW"):
        laconic.Worker(model, torch.optim.LBFGS(model.parameters()), laconic.AllReduce())
    optimizer = Twice(model.parameters(), lr=0.1)
    with (
        laconic.Worker(model, optimizer, Silent()),
        pytest.raises(RuntimeError, match=r"Twice evaluates its closure several times .* such as SGD or AdamW"),
    ):
        optimizer.step(lambda: 0.0)


# The start and the end


def test_start_and_close_do_what_the_block_does() -> None:
    def run() -> tuple[Tensor, Tensor, Tensor]:
        results = []
        for by_hand in (False, True):
            model = build_model()
            worker = laconic.Worker(model, sgd(model), laconic.LocalSGD(4))
            if by_hand:
                assert worker.start() is worker.start()
                for step in range(6):
                    train_step(model, worker.optimizer, worker.rank, step)
                worker.close()
                worker.close()
            else:
                with worker:
                    for step in range(6):
                        train_step(model, worker.optimizer, worker.rank, step)
            results.append(flat(model))
            with pytest.raises(RuntimeError, match=r"start\(\) is for a worker that has not ended"):
                worker.start()
            with pytest.raises(RuntimeError, match=r"average_\(\) is for a worker that has not ended"):
                worker.average_(torch.zeros(1))
            with worker.consensus() as agreed:
                last = flat(agreed)
        return results[0], results[1], last

    ranks = laconic.spawn(run, 2)
    assert all(torch.equal(ranks[0][0], one) for of_rank in ranks for one in of_rank)


def test_close_tells_the_others_of_an_error() -> None:
    def run() -> str:
        model = build_model()
        worker = laconic.Worker(model, sgd(model), laconic.AllReduce(), timeout=60)
        if worker.rank == 1:
            worker.close(KeyError("a framework's error"))
            with pytest.raises(RuntimeError, match=r"consensus\(\) is for a worker that has not ended"):
                worker.consensus().__enter__()
            return "closed"
        with pytest.raises(laconic.PeerError) as error:
            train_step(model, worker.optimizer, worker.rank, 0)
        worker.close(error.value)
        return str(error.value)

    text, closed = laconic.spawn(run, 2)
    assert closed == "closed"
    assert 'rank 1 failed at step 0: KeyError: "a framework\'s error"' in text


def saved_nbytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getbuffer().nbytes


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_own_their_memory_after_the_end(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(300, 300))
    before = saved_nbytes(model[0].state_dict())
    optimizer = adam(model)
    worker = laconic.Worker(model, optimizer, laconic.LocalSGD(2, moments="averaged"))
    (model[0](torch.ones(4)).sum() + model[1](torch.ones(300)).sum()).backward()
    optimizer.step()
    worker.moments()
    trained = flat(model)
    assert saved_nbytes(model[0].state_dict()) > 10 * before, "inside, all parameters share one vector"
    worker.close(KeyError() if fails else None)
    assert torch.equal(flat(model), trained)
    assert saved_nbytes(model[0].state_dict()) == before
    assert saved_nbytes(optimizer.state[next(model[0].parameters())]) < 2 * before
    worker.x.zero_()
    assert torch.equal(flat(model), trained)


# Parameters that are unfrozen or added later


def oracle(change: Callable[[nn.Module, torch.optim.Optimizer], None], optimizer_of: Any, workers: int) -> Tensor:
    """Trains in one process on the mean loss of all workers."""
    model = build_model()
    optimizer = optimizer_of(model)
    for step in range(8):
        if step == 4:
            change(model, optimizer)
        torch.stack([loss(model, worker, step) for worker in range(workers)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(True)  # type: ignore[index]


def add_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    unfreeze(model, optimizer)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})  # type: ignore[index]


def whole(model: nn.Module) -> torch.optim.Optimizer:
    model[0].requires_grad_(False)  # type: ignore[index]
    return sgd(model)


def half(model: nn.Module) -> torch.optim.Optimizer:
    model[0].requires_grad_(False)  # type: ignore[index]
    return sgd(model[2])  # type: ignore[index]


LATER = [
    laconic.AllReduce(),
    laconic.QSGD(),
    laconic.EfficientAdam(),
    laconic.LocalSGD(3, moments="averaged"),
    laconic.ADPSGD(initial_period=2),
    laconic.Divisible(4, 3),
    laconic.Divisible(4, 3, hops=2, corrected=True),
    laconic.A2CiD2(background=False),
]


@pytest.mark.parametrize(("optimizer_of", "change"), [(whole, unfreeze), (half, add_group)])
def test_parameters_that_come_later_are_trained_together(optimizer_of: Any, change: Any) -> None:
    def run() -> list[tuple[Tensor, list[int]]]:
        results = []
        for method in LATER:
            model = build_model()
            optimizer = optimizer_of(model)
            sizes = []
            with laconic.Worker(model, optimizer, method, timeout=60) as worker:
                for step in range(8):
                    if step == 4:
                        change(model, optimizer)
                    train_step(model, optimizer, worker.rank, step)
                    sizes.append(worker.x.numel())
            results.append((flat(model), sizes))
        return results

    expected, start = oracle(change, optimizer_of, workers=2), flat(build_model())
    for method, (first, sizes), (second, _) in zip(LATER, *laconic.spawn(run, 2), strict=True):
        assert sizes == [20] * 4 + [83] * 4, method
        assert torch.equal(first, second), method
        assert not torch.equal(first[:63], start[:63]), (method, "what was unfrozen is trained")
        if isinstance(method, laconic.AllReduce):
            torch.testing.assert_close(first, expected)


def test_parameters_that_one_rank_alone_unfreezes_raise_on_all() -> None:
    def run() -> str:
        model = build_model()
        optimizer = whole(model)
        with (
            pytest.raises(laconic.PeerError) as error,
            laconic.Worker(model, optimizer, laconic.AllReduce(), timeout=60) as worker,
        ):
            for step in range(4):
                if step == 2 and worker.rank == 1:
                    unfreeze(model, optimizer)
                train_step(model, optimizer, worker.rank, step)
        return str(error.value)

    for text in laconic.spawn(run, 2):
        assert re.search("rank 1 has been at new parameters in the optimizer before step 3", text), text


def test_gossip_in_the_background_refuses_parameters_that_come_later() -> None:
    def run() -> str:
        model = build_model()
        optimizer = whole(model)
        with laconic.Worker(model, optimizer, laconic.A2CiD2(), timeout=60) as worker:
            train_step(model, optimizer, worker.rank, 0)
            unfreeze(model, optimizer)
            with pytest.raises(RuntimeError, match="close this worker and create another one on all ranks"):
                train_step(model, optimizer, worker.rank, 1)
            model[0].requires_grad_(False)
        return "done"

    assert laconic.spawn(run, 2) == ["done"] * 2
