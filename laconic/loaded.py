"""Importing this module loads all kernels, compiling those that are not in numba's cache yet.

For a process that forks workers: each of them would otherwise take half a second for it in its first step.
"""

from __future__ import annotations

import torch

from laconic.compress.feedback import encode_with_feedback
from laconic.compress.quantizers import Uniform
from laconic.compress.spec import NAMES
from laconic.methods.averaging import anchor
from laconic.methods.divisible import stretch

_x = torch.linspace(-1, 1, 1 << 16)  # as large as the anchor wants for its kernels
for _compressor in [*(_kind() for _kind in NAMES.values()), Uniform(stochastic=True)]:
    _code = encode_with_feedback(_compressor, _x, torch.zeros_like(_x))
    _compressor.encode(_x)
    _compressor.decode(_code, _x.numel())
    _compressor.decode_add(_code, torch.zeros_like(_x))
    _compressor.encode_difference(_x, -_x)
    _compressor.settle([_code], [1.0], 0, _x.clone(), _x.clone())
_anchor, _ = anchor.make_anchor(_x)
anchor.squared_distance(_x, _anchor)
anchor.move_anchor(_x, _anchor)
if _kernels := stretch._find_kernels(_x):
    _factors = stretch.Factors.of({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}, 1, 1, 2)
    _vectors = [_x.square().numpy() for _ in range(4)]
    _kernels.refresh(*_vectors[:2], *_factors)
    _kernels.stretch(*_vectors, *_factors)
