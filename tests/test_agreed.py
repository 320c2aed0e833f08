"""agreed(): the model that this rank holds already, on any rank, without sending anything."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import laconic
from laconic.compress import Uniform
from tests.helpers import adam, agreed_x, build_model, train_step

STEPS = 6
# What is agreed after six steps.
HELD: list[tuple[laconic.Method, str]] = [
    (laconic.Divisible(8, 3), "x_hat"),
    (laconic.Divisible(8, 3, None), "x_hat"),
    (laconic.Divisible(8, None), "x_hat"),
    (laconic.DiLoCo(4, fragments=2, delay=1), "theta"),
    (laconic.DiLoCo(4, compressor=Uniform(4)), "theta"),
    (laconic.LocalSGD(4, compressor=Uniform(4)), "anchor"),
    (laconic.LocalSGD(3), "x"),  # just averaged
    (laconic.EfficientAdam(), "x"),
]


def worker_after(method: laconic.Method, steps: int = STEPS) -> laconic.Worker:
    """Returns a worker that has not ended."""
    model = build_model()
    optimizer = adam(model)
    worker = laconic.Worker(model, optimizer, method, timeout=60).start()
    for step in range(steps):
        train_step(model, optimizer, worker.rank, step)
    return worker


def look(method: laconic.Method, name: str) -> tuple[Tensor, Tensor | None]:
    """Returns the local x, and on ranks 0 and 2 the agreed one, for which rank 1 does nothing."""
    worker = worker_after(method)
    local, found = worker.x.clone(), None
    if worker.rank != 1:
        sent = dict(worker.meter.total.tallies)
        found = agreed_x(worker)
        assert dict(worker.meter.total.tallies) == sent, "nothing was sent"
        assert found is not None
        assert torch.equal(found, local if name == "x" else getattr(worker.method, name))
    train_step(worker.model, worker.optimizer, worker.rank, STEPS)
    worker.close()
    after_the_end = agreed_x(worker)
    assert after_the_end is not None
    assert torch.equal(after_the_end, worker.x), "the averaged model"
    return local, found


def test_some_ranks_look_at_the_same_model_while_others_go_on() -> None:
    ranks = laconic.spawn(lambda: [look(method, name) for method, name in HELD], 3)
    for i, (method, name) in enumerate(HELD):
        (local, first), (_, nothing), (other, third) = (found[i] for found in ranks)
        assert nothing is None
        assert torch.equal(first, third), method
        assert torch.equal(local, other) == (name == "x"), method


def test_methods_without_an_agreed_model_say_so() -> None:
    def run() -> list[str]:
        texts = []
        for method, steps in ((laconic.A2CiD2(), 2), (laconic.LocalSGD(3), 2), (laconic.ADPSGD(), 0)):
            worker = worker_after(method, steps)
            with pytest.raises(ValueError, match="use consensus") as found:
                worker.agreed().__enter__()
            texts.append(str(found.value))
            worker.close()
        return texts

    for texts in laconic.spawn(run, 2):
        assert [text.partition(":")[0] for text in texts] == [
            "A2CiD2 holds no agreed model after step 2",
            "LocalSGD holds no agreed model after step 2",
            "ADPSGD holds no agreed model after step 0",
        ]


@pytest.mark.parametrize(
    "method", [laconic.Divisible(), laconic.DiLoCo(2, compressor=Uniform(4)), laconic.LocalSGD(4), laconic.A2CiD2()]
)
def test_one_worker_alone_agrees_with_itself(method: laconic.Method) -> None:
    worker = worker_after(method)
    found = agreed_x(worker)
    assert found is not None
    assert torch.equal(found, worker.x)
    worker.close()


def test_what_needs_the_local_model_is_refused_inside(tmp_path: Path) -> None:
    worker = worker_after(laconic.Divisible())
    local = worker.x.clone()

    def refused(what: Callable[[], object], message: str) -> None:
        with pytest.raises(RuntimeError, match=message):
            what()

    shown: list[tuple[Callable[[], AbstractContextManager[object]], str]] = [
        (worker.agreed, r"agreed\(\)"),
        (worker.consensus, r"consensus\(\)"),
    ]
    for show, name in shown:
        with show():
            refused(worker.optimizer.step, rf"optimizer.step\(\) must not be called inside {name}: its changes")
            refused(worker.reset, rf"worker.reset\(\) must not be called inside {name}")
            refused(lambda: worker.load(tmp_path), rf"load\(\) must not be called inside {name}")
            refused(
                lambda: worker.save(tmp_path),
                rf"save\(\) needs the local model, so it must not be called inside {name}",
            )
            with show():  # the same again
                pass
            refused(worker.close, rf"close\(\) must not be called inside {name}")
    with worker.agreed():
        refused(lambda: worker.consensus().__enter__(), r"consensus\(\) needs the local model, .* inside agreed\(\)")
        refused(lambda: worker.export(tmp_path / "x"), r"export\(\) averages the local models, .* inside agreed\(\)")
    with worker.consensus():
        refused(lambda: worker.agreed().__enter__(), r"agreed\(\) must not be called inside consensus\(\), which has a")
    assert torch.equal(worker.x, local)
    worker.optimizer.step()
    worker.close()


def test_statistics_of_the_model_are_back_afterwards() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    with laconic.Worker(model, adam(model), laconic.Divisible()) as worker:
        before = [buffer.clone() for buffer in model.buffers()]
        with worker.agreed() as agreed:
            agreed(torch.randn(8, 3))  # in training mode
            assert not all(map(torch.equal, before, model.buffers()))
        assert all(map(torch.equal, before, model.buffers()))


def test_an_error_inside_brings_the_local_model_back() -> None:
    def run() -> None:
        worker = worker_after(laconic.Divisible(8, 3))
        local = worker.x.clone()
        with pytest.raises(ZeroDivisionError), worker.agreed():
            assert not torch.equal(worker.x, local)
            _ = 1 / 0
        assert torch.equal(worker.x, local)
        worker.close()

    laconic.spawn(run, 2)


def test_a_worker_that_failed_has_no_agreed_model() -> None:
    worker = worker_after(laconic.Divisible())
    worker.close(error=ZeroDivisionError())
    with pytest.raises(RuntimeError, match=r"agreed\(\) is for a worker that has not failed"):
        worker.agreed().__enter__()
