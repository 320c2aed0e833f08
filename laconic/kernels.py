"""Compiles the numba kernels of the whole package ahead of time.

Kernels are compiled at first use otherwise, and then kept in numba's cache on disk. Even from the cache, loading them
takes half a second per process; a process that loads them before it forks its workers pays that once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.compress.feedback import encode_with_feedback
from laconic.compress.quantizers import Uniform
from laconic.compress.spec import NAMES
from laconic.methods.averaging import anchor
from laconic.methods.divisible import stretch


def warm_up() -> None:
    """Compiles every kernel, or loads it from numba's cache, by running it once on a small vector.

    Takes a minute or so if nothing is cached, half a second otherwise.
    """
    x = torch.linspace(-1, 1, 1 << 16)  # the smallest size at which the anchor uses its kernels
    _run_compressors(x)
    _run_anchor(x)
    _run_divisible(x)


def _run_compressors(x: Tensor) -> None:
    for compressor in [*(kind() for kind in NAMES.values()), Uniform(stochastic=True)]:
        code = encode_with_feedback(compressor, x, torch.zeros_like(x))
        compressor.encode(x)
        compressor.decode(code, x.numel())
        compressor.decode_add(code, torch.zeros_like(x))


def _run_anchor(x: Tensor) -> None:
    laid, _ = anchor.make_anchor(x)
    anchor.squared_distance(x, laid)
    anchor.move_anchor(x, laid)


def _run_divisible(x: Tensor) -> None:
    factors = stretch.Factors.of({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}, count=1, seen=1, steps=1, workers=2)
    if kernels := stretch.find_kernels(x):
        vectors = [x.square().numpy() for _ in range(4)]
        kernels.refresh(*vectors[:2], *factors)
        kernels.stretch(*vectors, *factors)
