"""Kernels of `Pick`. A block is seven rows, the last one shorter, and a group is a column of them: so groups stand side
by side in memory, and loops over them vectorise."""

# mypy: ignore-errors
# (numba compiles a dialect of Python that mypy takes for Python)

import numpy as np
from numba import njit

from laconic.compress.kernels.bits import MAGNITUDE, and32, bits_of, fill
from laconic.compress.quantizers import GROUP

NEGATIVE = np.int32(GROUP)  # what a minus adds to a code


@njit(nogil=True, cache=True)
def picked_nbytes(block, count):
    """Of the codes of the first `count` entries of a block, at two a byte."""
    return (min(-(-block // GROUP), count) + 1) // 2


@njit(nogil=True, cache=True)
def pick_codes(p, count, middle, packed):
    """The codes of p, of which `count` entries are no padding; told is what is at least `middle` (bits)."""
    row = -(-p.size // GROUP)
    most, codes = np.empty(row, np.int32), np.empty(row, np.int32)
    fill(most, np.int32(middle - np.int32(1)))
    fill(codes, np.int32(0))
    for number in range(GROUP):
        take_larger(p[number * row : (number + 1) * row], np.int32(number + 1), most, codes)
    half = packed.size
    for i in range(half):
        packed[i] = np.uint8(codes[i])
    for i in range(min(row, count) - half):
        packed[i] |= np.uint8(codes[half + i] << np.int32(4))


@njit(nogil=True, cache=True)
def take_larger(p, code, most, codes):
    for i in range(p.size):
        pattern = bits_of(p[i])
        magnitude = and32(pattern, MAGNITUDE)
        signed = code + NEGATIVE if pattern < np.int32(0) else code
        codes[i] = np.int32(signed) if magnitude > most[i] else codes[i]
        most[i] = magnitude if magnitude > most[i] else most[i]


@njit(nogil=True, cache=True)
def add_picked(packed, block, scale, weight, codes, target):
    """target += weight · levels, of the first entries of a block; `codes` is room to work in."""
    row, half = -(-block // GROUP), packed.size
    for i in range(half):
        codes[i] = packed[i] & np.uint8(15)
    for i in range(half):
        codes[half + i] = packed[i] >> np.uint8(4)
    level = weight * scale
    for number in range(GROUP):
        add_row(codes, np.uint8(number + 1), level, target[number * row : (number + 1) * row])


@njit(nogil=True, cache=True)
def add_row(codes, number, level, target):
    negative = np.uint8(number + np.uint8(GROUP))
    for i in range(target.size):
        plus = level if codes[i] == number else np.float32(0.0)
        target[i] += -level if codes[i] == negative else plus
