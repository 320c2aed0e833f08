"""All ranks start from rank 0's model; consensus() lends the average of all and gives each its own back."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from tests.helpers import Silent, build_model, rank, sgd, train_step, worker_of


def test_buffers_and_frozen_parameters_come_from_rank_0_and_are_averaged() -> None:
    def run() -> tuple[Tensor, int, float, list[float], list[float]]:
        norm, frozen = nn.BatchNorm1d(2), nn.Linear(1, 1, bias=False)
        assert norm.running_mean is not None
        assert norm.num_batches_tracked is not None
        model = nn.ModuleList([norm, frozen])
        frozen.requires_grad_(False).weight.fill_(float(rank()))
        norm.running_mean.fill_(float(rank()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, Silent()) as worker:
            start = norm.running_mean.clone()
            norm.running_mean.fill_(float(worker.rank))
            norm.num_batches_tracked.fill_(10 + worker.rank)
            means: list[float] = []
            counts: list[float] = []
            with worker.consensus():
                means.append(norm.running_mean[0].item())
                counts.append(norm.num_batches_tracked.item())
                with worker.consensus():  # the same model again
                    means.append(norm.running_mean[0].item())
            means.append(norm.running_mean[0].item())
            counts.append(norm.num_batches_tracked.item())
        means.append(norm.running_mean[0].item())
        return start, worker.size, frozen.weight.item(), means, counts

    for i, (start, size, frozen, means, counts) in enumerate(laconic.spawn(run, 4)):
        assert (start == 0).all()
        assert size == 4
        assert frozen == 0.0
        assert means == [1.5, 1.5, float(i), 1.5]
        assert counts == [10, 10 + i]


def test_consensus_is_the_mean_of_x_and_gives_x_back_after_an_error() -> None:
    def run() -> tuple[Tensor, Tensor, Tensor]:
        model = build_model()
        with worker_of(model) as worker:
            worker.x.fill_(float(worker.rank)).add_(torch.arange(worker.x.numel()))
            own = worker.x.clone()
            try:
                with worker.consensus():
                    agreed = worker.x.clone()
                    raise KeyError("in evaluation")
            except KeyError:
                pass
            return own, agreed, worker.x.clone()

    for own, agreed, after in laconic.spawn(run, 2):
        assert torch.equal(own, after)
        assert torch.equal(agreed, torch.arange(own.numel()) + 0.5)


shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)


@settings(max_examples=5)
@given(shapes=shapes, seed=st.integers(0, 100))
def test_consensus_is_the_mean_whatever_the_shapes(shapes: list[tuple[int, ...]], seed: int) -> None:
    def run() -> tuple[Tensor, Tensor, Tensor]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        with worker_of(model) as worker:
            worker.x.copy_(torch.randn(worker.x.shape, generator=torch.Generator().manual_seed(seed + worker.rank)))
            own = worker.x.clone()
            with worker.consensus():
                lent = worker.x.clone()
            return own, lent, worker.x.clone()

    results = laconic.spawn(run, 3)
    mean = torch.stack([own for own, _, _ in results]).mean(dim=0)
    for own, lent, after in results:
        torch.testing.assert_close(lent, mean)
        assert torch.equal(own, after)


def test_a_mask_of_infinities_among_the_buffers() -> None:
    """A mask has no mean, and every worker has the same, so it stays. Entries beside it are averaged."""

    def run() -> tuple[list[float], list[float]]:
        model, mask = nn.Linear(2, 2), torch.tensor([float("-inf"), 0.0, 4.0])
        model.register_buffer("mask", mask)
        with worker_of(model) as worker:
            mask[2] += worker.rank
            with worker.consensus():
                lent = mask.tolist()
        return lent, mask.tolist()

    agreed = [float("-inf"), 0.0, 4.5]
    assert laconic.spawn(run, 2) == [(agreed, agreed)] * 2


def test_a_step_inside_consensus_is_refused() -> None:
    model = build_model()
    with worker_of(model) as worker, worker.consensus(), pytest.raises(RuntimeError, match=r"inside consensus\(\)"):
        train_step(model, worker.optimizer, 0, 0)


# Not on all ranks


@pytest.mark.parametrize("others", ["step", "end", "compute"])
def test_consensus_on_rank_0_alone_says_that_all_ranks_must_call_it(others: str) -> None:
    """As most people write it: if rank == 0: evaluate()."""

    def run() -> str:
        model = build_model()
        method = laconic.AllReduce() if others == "step" else laconic.LocalSGD(1000)
        try:
            with laconic.Worker(model, sgd(model), method, timeout=1 if others == "compute" else 60) as worker:
                train_step(model, worker.optimizer, worker.rank, 0)
                if worker.rank == 0:
                    with worker.consensus():
                        pass
                elif others == "compute":
                    time.sleep(5)
                elif others == "step":
                    train_step(model, worker.optimizer, worker.rank, 1)
        except laconic.PeerError as error:
            return str(error)
        return "no error"

    texts = laconic.spawn(run, 3)
    for text in texts:
        assert 'consensus() must be called on every rank, not only under "if rank == 0:"' in text, text
    names = {
        "step": "rank 0 has been at consensus() since its step 1",
        "end": "rank 0: consensus() (step 1); rank 1: the end of the worker (step 1); rank 2: the end",
        "compute": "waited 1 s for ranks 1, 2",
    }
    assert names[others] in texts[0]
