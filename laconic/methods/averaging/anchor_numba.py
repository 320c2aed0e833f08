"""The anchor's distances for fp32 on the CPU, each in one pass over x at the speed of memory.

Sums run in LANES independent fp32 lanes, which are added to a double and cleared every FLUSH rows. This fixes the order
of all additions, so the result does not depend on the processor's vector width, and the compiler can still vectorize.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.compress.jit import helper, kernel

LANES = 1024
FLUSH = 64
STREAMS = 4  # parts of the vector that are read in turn: one core reads memory faster this way than in one stream


def squared_distance(x: Tensor, anchor: Tensor) -> float:
    return float(_squared_distance(x.numpy(), anchor.view(torch.uint16).numpy()))


def move_anchor(x: Tensor, anchor: Tensor) -> float:
    halves = anchor.view(torch.uint16).numpy()
    _truncate(x.view(torch.uint32).numpy(), halves)
    return float(_squared_distance(x.numpy(), halves))


@kernel
def _squared_distance(x: Any, anchor: Any) -> Any:
    lanes = np.zeros(LANES, np.float32)
    total = 0.0
    rows = x.size // (LANES * STREAMS)  # of each stream
    for row in range(rows):
        for stream in range(STREAMS):
            start = (stream * rows + row) * LANES
            _add_squares(lanes, x[start : start + LANES], anchor[start : start + LANES])
        if row % (FLUSH // STREAMS) == FLUSH // STREAMS - 1:
            total += _flush(lanes)
    for start in range(rows * STREAMS * LANES, x.size, LANES):
        _add_squares(lanes, x[start : start + LANES], anchor[start : start + LANES])
    return total + _flush(lanes)


@helper
def _add_squares(lanes: Any, x: Any, anchor: Any) -> None:
    for j in range(x.size):
        difference = x[j] - np.uint32(np.uint32(anchor[j]) << np.uint32(16)).view(np.float32)
        lanes[j] += difference * difference


@kernel
def _truncate(bits: Any, anchor: Any) -> None:
    """Rounds float32, given as its bits, to bfloat16 towards zero: cheaper than to the nearest, and never infinite."""
    for i in range(bits.size):
        anchor[i] = bits[i] >> np.uint32(16)


@helper
def _flush(lanes: Any) -> Any:
    """Returns the sum of the lanes, and sets them to 0."""
    total = 0.0
    for j in range(lanes.size):
        total += lanes[j]
        lanes[j] = 0.0
    return total
