"""Importing this module loads all kernels, compiling those that are not in numba's cache yet.

For a process that forks workers: each of them would otherwise take half a second for it in its first step.
"""

from __future__ import annotations

import torch

from laconic.compress.feedback import encode_with_feedback
from laconic.compress.quantizers import Uniform
from laconic.compress.spec import NAMES
from laconic.methods import common, windows
from laconic.methods.averaging import anchor
from laconic.methods.carried import Codes

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
if _kernels := common.find_kernels(_x):
    _vectors = _kernels.arrays_of(windows.Vectors(*(_x.square() for _ in windows.Vectors._fields)))
    _window = windows.Window.of({}, [windows.Step(1e-3, 0.9, 0.999, 1e-8, 0.0)], 0, [0.0])
    _runs = [windows.Run(slice(0, _x.numel()), 0.5, 0.0)]
    _cuts = [windows.Cut(slice(0, _x.numel()), _window, _window)]
    _gain = _kernels.gain(_vectors, _runs)
    _kernels.make_up(_vectors, _gain, _gain, _cuts, None, False, False)
    _uniform = Uniform(4)
    _least, _code = windows.least_units(_x), torch.empty(_uniform.nbytes(_x.numel()), dtype=torch.uint8)
    _kernels.encode(_vectors, _runs, _uniform, 0, _least, _code)
    _kernels.settle(_vectors, Codes(_uniform, [_code], [1.0], 0, 0), _cuts, _least, False, False)
