"""Kernels of `Pick`. A block is as many rows as a group has entries, the last ones shorter or empty, and a group is a
column: so groups stand side by side in memory, and loops over them vectorise."""

# mypy: ignore-errors
# (numba compiles a dialect of Python that mypy takes for Python)

import numpy as np
from numba import njit

from laconic.compress.kernels.bits import MAGNITUDE, and32, bits_of, fill


@njit(nogil=True, cache=True)
def picked_nbytes(of, count):
    return (-(-count // of) + 1) // 2


@njit(nogil=True, cache=True)
def pick_codes(of, p, middle, packed):
    """Two a byte: of each group the largest, if it is at least `middle` (bits)."""
    row = -(-p.size // of)
    most, codes = np.empty(row, np.int32), np.empty(row, np.int32)
    fill(most, np.int32(middle - np.int32(1)))
    fill(codes, np.int32(0))
    for number in range(of):
        take_larger(p[number * row : (number + 1) * row], np.int32(number + 1), np.int32(number + 1 + of), most, codes)
    half = packed.size
    for i in range(half):
        packed[i] = np.uint8(codes[i])
    for i in range(row - half):
        packed[i] |= np.uint8(codes[half + i] << np.int32(4))


@njit(nogil=True, cache=True)
def take_larger(p, positive, negative, most, codes):
    for i in range(p.size):
        pattern = bits_of(p[i])
        magnitude = and32(pattern, MAGNITUDE)
        code = negative if pattern < np.int32(0) else positive
        codes[i] = code if magnitude > most[i] else codes[i]
        most[i] = magnitude if magnitude > most[i] else most[i]


@njit(nogil=True, cache=True)
def add_picked(of, packed, scale, weight, codes, target):
    """target += weight · levels; `codes` is room to work in."""
    row, half = -(-target.size // of), packed.size
    for i in range(half):
        codes[i] = packed[i] & np.uint8(15)
    for i in range(half):
        codes[half + i] = packed[i] >> np.uint8(4)
    level, nothing = weight * scale, weight * np.float32(0.0)
    for number in range(of):
        rows = target[number * row : (number + 1) * row]
        add_row(codes, np.uint8(number + 1), np.uint8(number + 1 + of), level, nothing, rows)


@njit(nogil=True, cache=True)
def add_row(codes, positive, negative, level, nothing, target):
    for i in range(target.size):
        plus = level if codes[i] == positive else nothing
        target[i] += -level if codes[i] == negative else plus
