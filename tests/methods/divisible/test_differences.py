"""The warning about non-iid data: workers that keep moving in different directions, and none that do not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.methods.divisible.differences import SAMPLE, SWEEPS, DifferenceWatch

D = 60


def texts_of(method: laconic.Divisible, kind: str, optimizer_kind: str) -> list[str]:
    """Trains on gradients of a kind, and returns the warnings of this rank."""
    model = nn.Linear(D, 1, bias=False)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = kinds[optimizer_kind](model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with laconic.Worker(model, optimizer, method) as worker:
            generator = torch.Generator().manual_seed(worker.rank)
            for _ in range(2 * (SWEEPS + 2)):
                model.weight.grad = gradient(kind, worker.rank, generator)
                optimizer.step()
    return [str(warning.message) for warning in caught]


def gradient(kind: str, rank: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(1, D, generator=generator)
    if kind == "iid":
        return 1.0 + noise
    return (1.0 if rank == 0 else -1.0) + 0.3 * noise


def test_workers_with_opposite_gradients_are_warned_once_and_others_are_not() -> None:
    cases = [
        (laconic.Divisible(8, 2), "opposite", "adam", 1),
        (laconic.Divisible(8, 2, None), "opposite", "sgd", 1),
        (laconic.Divisible(8, 2), "iid", "adam", 0),
        (laconic.Divisible(8, 2), "iid", "sgd", 0),
        (laconic.Divisible(8, 2, corrected=True), "opposite", "adam", 0),
    ]
    for found in laconic.spawn(lambda: [texts_of(*case[:3]) for case in cases], 2):
        for (*case, expected), texts in zip(cases, found, strict=True):
            assert len(texts) == expected, case
    for rank, found in enumerate(laconic.spawn(lambda: texts_of(*cases[0][:3]), 2)):
        assert f"rank {rank}, step {2 * SWEEPS + 1}: workers have moved in different directions" in found[0]
        assert "Divisible(corrected=True)" in found[0]


def observe(differences: list[Tensor]) -> DifferenceWatch:
    watch = DifferenceWatch(0)
    for step, difference in enumerate(differences):
        watch.add(step, True, difference, torch.zeros_like(difference))
    return watch


@pytest.mark.parametrize("numel", [1, 100, SAMPLE + 5])
def test_persistence_is_1_for_equal_differences_and_about_1_over_n_for_independent_ones(numel: int) -> None:
    torch.manual_seed(0)
    sweeps = SWEEPS - 1  # one less than it takes to warn
    constant = torch.randn(numel)
    assert observe([constant] * sweeps).persistence() == pytest.approx(1.0)
    if numel > 1:
        independent = [torch.randn(numel) for _ in range(sweeps)]
        assert observe(independent).persistence() == pytest.approx(1 / sweeps, rel=0.5)
    assert observe([torch.zeros(numel)] * sweeps).persistence() == 0.0


def test_other_pieces_than_the_last_do_not_count_and_a_new_length_starts_again() -> None:
    watch = DifferenceWatch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(SWEEPS - 1):
            watch.add(step, True, torch.ones(3), torch.zeros(3))
            watch.add(step, False, torch.ones(4), torch.zeros(4))
        for step in range(SWEEPS - 1):
            watch.add(step, True, torch.ones(5), torch.zeros(5))
    with pytest.warns(UserWarning, match="rank 0, step 7: workers have moved"):
        watch.add(7, True, torch.ones(5), torch.zeros(5))
