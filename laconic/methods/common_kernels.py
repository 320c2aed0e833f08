"""`laconic.methods.common` for fp32 on the CPU: memory is passed over once, and entries go side by side.

(For the latter a loop reads all of an entry before it writes any of it. Whether vectors overlap is seen at run time.)
"""

# mypy: ignore-errors
# (numba compiles a dialect of Python that mypy takes for Python)

import numpy as np
import torch
from numba import njit
from torch import Tensor

from laconic.compress.blockwise import Blockwise
from laconic.compress.kernels.bits import MAGNITUDE, NOT_FINITE, add32, bits_of, fill, float_of
from laconic.compress.kernels.blockwise import MINUS_ZERO
from laconic.compress.kernels.settle import encode_block, read_block, room_to_encode
from laconic.methods import common
from laconic.methods.carried import Codes

BLOCK = common.BLOCK
LEAST_UNIT, TINY, HALF_BIAS = np.float32(common.LEAST_UNIT), np.float32(common.TINY), np.int32(common.HALF_BIAS)
FACTORS = np.dtype([(name, np.float32) for name in common.Window._fields])
NO_UNITS = np.empty(0, np.float32)


def gain(vectors: common.Vectors, runs: list[common.Run], least: Tensor | None = None) -> Tensor:
    gain = torch.empty_like(vectors.m)
    arrays = [vector.numpy() for vector in (vectors.m, vectors.m_hat, vectors.v_hat, gain)]
    _gain(*arrays, *_of_runs(runs), NO_UNITS if least is None else least.numpy())
    return gain


def encode(
    vectors: common.Vectors, runs: list[common.Run], compressor: Blockwise, step: int, least: Tensor, out: Tensor
) -> bool:
    """`common.least_units`, and the code of the gain in these; false if an entry is not finite."""
    arrays = [vector.numpy() for vector in (vectors.m, vectors.m_hat, vectors.v_hat)]
    return _encode(*compressor.coding(step), *arrays, *_of_runs(runs), least.numpy(), out.numpy())


def make_up(
    vectors: common.Vectors, mean: Tensor, said: Tensor, cuts: list[common.Cut], least: Tensor | None = None
) -> None:
    arrays = [vector.numpy() for vector in (*vectors, mean, said)]
    _make_up(*arrays, *_of_cuts(cuts), NO_UNITS if least is None else least.numpy())


def settle(vectors: common.Vectors, codes: Codes, cuts: list[common.Cut], least: Tensor) -> None:
    """`make_up` with the mean of codes, which is nowhere stored."""
    readable = codes.compressor.readable(codes.codes, codes.weights, codes.own, vectors.x.numel())
    arrays = [vector.numpy() for vector in vectors]
    _settle(*readable, *arrays, *_of_cuts(cuts), least.numpy())


def _of_runs(runs: list[common.Run]) -> tuple[np.ndarray, np.ndarray]:
    """Where they end, and what is kept in them. They follow one another from 0 on."""
    return np.array([run.part.stop for run in runs]), np.array([run.kept for run in runs], np.float32)


def _of_cuts(cuts: list[common.Cut]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    bounds = np.array([(cut.part.start, cut.part.stop) for cut in cuts], np.int64).reshape(-1, 2)
    return bounds, np.array([cut.window for cut in cuts], FACTORS), np.array([cut.since for cut in cuts], FACTORS)


@njit(nogil=True, cache=True, error_model="numpy")
def _gain(m, m_hat, v_hat, out, stops, kept, least):
    run = 0
    for first in range(0, out.size, BLOCK):
        last = min(first + BLOCK, out.size)
        of_block = least[first // BLOCK] if least.size else np.float32(0.0)
        run = _gain_of_block(m, m_hat, v_hat, stops, kept, run, first, last, out[first:last], least.size > 0, of_block)


@njit(nogil=True, error_model="numpy")
def _gain_of_block(m, m_hat, v_hat, stops, kept, run, first, last, out, has_units, least):
    """From `run` on; the run that goes on behind the block."""
    start = first
    while start < last:
        stop = min(stops[run], last)
        target = out[start - first : stop - first]
        _gain_of_run(m[start:stop], m_hat[start:stop], v_hat[start:stop], kept[run], target, has_units, least)
        if stops[run] == stop:
            run += 1
        start = stop
    return run


@njit(nogil=True)
def _about_root(x):
    return float_of(add32(np.int32(bits_of(x) >> np.int32(1)), HALF_BIAS))


@njit(nogil=True, error_model="numpy")
def _gain_of_run(m, m_hat, v_hat, kept, out, has_units, least):
    for i in range(out.size):
        gain = m[i] - m_hat[i] * kept
        unit = _about_root(v_hat[i])
        unit = unit if unit > least else least
        out[i] = gain / unit if has_units else gain


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(kind, bits, block, key, m, m_hat, v_hat, stops, kept, least, out):
    room = room_to_encode(block)
    p = np.empty(block, np.float32)
    run = 0
    for first in range(0, m.size, block):
        last = min(first + block, m.size)
        if last - first < block:
            fill(p, MINUS_ZERO)
        of_block = _about_root(float_of(_largest(v_hat[first:last]))) * LEAST_UNIT + TINY
        least[first // block] = of_block
        run = _gain_of_block(m, m_hat, v_hat, stops, kept, run, first, last, p[: last - first], True, of_block)
        largest = _largest(p)
        if largest >= NOT_FINITE:
            return False
        encode_block(kind, bits, p, last - first, largest, key, first // block, room, out)
    return True


@njit(nogil=True)
def _largest(x):
    """The bits of the largest magnitude."""
    largest = np.int32(0)
    for i in range(x.size):
        magnitude = np.int32(bits_of(x[i]) & MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest


@njit(nogil=True, cache=True, error_model="numpy")
def _make_up(x_hat, m_hat, v_hat, x, m, v, mean, said, bounds, windows, since, least):
    vectors = x_hat, m_hat, v_hat, x, m, v
    cut = 0
    for first in range(0, x.size, BLOCK):
        last = min(first + BLOCK, x.size)
        of_block = least[first // BLOCK] if least.size else np.float32(0.0)
        told = mean[first:last], said[first:last], least.size > 0, of_block
        cut = _make_up_block(vectors, told, bounds, windows, since, cut, first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def _settle(
    kind, bits, block, codes, nbytes, weights, own, x_hat, m_hat, v_hat, x, m, v, bounds, windows, since, least
):
    vectors = x_hat, m_hat, v_hat, x, m, v
    unpacked, mean, said = np.empty(block, np.uint8), np.empty(block, np.float32), np.empty(block, np.float32)
    cut = 0
    for first in range(0, x.size, block):
        last = min(first + block, x.size)
        read_block(kind, bits, block, codes, nbytes, weights, own, first, last - first, unpacked, mean, said)
        told = mean, said, True, least[first // block]
        cut = _make_up_block(vectors, told, bounds, windows, since, cut, first, last)


@njit(nogil=True, error_model="numpy")
def _make_up_block(vectors, told, bounds, windows, since, cut, first, last):
    """From `cut` on; the cut that goes on behind the block."""
    x_hat, m_hat, v_hat, x, m, v = vectors
    mean, said, has_units, least = told
    while cut < len(bounds) and bounds[cut, 0] < last:
        a, b = max(bounds[cut, 0], first), min(bounds[cut, 1], last)
        news, own = mean[a - first : b - first], said[a - first : b - first]
        _make_up_cut(
            x_hat[a:b],
            m_hat[a:b],
            v_hat[a:b],
            x[a:b],
            m[a:b],
            v[a:b],
            news,
            own,
            has_units,
            least,
            windows[cut],
            since[cut],
        )
        if bounds[cut, 1] > last:
            break
        cut += 1
    return cut


@njit(nogil=True, error_model="numpy")
def _make_up_cut(x_hat, m_hat, v_hat, x, m, v, mean, said, has_units, least, w, since):
    """Line by line as in `common`."""
    for i in range(x.size):
        x_hat_i, m_hat_i, v_hat_i, m_i, v_i = x_hat[i], m_hat[i], v_hat[i], m[i], v[i]
        unit = _about_root(v_hat_i)
        unit = unit if unit > least else least
        unit = unit if has_units else np.float32(1.0)
        gain, change = mean[i] * unit, (mean[i] - said[i]) * unit
        g = gain * w.spread
        surprise = g - m_hat_i * w.before
        v_hat_i = v_hat_i * w.kept_v + (g * g + surprise * surprise * w.noise) * w.new_v
        root = np.sqrt(v_hat_i * w.unbiased) + w.eps
        x_hat_i = x_hat_i * w.decay - (m_hat_i * w.coast + gain * w.push) / root
        m_hat_i = m_hat_i * w.kept_m + gain

        m_i = m_i + change * since.kept_m
        gain = m_i - m_hat_i * since.kept_m
        g = gain * since.spread
        v_since = v_hat_i * since.kept_v + g * g * since.new_v
        larger = v_i if v_i > v_since else v_since
        root = np.sqrt(larger * since.unbiased) + since.eps
        x[i] = x_hat_i * since.decay - (m_hat_i * since.coast + gain * since.push) / root
        x_hat[i], m_hat[i], v_hat[i], m[i], v[i] = x_hat_i, m_hat_i, v_hat_i, m_i, v_since
