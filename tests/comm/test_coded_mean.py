"""CodedMean and GatheredMean over real processes: the average, its arrangements, feedback, saved transfers, errors."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.comm import Comm, Solo, connect
from laconic.comm.coded_mean import CodedMean, GatheredMean, Part, split
from laconic.compress import Compressor, Half, Identity, Log, Sign, TopK, Uniform

D = 300
COMPRESSORS: list[Compressor] = [
    Identity(),
    Half(),
    Log(3, block=64),
    Sign(block=64),
    Uniform(4, block=64),
    Uniform(3, stochastic=True, block=64),
    TopK(0.1),
]


def open_comm() -> Comm:
    return connect(torch.device("cpu"), 60.0)


def vector_of(rank: int, step: int = 0) -> Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(100 * step + rank))


def owned(parts: list[Part], rank: int) -> int:
    return sum(part.numel for part in parts if part.owner == rank)


def with_feedback(comm: Comm, parts: list[Part], compressor: Compressor, **rest: Any) -> CodedMean:
    residuals = torch.zeros(D), torch.zeros(owned(parts, comm.rank))
    return CodedMean(comm, parts, compressor, residual=residuals[0], owner_residual=residuals[1], **rest)


def test_split_gives_whole_units_to_equal_shares() -> None:
    parts = split(100, 1000, owners=[0, 1, 2, 3], unit=64)
    assert [part.owner for part in parts] == [0, 1, 2, 3]
    assert parts[0].start == 100
    assert parts[-1].stop == 1000
    assert all(a.stop == b.start and (a.stop - 100) % 64 == 0 for a, b in itertools.pairwise(parts))
    assert max(part.numel for part in parts) - min(part.numel for part in parts) <= 64
    assert [part.numel for part in split(0, 2, owners=range(3))] == [0, 1, 1]


def test_parts_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="parts must follow one another"):
        CodedMean(laconic.comm.Solo(), [Part(0, 5, 0), Part(6, 9, 0)], Identity())


def test_owners_do_not_change_the_average_and_nothing_is_lost() -> None:
    """Over several steps: Σ average + owner residuals + mean of the residuals = Σ mean of the vectors."""

    def run() -> list[Any]:
        comm = open_comm()
        results = []
        for compressor in COMPRESSORS:
            for owners in ([0, 1, 2], [0, 0, 0], [2, 2, 2]):
                parts = split(0, D, owners, unit=64)
                mean = with_feedback(comm, parts, compressor)
                averages = [mean.average(vector_of(comm.rank, step), step=step) for step in range(1, 6)]
                mine = [slice(part.start, part.stop) for part in parts if part.owner == comm.rank]
                assert mean.owner_residual is not None
                owner_residual = torch.zeros(D)
                owner_residual[torch.cat([torch.arange(D)[:0], *(torch.arange(D)[s] for s in mine)])] = (
                    mean.owner_residual
                )
                results.append((torch.stack(averages), mean.residual, owner_residual))
        comm.meet("the end")
        return results

    ranks = laconic.spawn(run, 3)
    expected = sum(torch.stack([vector_of(rank, step) for rank in range(3)]).mean(0) for step in range(1, 6))
    for i in range(len(ranks[0])):
        first = ranks[0][i - i % 3][0]
        assert all(torch.equal(rank[i][0], first) for rank in ranks), COMPRESSORS[i // 3]
        residual = torch.stack([rank[i][1] for rank in ranks]).mean(0)
        owner_residual = torch.stack([rank[i][2] for rank in ranks]).sum(0)
        torch.testing.assert_close(first.sum(0) + owner_residual + residual, expected, rtol=1e-5, atol=1e-5)


def test_one_hop_is_the_mean_of_the_dequantized_vectors() -> None:
    def run() -> list[tuple[Tensor, Tensor, int, int]]:
        comm = open_comm()
        results = []
        for compressor in COMPRESSORS:
            mean = GatheredMean(comm, 0, D, compressor)
            before = comm.meter.total.nbytes()
            transfer = mean.send(vector_of(comm.rank), step=7)
            mean.answer(transfer)
            average = mean.receive(transfer, out=torch.empty(D))
            sent = comm.meter.total.nbytes() - before
            results.append((average, mean.own(transfer), sent, mean.nbytes))
        comm.meet("the end")
        return results

    for by_rank, compressor in zip(zip(*laconic.spawn(run, 3), strict=True), COMPRESSORS, strict=True):
        expected = torch.stack([own for _, own, _, _ in by_rank]).mean(0)
        for average, _, sent, nbytes in by_rank:
            assert torch.equal(average, by_rank[0][0])
            torch.testing.assert_close(average, expected, rtol=1e-6, atol=1e-6)
            assert sent == nbytes == 2 * compressor.nbytes(D)


def test_residuals_of_workers_and_owners_decay() -> None:
    """A worker sends the two largest of four entries, the owner the largest one of their mean."""
    residual, owner_residual = torch.zeros(4), torch.zeros(4)
    parts, codes = [Part(0, 4, 0)], (TopK(0.5), TopK(0.25))
    mean = CodedMean(Solo(), parts, *codes, residual=residual, owner_residual=owner_residual, decay=0.5)
    vector = torch.tensor([4.0, 3.0, 2.0, 1.0])
    assert mean.average(vector, step=1).tolist() == [4, 0, 0, 0]
    assert residual.tolist() == [0, 0, 2, 1]
    assert owner_residual.tolist() == [0, 3, 0, 0]
    assert mean.average(vector, step=2).tolist() == [0, 4.5, 0, 0]  # of 4, 3, 3, 1.5 the first two, and 3/2 more
    assert residual.tolist() == [0, 0, 3, 1.5]
    assert owner_residual.tolist() == [4, 0, 0, 0]
    mean.send(vector, step=3, counted=[])
    assert residual.tolist() == [0, 0, 3, 1.5], "of a rank that does not count they stay"


def test_bytes_of_two_hops() -> None:
    def run() -> tuple[int, int]:
        comm = open_comm()
        mean = CodedMean(comm, split(0, 10, owners=range(3)), Uniform(4), Half())  # parts of 3, 3 and 4 entries
        before = comm.meter.total.nbytes()
        mean.average(torch.ones(10), step=0)
        return comm.meter.total.nbytes() - before, mean.nbytes

    # Uniform(4): 2 bytes and a scale of 4 for each part of other owners; Half: 2 bytes per entry to both others.
    assert laconic.spawn(run, 3) == [(12 + 12, 12 + 12), (12 + 12, 12 + 12), (12 + 16, 12 + 16)]


@pytest.mark.parametrize("hops", [1, 2])
def test_transfers_in_flight_are_saved_and_restored(hops: int, tmp_path: Path) -> None:
    """One transfer is saved before its answer and one after it; new processes complete both."""

    def make(comm: Comm) -> CodedMean:
        compressor = Uniform(3, stochastic=True, block=64)
        if hops == 1:
            return GatheredMean(comm, 0, D, compressor, residual=torch.zeros(D))
        return with_feedback(comm, split(0, D, owners=range(comm.size)), compressor)

    def complete(mean: CodedMean, sent: Any, answered: Any) -> list[Tensor]:
        mean.answer(sent)
        own = [mean.own(sent), mean.own(answered)]
        return [*own, mean.receive(answered), mean.receive(sent)]

    def first(folder: Path) -> list[Tensor]:
        comm = open_comm()
        mean = make(comm)
        answered, sent = (mean.send(vector_of(comm.rank, step), step=step) for step in (1, 2))
        mean.answer(answered)
        saved = {"sent": sent.state_dict(), "answered": answered.state_dict(), "owner_residual": mean.owner_residual}
        torch.save(saved, folder / str(comm.rank))
        result = complete(mean, sent, answered)
        comm.meet("the end")
        return result

    def second(folder: Path) -> list[Tensor]:
        comm = open_comm()
        mean = make(comm)
        saved = torch.load(folder / str(comm.rank), weights_only=True)
        if mean.owner_residual is not None:
            mean.owner_residual.copy_(saved["owner_residual"])
        result = complete(mean, mean.restore(saved["sent"]), mean.restore(saved["answered"]))
        comm.meet("the end")
        return result

    whole = laconic.spawn(first, 2, tmp_path)
    for result, expected in zip(laconic.spawn(second, 2, tmp_path), whole, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


def test_a_vector_that_is_not_finite_raises_on_all_ranks() -> None:
    def run() -> list[str]:
        comm = open_comm()
        comm.meter.begin_step(9)
        vector = vector_of(comm.rank)
        if comm.rank == 1:
            vector[:] = float("inf")
        means = [
            mean
            for compressor in COMPRESSORS
            for mean in (
                CodedMean(comm, split(0, D, owners=range(3)), compressor, name="gradient"),
                CodedMean(comm, split(0, D, owners=[0]), compressor, name="gradient"),
                GatheredMean(comm, 0, D, compressor, name="gradient"),
            )
        ]
        messages = []
        for mean in means:
            with pytest.raises(FloatingPointError) as caught:
                mean.average(vector, step=1)
            messages.append(str(caught.value))
        comm.meet("the end")
        return messages

    for messages in laconic.spawn(run, 3):
        assert all(m.startswith("NaN or infinity in the gradient of rank 1 at step 9: ") for m in messages)


def test_a_sum_that_overflows_raises_on_all_ranks() -> None:
    def run() -> str:
        comm = open_comm()
        try:
            CodedMean(comm, split(0, D, range(2)), Identity()).average(torch.full((D,), 3e38), step=1)
        except FloatingPointError as error:
            comm.meet("the end")
            return str(error)
        return "no error"

    for message in laconic.spawn(run, 2):
        assert message.startswith("NaN or infinity in the sum of finite vectors at step 0: ")
