"""`refresh` and `stretch` of stretch.py for fp32 in main memory, each in one pass and with the same bits.

Not compiled with fastmath: fused multiply-adds would change bits.
"""

# mypy: ignore-errors
# (numba compiles a dialect of Python that mypy takes for Python)

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def _refresh(ratio, m, v, weight, unbias_ratio):
    for i in range(ratio.size):
        if v[i] > np.float32(0.0):
            newest = min(m[i] * m[i] * unbias_ratio / v[i], np.float32(1.0))
            ratio[i] += (newest - ratio[i]) * weight


@njit(nogil=True, cache=True)
def _stretch(x, m, v, ratio, rate, unbias_v, eps, slope, least):
    one = np.float32(1.0)
    for i in range(x.size):
        share = one - (one - ratio[i]) * slope
        root = np.sqrt(min(max(share, least), one))
        denominator = np.sqrt(v[i] * unbias_v) + eps
        x[i] -= (one - root) * (m[i] * rate) / (root * denominator)


def refresh(ratio, m, v, rate, unbias_v, eps, slope, least, weight, unbias_ratio):
    _refresh(ratio, m, v, np.float32(weight), np.float32(unbias_ratio))


def stretch(x, m, v, ratio, rate, unbias_v, eps, slope, least, weight, unbias_ratio):
    _stretch(x, m, v, ratio, *map(np.float32, (rate, unbias_v, eps, slope, least)))
