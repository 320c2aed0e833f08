"""Importing this module loads all kernels, compiling those that are not in numba's cache yet.

For a process that forks workers: each of them would otherwise take half a second for it in its first step.
"""

from __future__ import annotations

import torch

from laconic import anchor
from laconic.compress.feedback import encode_with_feedback
from laconic.compress.quantizers import Uniform
from laconic.compress.spec import NAMES
from laconic.methods import common

_x = torch.linspace(-1, 1, 1 << 16)  # as large as the anchor wants for its kernels
for _compressor in [*(_kind() for _kind in NAMES.values()), Uniform(stochastic=True)]:
    _code = encode_with_feedback(_compressor, _x, torch.zeros_like(_x))
    _compressor.encode(_x)
    _compressor.decode(_code, _x.numel())
    _compressor.decode_add(_code, torch.zeros_like(_x))
_anchor, _ = anchor.lay_anchor(_x)
anchor.squared_distance(_x, _anchor)
anchor.move_anchor(_x, _anchor)
if _kernels := common.find_kernels(_x):
    _vectors = common.Vectors(*(_x.square() for _ in common.Vectors._fields))
    _group = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": True}
    _window = common.Window.of(_group, [1e-3], 0, [0.0])
    _gain = _kernels.gain(_vectors, [common.Run(slice(0, _x.numel()), 0.5, 0.0)])
    _cut = common.Cut(slice(0, _x.numel()), _window, _window, 0.0)
    _kernels.make_up(_vectors, _gain, _gain, [_cut], None, False, False)
