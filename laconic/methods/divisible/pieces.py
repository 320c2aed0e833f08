"""Which entries travel when."""

from __future__ import annotations

import math

GRAIN = 2048  # entries; quantizers have blocks of this length, and vectors are read fastest where these begin


def next_piece(start: int, d: int, period: int) -> slice:
    """Returns the 1/period of d entries that begins at `start`, in whole grains where that adds little.

    >>> next_piece(0, d=10, period=4), next_piece(9, d=10, period=4)
    (slice(0, 3, None), slice(9, 10, None))
    """
    length = -(-d // max(period, 1))
    if length >= 16 * GRAIN:
        length = -(-length // GRAIN) * GRAIN
    return slice(start, min(start + length, d))


def foreground_block(step: int, d: int, ratio: int) -> slice:
    """Returns ⌈d/ratio⌉ consecutive entries (fewer at the end of the vector), the same on all workers.

    Every entry has its turn once in ⌈d/length⌉ ≤ ratio steps. Blocks of consecutive steps are far apart, so that none
    follows the background around.

    >>> [foreground_block(step, d=4, ratio=2) for step in (0, 1)]
    [slice(0, 2, None), slice(2, 4, None)]
    """
    length = -(-d // ratio)
    blocks = -(-d // length)
    stride = max(1, round(0.618 * blocks))
    while math.gcd(stride, blocks) > 1:
        stride += 1
    start = step * stride % blocks * length
    return slice(start, min(start + length, d))


def overlap(one: slice, other: slice) -> bool:
    return bool(max(one.start, other.start) < min(one.stop, other.stop))
