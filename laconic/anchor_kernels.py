"""The anchor's measurements for fp32 on the CPU, each in one pass over x, at the speed of memory.

Sums run in LANES independent fp32 lanes, emptied into a double every FLUSH rows. This fixes the order of all additions,
so a result does not depend on the width of the processor's vectors, and yet the compiler can use them.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

LANES = 1024
FLUSH = 64


def squared_distance(x: Tensor, anchor: Tensor) -> float:
    return float(_squared_distance(x.numpy(), anchor.view(torch.uint16).numpy()))


def move_anchor(x: Tensor, anchor: Tensor) -> tuple[float, float]:
    bits = x.view(torch.uint32).numpy()
    before, after = _move_anchor(x.numpy(), bits, anchor.view(torch.uint16).numpy())
    return float(before), float(after)


@numba.njit(nogil=True, cache=True)
def _squared_distance(x: Any, anchor: Any) -> Any:
    lanes = np.zeros(LANES, np.float32)
    total = 0.0
    for row, start in enumerate(range(0, x.size, LANES)):
        _add_squares(lanes, x[start : start + LANES], anchor[start : start + LANES])
        if row % FLUSH == FLUSH - 1:
            total += _empty(lanes)
    return total + _empty(lanes)


@numba.njit(nogil=True, cache=True)
def _move_anchor(x: Any, bits: Any, anchor: Any) -> Any:
    """`bits` is the memory of x again, as integers."""
    lanes_before, lanes_after = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    before, after = 0.0, 0.0
    for row, start in enumerate(range(0, x.size, LANES)):
        # The row stays in the nearest cache meanwhile: all this is one pass over memory.
        x_row, anchor_row = x[start : start + LANES], anchor[start : start + LANES]
        _add_squares(lanes_before, x_row, anchor_row)
        _truncate(lanes_after, x_row, bits[start : start + LANES], anchor_row)
        if row % FLUSH == FLUSH - 1:
            before += _empty(lanes_before)
            after += _empty(lanes_after)
    return before + _empty(lanes_before), after + _empty(lanes_after)


@numba.njit(nogil=True, cache=True)
def _add_squares(lanes: Any, x: Any, anchor: Any) -> None:
    for j in range(x.size):
        difference = x[j] - _widened(anchor[j])
        lanes[j] += difference * difference


@numba.njit(nogil=True, cache=True)
def _truncate(lanes: Any, x: Any, bits: Any, anchor: Any) -> None:
    """float32 → bfloat16, towards zero: cheaper than to the nearest, and never infinite."""
    for j in range(x.size):
        half = bits[j] >> np.uint32(16)
        anchor[j] = half
        difference = x[j] - _widened(half)
        lanes[j] += difference * difference


@numba.njit(nogil=True, cache=True)
def _widened(half: Any) -> Any:
    """bfloat16 → float32."""
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@numba.njit(nogil=True, cache=True)
def _empty(lanes: Any) -> Any:
    total = 0.0
    for j in range(lanes.size):
        total += lanes[j]
        lanes[j] = 0.0
    return total
