"""Random numbers as a function of seed, step and index: stochastic rounding."""

import torch

from laconic.compress import Uniform
from laconic.compress.random import derive_key, uniform_noise
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


def test_stochastic_rounding_repeats_and_differs_by_step_seed_and_stream() -> None:
    x = make("normal", 5000, 0)
    compressor = Uniform(4, stochastic=True)
    code = compressor.encode(x, step=3)
    assert same_bits(code, compressor.encode(x, step=3))
    assert compressor.with_stream(1) == compressor.with_stream(1)
    others = [Uniform(4, stochastic=True, seed=1), compressor.with_stream(0), compressor.with_stream(1)]
    codes = [code, compressor.encode(x, step=4), *(other.encode(x, step=3) for other in others)]
    assert len({tuple(c.tolist()) for c in codes}) == len(codes)
    assert Uniform(4).with_stream(1) == Uniform(4)


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
