"""Kernels of `Pick`.

A block is laid out as a matrix of `of` rows, the last ones shorter or empty, and a group is a column. Neighbouring
groups are neighbours in memory, so the loops vectorize.
"""

# mypy: ignore-errors
# numba compiles its own dialect of Python, which mypy would check as Python.

import numpy as np

from laconic.compress.jit import helper
from laconic.compress.kernels.bits import MAGNITUDE, and32, bits_of, fill


@helper
def picked_nbytes(of, count):
    """Returns the bytes of the packed symbols of `count` entries."""
    return (-(-count // of) + 1) // 2


@helper
def pack_picks(of, p, threshold, packed):
    """Picks the largest entry of each group, if its bits reach `threshold`, and packs two symbols into a byte."""
    row = -(-p.size // of)
    largest, symbols = np.empty(row, np.int32), np.empty(row, np.int32)
    fill(largest, np.int32(threshold - np.int32(1)))
    fill(symbols, np.int32(0))
    for number in range(of):
        take_larger(
            p[number * row : (number + 1) * row], np.int32(number + 1), np.int32(number + 1 + of), largest, symbols
        )
    half = packed.size
    for i in range(half):
        packed[i] = np.uint8(symbols[i])
    for i in range(row - half):
        packed[i] |= np.uint8(symbols[half + i] << np.int32(4))


@helper
def take_larger(p, positive, negative, largest, symbols):
    """Takes the entries of one row as the picks of groups in which they are the largest so far."""
    for i in range(p.size):
        pattern = bits_of(p[i])
        magnitude = and32(pattern, MAGNITUDE)
        symbol = negative if pattern < np.int32(0) else positive
        symbols[i] = symbol if magnitude > largest[i] else symbols[i]
        largest[i] = magnitude if magnitude > largest[i] else largest[i]


@helper
def add_picked(of, packed, scale, weight, symbols, target):
    """target += weight · levels; `symbols` is scratch memory."""
    row, half = -(-target.size // of), packed.size
    for i in range(half):
        symbols[i] = packed[i] & np.uint8(15)
    for i in range(half):
        symbols[half + i] = packed[i] >> np.uint8(4)
    level, zero = weight * scale, weight * np.float32(0.0)
    for number in range(of):
        rows = target[number * row : (number + 1) * row]
        add_row(symbols, np.uint8(number + 1), np.uint8(number + 1 + of), level, zero, rows)


@helper
def add_row(symbols, positive, negative, level, zero, target):
    """Adds ±level to the entries of one row that were picked, and `zero` (0.0 or −0.0) to the others."""
    for i in range(target.size):
        plus = level if symbols[i] == positive else zero
        target[i] += -level if symbols[i] == negative else plus
