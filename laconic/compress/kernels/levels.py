"""What the codes of the quantizers with one scale a block stand for."""

# mypy: ignore-errors
# (numba compiles a dialect of Python that mypy takes for Python)

import numpy as np
from numba import njit

from laconic.compress.kernels.bits import SIGN, add32, and32, bits_of, float_of, shl32

SIGN_KIND, LOG_KIND, PICK_KIND, TERNARY_KIND, UNIFORM_KIND, STOCHASTIC_KIND = range(6)
EVEN = TERNARY_KIND  # from here on levels are evenly spaced around 0


@njit(nogil=True, cache=True)
def sign_level(code, level):
    return float_of(np.int32(np.int32(np.int32(code) << 31) | level))


@njit(nogil=True, cache=True)
def log_level(code, mask, exponent, scale):
    index = and32(np.int32(code), mask)
    power = shl32(add32(index, exponent), np.int32(23)) if index > np.int32(0) else np.int32(0)
    sign = SIGN if np.int32(code) > mask else np.int32(0)
    return float_of(np.int32(power | sign)) * scale


@njit(nogil=True, cache=True)
def uniform_level(code, offset, unit, scale):
    return (np.float32(np.int32(np.int32(code) - offset)) * unit) * scale


@njit(nogil=True, cache=True)
def levels_of(kind, bits, codes, scale, values):
    top = np.int32((1 << (bits - 1)) - 1)
    if kind == SIGN_KIND:
        level = bits_of(scale)
        for i in range(values.size):
            values[i] = sign_level(codes[i], level)
    elif kind == LOG_KIND:
        exponent = np.int32(127 - top)
        for i in range(values.size):
            values[i] = log_level(codes[i], top, exponent, scale)
    else:
        unit = np.float32(1.0) / np.float32(top)
        for i in range(values.size):
            values[i] = uniform_level(codes[i], top, unit, scale)


@njit(nogil=True, cache=True)
def add_levels(kind, bits, codes, scale, weight, target):
    """target += weight · levels."""
    top = np.int32((1 << (bits - 1)) - 1)
    if kind == SIGN_KIND:
        level = bits_of(scale)
        for i in range(target.size):
            target[i] += weight * sign_level(codes[i], level)
    elif kind == LOG_KIND:
        exponent = np.int32(127 - top)
        for i in range(target.size):
            target[i] += weight * log_level(codes[i], top, exponent, scale)
    else:
        unit = np.float32(1.0) / np.float32(top)
        for i in range(target.size):
            target[i] += weight * uniform_level(codes[i], top, unit, scale)


@njit(nogil=True, cache=True)
def levels_of_halves(packed, scale, values):
    """`levels_of` even codes of 4 bits as they are packed: half a byte for each half of the values."""
    half = packed.size
    low, high = values[:half], values[half:]
    top, unit = np.int32(7), np.float32(1.0) / np.float32(7)
    for i in range(half):
        low[i] = uniform_level(packed[i] & np.uint8(15), top, unit, scale)
        high[i] = uniform_level(packed[i] >> np.uint8(4), top, unit, scale)


@njit(nogil=True, cache=True)
def add_levels_of_halves(packed, scale, weight, target):
    half = packed.size
    low, high = target[:half], target[half:]
    top, unit = np.int32(7), np.float32(1.0) / np.float32(7)
    for i in range(half):
        low[i] += weight * uniform_level(packed[i] & np.uint8(15), top, unit, scale)
        high[i] += weight * uniform_level(packed[i] >> np.uint8(4), top, unit, scale)


@njit(nogil=True, cache=True)
def levels_of_quarters(packed, scale, values):
    """The same with 2 bits: a quarter of a byte for each quarter of the values."""
    n = packed.size
    a, b, c, d = values[:n], values[n : 2 * n], values[2 * n : 3 * n], values[3 * n :]
    top, unit = np.int32(1), np.float32(1.0)
    for i in range(n):
        byte = packed[i]
        a[i] = uniform_level(byte & np.uint8(3), top, unit, scale)
        b[i] = uniform_level((byte >> np.uint8(2)) & np.uint8(3), top, unit, scale)
        c[i] = uniform_level((byte >> np.uint8(4)) & np.uint8(3), top, unit, scale)
        d[i] = uniform_level(byte >> np.uint8(6), top, unit, scale)


@njit(nogil=True, cache=True)
def add_levels_of_quarters(packed, scale, weight, target):
    n = packed.size
    a, b, c, d = target[:n], target[n : 2 * n], target[2 * n : 3 * n], target[3 * n :]
    top, unit = np.int32(1), np.float32(1.0)
    for i in range(n):
        byte = packed[i]
        a[i] += weight * uniform_level(byte & np.uint8(3), top, unit, scale)
        b[i] += weight * uniform_level((byte >> np.uint8(2)) & np.uint8(3), top, unit, scale)
        c[i] += weight * uniform_level((byte >> np.uint8(4)) & np.uint8(3), top, unit, scale)
        d[i] += weight * uniform_level(byte >> np.uint8(6), top, unit, scale)
