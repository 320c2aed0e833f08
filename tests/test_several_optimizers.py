"""One worker with a list of optimizers: one x, one step when each has stepped once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import laconic
from tests.helpers import Silent, build_model, flat, loss, rank

METHODS = [
    laconic.AllReduce(),
    laconic.QSGD(),
    laconic.EfficientAdam(moments="averaged", moments_every=3),
    laconic.LocalSGD(3, moments="averaged"),
    laconic.ADPSGD(initial_period=2),
    laconic.Divisible(4, 3),
    laconic.Divisible(4, 3, hops=2, corrected=True),
    laconic.A2CiD2(),
]
MATRICES = torch.cat([torch.ones(54), torch.zeros(9), torch.ones(18), torch.zeros(2)]).bool()  # of build_model


def build(seed: int = 0) -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
    """Returns a model, with Muon for its matrices and AdamW for the rest."""
    model = build_model(seed)
    parameters = list(model.parameters())
    muon = torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02)
    return model, [muon, torch.optim.AdamW([p for p in parameters if p.ndim != 2], lr=0.01)]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range, worker: int | None = None) -> None:
    for step in steps:
        loss(model, rank() if worker is None else worker, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def test_muon_and_adamw_train_together_with_every_method() -> None:
    def run() -> list[tuple[Tensor, int, dict[str, float]]]:
        results = []
        for method in METHODS:
            model, optimizers = build(seed=rank())
            with laconic.Worker(model, optimizers, method, timeout=60) as worker:
                train(model, optimizers, range(12))
                if isinstance(worker.method, laconic.Divisible):
                    assert worker.method._stretch is not None
                    assert torch.equal(worker.method._stretch.q != 0, ~MATRICES), "Adam's rule for Adam's part alone"
                metrics = worker.method.metrics()
            results.append((flat(model), worker.step, metrics))
        return results

    start = flat(build_model())
    for method, (first, step, metrics), (second, _, _) in zip(METHODS, *laconic.spawn(run, 2), strict=True):
        assert step == 12, method
        assert torch.equal(first, second), method
        assert (first != start).all(), (method, "both optimizers train")
        if isinstance(method, laconic.Divisible):
            assert 1 <= metrics["stretch"] < 2**0.5 + 1e-6


def test_several_optimizers_train_on_the_mean_gradient() -> None:
    def run() -> Tensor:
        model, optimizers = build()
        with laconic.Worker(model, optimizers, laconic.AllReduce()):
            train(model, optimizers[::-1], range(6))  # in any order
        return flat(model)

    model, optimizers = build()
    for step in range(6):
        torch.stack([loss(model, worker, step) for worker in range(2)]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for x in laconic.spawn(run, 2):
        torch.testing.assert_close(x, flat(model), rtol=1e-3, atol=1e-4)  # Muon computes in bfloat16


def test_checkpoints_continue_bit_for_bit_and_on_another_number_of_workers(tmp_path: Path) -> None:
    def run(load: bool) -> Tensor:
        model, optimizers = build(seed=7 if load else 0)
        with laconic.Worker(model, optimizers, laconic.Divisible(4, 3)) as worker:
            if load:
                worker.load(tmp_path)
            else:
                train(model, optimizers, range(5))
                worker.save(tmp_path)
            train(model, optimizers, range(5, 9))
            return worker.x.clone()

    for first, second in zip(laconic.spawn(run, 2, False), laconic.spawn(run, 2, True), strict=True):
        assert torch.equal(first, second)
    assert run(True).isfinite().all()
    model, optimizers = build()
    with (
        laconic.Worker(model, optimizers[::-1], laconic.Divisible(4, 3)) as worker,
        pytest.raises(ValueError, match="differ in optimizer: Muon, AdamW in the checkpoint; AdamW, Muon in this run"),
    ):
        worker.load(tmp_path)


def test_each_optimizer_must_step_once_in_each_step() -> None:
    model, (muon, adamw) = build()
    with laconic.Worker(model, [muon, adamw], Silent()) as worker:
        loss(model, 0, 0).backward()
        muon.step()
        assert worker.step == 1
        with pytest.raises(RuntimeError, match=r"consensus\(\) must not be called in the middle .* AdamW has not"):
            worker.consensus().__enter__()
        with pytest.raises(RuntimeError, match=r"Muon has stepped twice and AdamW has not: .* use one Worker for each"):
            muon.step()
        with pytest.raises(ValueError, match="with several optimizers, step\\(\\) must be called without a closure"):
            adamw.step(lambda: 0.0)
        adamw.step()
        muon.step()
        assert worker.step == 2
        adamw.step()


def step_with_new_gradients(method: laconic.Method) -> str:
    """Computes gradients again between the steps of two optimizers, as for a GAN."""
    model, (muon, adamw) = build()
    try:
        with laconic.Worker(model, [muon, adamw], method, timeout=60):
            loss(model, rank(), 0).backward()
            muon.step()
            adamw.zero_grad()
            loss(model, rank(), 1).backward()
            adamw.step()
    except (RuntimeError, laconic.PeerError) as error:
        return str(error)
    return "fine"


def test_gradients_that_change_after_they_were_averaged_raise() -> None:
    for text in laconic.spawn(step_with_new_gradients, 2, laconic.AllReduce()):
        assert "gradients of AdamW have changed after Muon has stepped" in text
    assert laconic.spawn(step_with_new_gradients, 2, laconic.LocalSGD(2)) == ["fine"] * 2  # it uses no gradients


def test_lists_that_make_no_sense_are_refused() -> None:
    model, (muon, _) = build()
    for given, match in (
        ([muon, muon], "the list has one of them twice"),
        (
            [muon, torch.optim.SGD(model.parameters(), lr=0.1)],
            r"each parameter must be in one optimizer, and '0.weight'",
        ),
        ([muon, 3], r"or a list of these, not 3"),
    ):
        with pytest.raises(ValueError, match=match):
            laconic.Worker(model, given, laconic.AllReduce())  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"'0.bias', '2.bias' of the model require .* Worker\(model, \[one, other\]"):
        laconic.Worker(model, muon, laconic.AllReduce())
