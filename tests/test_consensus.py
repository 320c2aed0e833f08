"""consensus(): quantized differences to the agreed model, the same model on all ranks, and the way to an exact one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.bench.copies import average_copies, write_copies
from laconic.compress import Sign, Uniform
from laconic.consensus import mean_near
from laconic.method import DIFFERENCE
from tests.helpers import adam, build_model, train_step

QUANTIZING: list[laconic.Method] = [
    laconic.Divisible(8, 3),
    laconic.Divisible(8, 3, Sign(), hops=2),
    laconic.Divisible(8, None),
    laconic.LocalSGD(4, compressor=Uniform(4)),
    laconic.ADPSGD(4, compressor=Sign()),
    laconic.DiLoCo(4, fragments=2, delay=1, compressor=Uniform(4)),
]
EXACT: list[laconic.Method] = [laconic.Divisible(8, 3, None), laconic.LocalSGD(4), laconic.DiLoCo(4), laconic.A2CiD2()]
WORKERS, STEPS = 3, 6


@contextmanager
def trained(method: laconic.Method) -> Iterator[laconic.Worker]:
    model = build_model()
    optimizer = adam(model)
    with laconic.Worker(model, optimizer, method) as worker:
        for step in range(STEPS):
            train_step(model, optimizer, worker.rank, step)
        yield worker


def look(method: laconic.Method) -> dict[str, Any]:
    with trained(method) as worker:
        found: dict[str, Any] = {"own": worker.x.clone(), "reference": worker.method.reference()}
        if found["reference"] is not None:
            found["reference"] = found["reference"].clone()
        for name, exact in (("quantized", False), ("exact", True)):
            before = worker.meter.total.nbytes("control")
            with worker.consensus(exact=exact):
                found[name] = worker.x.clone()
                found[f"{name} bytes"] = worker.meter.total.nbytes("control") - before
            assert torch.equal(worker.x, found["own"])
    return found


def test_methods_that_quantize_send_an_eighth_of_the_bytes() -> None:
    by_rank = laconic.spawn(lambda: [look(method) for method in QUANTIZING], WORKERS)
    for i, method in enumerate(QUANTIZING):
        ranks = [found[i] for found in by_rank]
        own = [rank["own"] for rank in ranks]
        assert not torch.equal(own[0], own[1])
        expected = mean_near(own, ranks[0]["reference"])
        mean = torch.stack(own).double().mean(0)
        largest = max(float((x - ranks[0]["reference"]).abs().max()) for x in own)
        for rank in ranks:
            assert torch.equal(rank["reference"], ranks[0]["reference"]), method
            assert torch.equal(rank["quantized"], expected), method
            torch.testing.assert_close(rank["exact"].double(), mean, rtol=1e-5, atol=1e-6)
            assert (rank["quantized"] - mean).abs().max() <= largest / 7 + 1e-6, "half a level, twice"
            assert rank["quantized bytes"] < 0.6 * rank["exact bytes"], "a small model has blocks that are not full"


def test_the_bytes_are_those_of_quantized_vectors_both_ways() -> None:
    def run() -> int:
        model = nn.Linear(1 << 14, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, laconic.Divisible(period=3)) as worker:
            model(torch.randn(2, 1 << 14, generator=torch.Generator().manual_seed(worker.rank))).sum().backward()
            optimizer.step()
            before = worker.meter.total.nbytes("control")
            with worker.consensus():
                return worker.meter.total.nbytes("control") - before

    expected = 2 * (4 - 1) / 4 * DIFFERENCE.nbytes(1 << 14)
    for found in laconic.spawn(run, 4):
        assert found == pytest.approx(expected, abs=32)  # and the consensus distance


def test_others_average_in_fp32() -> None:
    for ranks in zip(*laconic.spawn(lambda: [look(method) for method in EXACT], WORKERS), strict=True):
        mean = torch.stack([rank["own"] for rank in ranks]).double().mean(0)
        for rank in ranks:
            assert rank["reference"] is None
            torch.testing.assert_close(rank["quantized"].double(), mean, rtol=1e-5, atol=1e-6)


def test_the_end_and_an_export_are_exact(tmp_path: Path) -> None:
    def run() -> tuple[Tensor, Tensor, Tensor]:
        with trained(laconic.LocalSGD(4, compressor=Uniform(2))) as worker:
            own = worker.x.clone()
            worker.export(tmp_path / "model.pt")
        exported = torch.load(tmp_path / "model.pt", weights_only=True)
        return (
            own,
            worker.x.clone(),
            torch.cat([exported[name].flatten() for name, _ in build_model().named_parameters()]),
        )

    ranks = laconic.spawn(run, WORKERS)
    mean = torch.stack([own for own, _, _ in ranks]).double().mean(0)
    for _, end, exported in ranks:
        torch.testing.assert_close(end.double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(exported.double(), mean, rtol=1e-5, atol=1e-6)


def test_a_model_that_is_not_finite_is_named_on_every_rank() -> None:
    def run() -> str:
        with pytest.raises(FloatingPointError) as caught, trained(laconic.LocalSGD(4, compressor=Uniform(4))) as worker:
            if worker.rank == 1:
                worker.x[0] = torch.nan
            with worker.consensus():
                pass
        return str(caught.value)

    for message in laconic.spawn(run, WORKERS):
        assert "in the difference to the agreed model of rank 1" in message


def test_exact_must_be_a_flag() -> None:
    with trained(laconic.AllReduce()) as worker, pytest.raises(ValueError, match="exact must be True or False, not 1"):
        worker.consensus(exact=1).__enter__()  # type: ignore[arg-type]


def test_comparisons_evaluate_the_quantized_average(tmp_path: Path) -> None:
    """What is evaluated is the model that workers would have had, not their exact mean."""
    models = [build_model(seed=seed) for seed in (1, 2)]
    reference = torch.zeros(sum(p.numel() for p in models[0].parameters()))
    for rank, model in enumerate(models):
        write_copies(tmp_path, 7, rank, model, reference, is_reference=True)
    flat = [nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]
    averaged = build_model()
    assert average_copies(averaged, tmp_path, step=7, ranks=2)
    assert torch.equal(nn.utils.parameters_to_vector(averaged.parameters()), mean_near(flat, reference))
    assert not average_copies(averaged, tmp_path, step=7, ranks=1)
    assert torch.equal(nn.utils.parameters_to_vector(averaged.parameters()), flat[0])
