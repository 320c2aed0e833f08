"""Compressors and vectors that the tests of this folder share."""

from contextlib import AbstractContextManager
from unittest import mock

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.compress import Half, Identity, Log, Pick, Sign, TopK, Uniform, backend

DENSE = [Identity(), Half(), Half("bf16")]
ONE_LEVEL = [Sign(), Sign(block=64), Pick(), Pick(block=64), Pick(4)]
DETERMINISTIC = [*ONE_LEVEL, *(Log(b) for b in range(2, 7)), *(Uniform(b) for b in range(2, 9))]
STOCHASTIC = [Uniform(4, stochastic=True), Uniform(8, stochastic=True, seed=7)]
BLOCKWISE = [*DETERMINISTIC, *STOCHASTIC]
SPARSE = [TopK(0.01), TopK(0.3), TopK(1.0), TopK(0.01, bits=1), TopK(0.4, bits=1)]
ALL = [*DENSE, *BLOCKWISE, *SPARSE]

SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 2047, 2048, 2049, 5000, 20011]
KINDS = ["normal", "zeros", "signed zeros", "denormal", "huge", "outlier", "constant", "wide", "ties"]

few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
compressors = st.sampled_from(ALL)
blockwise = st.sampled_from(BLOCKWISE)


def make(kind: str, size: int, seed: int) -> Tensor:
    """Returns a vector of one of the KINDS."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, generator=generator)
    if kind == "zeros":
        return torch.zeros(size)
    if kind == "signed zeros":
        return normal.sign() * 0.0
    if kind == "denormal":
        return (
            torch.randint(-40, 41, (size,), generator=generator).to(torch.int32).abs().view(torch.float32)
            * normal.sign()
        )
    if kind == "huge":
        return (normal / 8).clamp(-0.49, 0.49) * torch.finfo(torch.float32).max
    if kind == "outlier":
        normal[: min(size, 1)] = 1e6
        return normal
    if kind == "constant":
        return torch.full((size,), float(torch.randn((), generator=generator)))
    if kind == "wide":
        return normal * torch.exp2(torch.randint(-140, 100, (size,), generator=generator).float())
    if kind == "ties":
        return torch.randint(-2, 3, (size,), generator=generator).float()
    return normal


vectors = st.builds(make, st.sampled_from(KINDS), st.sampled_from(SIZES), st.integers(0, 2**32))


def plain_torch() -> AbstractContextManager[object]:
    """Hides the numba kernels, so that compressors run in plain torch."""
    return mock.patch.object(backend, "_numba_kernels", return_value=None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
