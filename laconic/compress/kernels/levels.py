"""The levels of the block quantizers: the fp32 values that symbols stand for.

`kind` selects the quantizer. `bits` is the width of a symbol.
"""

# mypy: ignore-errors
# numba compiles its own dialect of Python, which mypy would check as Python.

import numpy as np

from laconic.compress.jit import njit
from laconic.compress.kernels.bits import SIGN, add32, and32, bits_of, float_of, shl32

SIGN_KIND, LOG_KIND, PICK_KIND, UNIFORM_KIND, STOCHASTIC_KIND = range(5)


@njit(nogil=True)
def sign_level(symbol, level):
    """Returns ±scale; `level` holds the bits of the scale."""
    return float_of(np.int32(np.int32(np.int32(symbol) << 31) | level))


@njit(nogil=True)
def log_level(symbol, mask, exponent, scale):
    """Returns 0 or ±2^(index − mask) · scale, by building the bits of the power of two; `exponent` is 127 − mask."""
    index = and32(np.int32(symbol), mask)
    power = shl32(add32(index, exponent), np.int32(23)) if index > np.int32(0) else np.int32(0)
    sign = SIGN if np.int32(symbol) > mask else np.int32(0)
    return float_of(np.int32(power | sign)) * scale


@njit(nogil=True)
def uniform_level(symbol, offset, unit, scale):
    """Returns (symbol − offset) · unit · scale."""
    return (np.float32(np.int32(np.int32(symbol) - offset)) * unit) * scale


@njit(nogil=True)
def levels_of(kind, bits, symbols, scale, values):
    """values = levels of the symbols. Not for `Pick`."""
    top = np.int32((1 << (bits - 1)) - 1)
    if kind == SIGN_KIND:
        level = bits_of(scale)
        for i in range(values.size):
            values[i] = sign_level(symbols[i], level)
    elif kind == LOG_KIND:
        exponent = np.int32(127 - top)
        for i in range(values.size):
            values[i] = log_level(symbols[i], top, exponent, scale)
    else:
        unit = np.float32(1.0) / np.float32(top)
        for i in range(values.size):
            values[i] = uniform_level(symbols[i], top, unit, scale)


@njit(nogil=True)
def add_levels(kind, bits, symbols, scale, weight, target):
    """target += weight · levels of the symbols. Not for `Pick`."""
    top = np.int32((1 << (bits - 1)) - 1)
    if kind == SIGN_KIND:
        level = bits_of(scale)
        for i in range(target.size):
            target[i] += weight * sign_level(symbols[i], level)
    elif kind == LOG_KIND:
        exponent = np.int32(127 - top)
        for i in range(target.size):
            target[i] += weight * log_level(symbols[i], top, exponent, scale)
    else:
        unit = np.float32(1.0) / np.float32(top)
        for i in range(target.size):
            target[i] += weight * uniform_level(symbols[i], top, unit, scale)
