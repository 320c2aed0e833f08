"""The levels of the block quantizers: the fp32 values that symbols stand for.

Each function adds weight · levels to `target`. `bits` is the width of a symbol.
"""

# mypy: ignore-errors
# numba compiles its own dialect of Python, which mypy would check as Python.

import numpy as np

from laconic.compress.jit import helper
from laconic.compress.kernels.bits import SIGN, add32, and32, bits_of, float_of, shl32


@helper
def add_sign_levels(symbols, scale, weight, target):
    """The levels are ±scale."""
    level = bits_of(scale)
    for i in range(target.size):
        target[i] += weight * float_of(np.int32(np.int32(np.int32(symbols[i]) << 31) | level))


@helper
def add_log_levels(bits, symbols, scale, weight, target):
    """The levels are 0 and ±2^(index − mask) · scale. The power of two is made by its bits."""
    mask = np.int32((1 << (bits - 1)) - 1)
    exponent = np.int32(127 - mask)
    for i in range(target.size):
        symbol = np.int32(symbols[i])
        index = and32(symbol, mask)
        power = shl32(add32(index, exponent), np.int32(23)) if index > np.int32(0) else np.int32(0)
        sign = SIGN if symbol > mask else np.int32(0)
        target[i] += weight * (float_of(np.int32(power | sign)) * scale)


@helper
def add_uniform_levels(bits, symbols, scale, weight, target):
    """The levels are (symbol − n)/n · scale, n = 2^(bits−1) − 1."""
    top = np.int32((1 << (bits - 1)) - 1)
    unit = np.float32(1.0) / np.float32(top)
    for i in range(target.size):
        target[i] += weight * ((np.float32(np.int32(np.int32(symbols[i]) - top)) * unit) * scale)
