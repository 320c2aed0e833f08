"""Random numbers as a function of seed, step and index: stochastic rounding, permutations, `RandomBlock`."""

import math

import pytest
import torch

from laconic.compress import RandomBlock, Uniform
from laconic.compress.random import derive_key, permuted_index, uniform_noise
from tests.compress.cases import make, same_bits


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean over 4000 steps is within Bernstein's bound, which 384 · 4e-9 = 1.5e-6 of all seeds would exceed."""
    steps, log_rate = 4000, 20.0  # exp(-20) = 2e-9, two-sided 4e-9
    x = make("normal", 128, 4)
    largest = x.view(2, 64).abs().amax(1, keepdim=True).expand(2, 64).flatten().double()
    for bits in (2, 4, 8):
        compressor = Uniform(bits, stochastic=True, block=64, seed=11)
        total = torch.zeros(128, dtype=torch.float64)
        for step in range(steps):
            compressor.decode_add(compressor.encode(x, step=step), total, step=step)
        spacing = largest / (2 ** (bits - 1) - 1)
        fraction = (x / spacing) % 1.0
        bound = (2 * fraction * (1 - fraction) * log_rate / steps).sqrt() + log_rate / (3 * steps)
        assert ((total / steps - x).abs() <= bound * spacing).all()


def test_stochastic_rounding_repeats_and_differs_by_step_seed_and_rank() -> None:
    x = make("normal", 5000, 0)
    compressor = Uniform(4, stochastic=True)
    code = compressor.encode(x, step=3)
    assert same_bits(code, compressor.encode(x, step=3))
    assert compressor.for_rank(1) == compressor.for_rank(1)
    others = [Uniform(4, stochastic=True, seed=1), compressor.for_rank(0), compressor.for_rank(1)]
    codes = [code, compressor.encode(x, step=4), *(other.encode(x, step=3) for other in others)]
    assert len({tuple(c.tolist()) for c in codes}) == len(codes)
    assert Uniform(4).for_rank(1) == Uniform(4)


def test_noise_is_uniform_and_independent() -> None:
    """Each check would fail for about 1 in 10⁶ random keys."""
    sample = uniform_noise(derive_key(1, 2), 64, 2048, torch.device("cpu")).double()
    n = sample.numel()
    assert sample.abs().max() <= 0.5
    assert sample.mean().abs() < 5 * (1 / 12 / n) ** 0.5
    counts = torch.histc(sample.float(), 256, -0.5, 0.5).double()
    chi_square = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5
    following = uniform_noise(derive_key(1, 3), 64, 2048, torch.device("cpu")).double()
    for a, b in ((sample[:, :-1], sample[:, 1:]), (sample[:-1], sample[1:]), (sample, following)):
        assert (a * b).mean().abs() < 5 / 12 / a.numel() ** 0.5


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1000])
def test_permuted_index_is_a_permutation(size: int) -> None:
    orders = [[permuted_index(i, size, derive_key(0, cycle)) for i in range(size)] for cycle in range(3)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    if size >= 16:
        assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize(("numel", "ratio"), [(100, 10), (101, 10), (1000, 1024), (7, 1), (1000, 3.5), (5, 1024)])
def test_random_block_sends_each_entry_once_per_cycle(numel: int, ratio: float) -> None:
    compressor = RandomBlock(ratio, seed=5)
    cycle = compressor.cycle(numel)
    assert cycle <= math.ceil(ratio)
    x = torch.arange(1.0, numel + 1)
    for repeat in range(2):
        total = torch.zeros(numel)
        for step in range(repeat * cycle, (repeat + 1) * cycle):
            compressor.decode_add(compressor.encode(x, step=step), total, step=step)
        assert torch.equal(total, x)


def test_codes_of_random_blocks_can_be_added() -> None:
    compressor, a, b = RandomBlock(4), make("normal", 103, 1), make("normal", 103, 2)
    total = compressor.encode(a, step=9).view(torch.float32) + compressor.encode(b, step=9).view(torch.float32)
    decoded = compressor.decode(total.view(torch.uint8), 103, step=9)
    assert torch.equal(decoded, compressor.decode(compressor.encode(a + b, step=9), 103, step=9))
