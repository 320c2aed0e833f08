"""Baselines by others: their messages, and that they do what their papers say."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from laconic.bench.peers.demo import _Tiles
from laconic.bench.peers.sparseloco import CHUNK, decode_sparse, encode_sparse
from laconic.bench.peers.torchft_diloco import _fragments
from laconic.bench.run import Plan, run
from laconic.bench.strategies import parse_contender
from laconic.tasks import Digits

PLAN = Plan(Digits(model="mlp"), workers=2, steps=12, evaluations=3)


def test_sparse_messages() -> None:
    """The largest entries of each chunk, with their signs and one of two magnitudes, in 14 bits each."""
    kept, numel = 64, CHUNK + 100
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    message = encode_sparse(vector, kept)
    assert len(message) == 2 * (kept * 14 // 8 + 4)
    decoded = decode_sparse(message, numel, kept)
    for chunk in (slice(0, CHUNK), slice(CHUNK, numel)):
        sent, truth = decoded[chunk], vector[chunk]
        order = truth.abs().argsort(descending=True)
        assert set(sent.nonzero().flatten().tolist()) == set(order[:kept].tolist())
        for part in (order[: kept // 2], order[kept // 2 : kept]):
            expected = truth[part].abs().mean() * truth[part].sign()
            torch.testing.assert_close(sent[part], expected, rtol=1e-3, atol=0)


def test_sparse_messages_of_short_vectors() -> None:
    vector = torch.tensor([1.0, -2.0, 3.0])
    torch.testing.assert_close(decode_sparse(encode_sparse(vector, 4), 3, 4), torch.tensor([0.5, -2.5, 2.5]))


@pytest.mark.parametrize("shape", [(10,), (128,), (96, 130), (5, 3, 3, 3)])
def test_tiles_are_transformed_and_back(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tiles = _Tiles(x)
    coefficients = tiles.transform(x)
    assert tiles.height * tiles.width <= 4096
    torch.testing.assert_close(coefficients.norm(), x.norm())
    torch.testing.assert_close(tiles.inverse(coefficients, x), x, rtol=1e-4, atol=1e-4)


def test_a_constant_has_one_frequency() -> None:
    coefficients = _Tiles(torch.ones(64, 64)).transform(torch.ones(64, 64))
    expected = torch.zeros(1, 4096)
    expected[0, 0] = 64.0
    torch.testing.assert_close(coefficients, expected, rtol=1e-4, atol=1e-3)


def test_fragments_of_whole_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 100), torch.nn.Linear(100, 10))

    def numels(number: int) -> list[list[int]]:
        return [[p.numel() for p in fragment.parameters()] for fragment in _fragments(model, number)]

    assert numels(1) == [[10000, 100, 10000, 100, 1000, 10]]
    assert numels(2) == [[10000, 100], [10000, 100, 1000, 10]]
    assert numels(6) == [[10000], [100], [10000], [100], [1000], [10]]
    with pytest.raises(ValueError, match="fragments must be at most the number of parameters, 6, not 7"):
        _fragments(model, 7)


def losses(contender: str) -> Tensor:
    record = run(parse_contender(contender), PLAN)
    assert record.status == "ok", record.reason
    return torch.tensor([point.values["loss"] for point in record.points])


def test_sparseloco_that_sends_everything_is_nearly_local_sgd() -> None:
    """All entries of a chunk with one of two magnitudes: signs and sizes are right, and the rest is fed back."""
    assert torch.allclose(losses("sparseloco+period=1+kept=4096+decay=1"), losses("local_sgd+period=1"), rtol=0.2)


@pytest.mark.parametrize("settings", ["+fragments=1+delay=0", "+fragments=2+delay=1"])
def test_torchft_and_laconic_compute_the_same(settings: str) -> None:
    """Fragments are cut at other entries, so with several of them only nearly."""
    pytest.importorskip("torchft")
    common = f"+period=4{settings}+mixing=0"
    theirs, ours = losses("torchft_diloco" + common), losses("diloco" + common)
    tolerance = 1e-3 if "fragments=1" in settings else 0.2
    assert torch.allclose(theirs, ours, rtol=tolerance), (theirs, ours)


@pytest.mark.parametrize(
    ("contender", "message"),
    [
        ("sparseloco+kept=6", "kept must be a multiple of 4, since four values share a byte, not 6"),
        ("demo+kept=0", "kept must be a whole number from 1 to 4096, not 0"),
    ],
)
def test_bad_settings(contender: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_contender(contender)


def test_bad_settings_of_torchft() -> None:
    pytest.importorskip("torchft")
    with pytest.raises(ValueError, match="period must be a multiple of fragments=3, not 32"):
        parse_contender("torchft_diloco+fragments=3")
    with pytest.raises(ValueError, match="delay must be less than period / fragments = 16, not 16"):
        parse_contender("torchft_diloco+delay=16")


def test_bytes_are_the_formula() -> None:
    plan = dataclasses.replace(PLAN, workers=3)
    chunks = -(-run(parse_contender("none"), PLAN).parameters // CHUNK)
    record = run(parse_contender("sparseloco+period=4"), plan)
    assert record.points[-1].payload_nbytes == 3 * 2 * chunks * (64 * 14 // 8 + 4)
