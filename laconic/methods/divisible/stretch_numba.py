"""`refresh` and `stretch` of stretch.py for fp32 in main memory, each in one pass and with the same bits.

Not compiled with fastmath: fused multiply-adds would change bits. With Python's rules for division by zero the loops
would not become vector instructions, and take six times as long.
"""

# mypy: ignore-errors
# (numba compiles a dialect of Python that mypy takes for Python)

from __future__ import annotations

import numpy as np

from laconic.compress.jit import kernel

TINY = np.float32(1e-38)


@kernel(error_model="numpy")
def _refresh(q, m, kept, added):
    for i in range(q.size):
        q[i] = q[i] * kept + m[i] * m[i] * added


@kernel(error_model="numpy")
def _stretch(x, m, v, q, rate, unbias_v, eps, slope, least):
    one = np.float32(1.0)
    for i in range(x.size):
        v_hat = v[i] * unbias_v
        share = one - (one - q[i] / max(v_hat, TINY)) * slope
        root = np.sqrt(min(max(share, least), one))
        denominator = np.sqrt(v_hat) + eps
        x[i] -= (one - root) * (m[i] * rate) / (root * denominator)


def refresh(q, m, rate, unbias_v, eps, slope, least, kept, added):
    _refresh(q, m, np.float32(kept), np.float32(added))


def stretch(x, m, v, q, rate, unbias_v, eps, slope, least, kept, added):
    _stretch(x, m, v, q, *map(np.float32, (rate, unbias_v, eps, slope, least)))
