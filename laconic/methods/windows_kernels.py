"""`laconic.methods.windows` for fp32 on the CPU: memory is passed over once, and entries go side by side.

(For the latter a loop reads all of an entry before it writes any of it. Whether vectors overlap is seen at run time.)
"""

# mypy: ignore-errors
# (numba compiles a dialect of Python that mypy takes for Python)

import numpy as np
import torch
from numba import njit
from torch import Tensor

from laconic.compress.blockwise import Blockwise
from laconic.compress.kernels.bits import NOT_FINITE, add32, bits_of, fill, float_of, largest_bits
from laconic.compress.kernels.blockwise import MINUS_ZERO
from laconic.compress.kernels.settle import encode_block, read_block, room_to_encode
from laconic.methods.carried import Codes
from laconic.methods.windows import BLOCK, HALF_BIAS, LEAST_UNIT, TINY, Cut, Run, Vectors, Window

SHARE, SMALLEST, HALF = np.float32(LEAST_UNIT), np.float32(TINY), np.int32(HALF_BIAS)
FACTORS = np.dtype([(name, np.float32) for name in Window._fields])
WATCHED = 32  # one block in so many, to see whether there is anything to steer by
NO_UNITS = np.empty(0, np.float32)


def arrays_of(vectors: Vectors) -> Vectors:
    """As all functions here take them: to cut numpy's arrays takes a fifth of the time it takes torch."""
    return Vectors(*(vector.numpy() for vector in vectors))


def gain(vectors: Vectors, runs: list[Run], least: Tensor | None = None) -> Tensor:
    gain = np.empty_like(vectors.m)
    _gain(*_told_of(vectors), *_of_runs(runs), NO_UNITS if least is None else least.numpy(), gain)
    return torch.from_numpy(gain)


def encode(vectors: Vectors, runs: list[Run], compressor: Blockwise, step: int, least: Tensor, out: Tensor) -> bool:
    """`windows.least_units`, and the code of the gain in these; false if an entry is not finite."""
    return _encode(*compressor.coding(step), *_told_of(vectors), *_of_runs(runs), least.numpy(), out.numpy())


def make_up(
    vectors: Vectors,
    mean: Tensor,
    said: Tensor,
    cuts: list[Cut],
    least: Tensor | None,
    steers: bool,
    watches: bool,
) -> tuple[float, float]:
    news = mean.numpy(), said.numpy(), NO_UNITS if least is None else least.numpy()
    return _make_up(tuple(vectors), *news, *_of_cuts(cuts), steers, watches)


def settle(
    vectors: Vectors, codes: Codes, cuts: list[Cut], least: Tensor, steers: bool, watches: bool
) -> tuple[float, float]:
    """`make_up` with the mean of codes, which is nowhere stored."""
    readable = codes.compressor.readable(codes.codes, codes.weights, codes.own, vectors.x.size)
    return _settle(tuple(vectors), *readable, least.numpy(), *_of_cuts(cuts), steers, watches)


def _told_of(vectors: Vectors) -> tuple[np.ndarray, ...]:
    return vectors.m, vectors.m_hat, vectors.v_hat, vectors.apart


def _of_runs(runs: list[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Where they end, and the rest. They follow one another from 0 on."""
    stops = np.array([run.part.stop for run in runs], np.int64)
    return stops, np.array([(run.kept, run.steered) for run in runs], np.float32).reshape(-1, 2)


def _of_cuts(cuts: list[Cut]) -> tuple[np.ndarray, ...]:
    bounds = np.array([(cut.part.start, cut.part.stop) for cut in cuts], np.int64).reshape(-1, 2)
    windows = np.array([cut.window for cut in cuts], FACTORS), np.array([cut.since for cut in cuts], FACTORS)
    return bounds, *windows, np.array([cut.steered for cut in cuts], np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _gain(m, m_hat, v_hat, apart, stops, factors, least, out):
    run = 0
    for first in range(0, out.size, BLOCK):
        last = min(first + BLOCK, out.size)
        unit = least[first // BLOCK] if least.size else np.float32(0.0)
        own = m, m_hat, v_hat, apart
        run = _gain_of_block(own, stops, factors, run, first, last, out[first:last], least.size > 0, unit)


@njit(nogil=True, error_model="numpy")
def _gain_of_block(own, stops, factors, run, first, last, out, has_units, least):
    """From `run` on; the run that goes on behind the block."""
    m, m_hat, v_hat, apart = own
    start = first
    while start < last:
        stop = min(stops[run], last)
        target = out[start - first : stop - first]
        _gain_of_run(m[start:stop], m_hat[start:stop], factors[run, 0], target)
        if factors[run, 1] != 0:
            _subtract(target, apart[start:stop], factors[run, 1])
        if has_units:
            _divide(target, v_hat[start:stop], least)
        if stops[run] == stop:
            run += 1
        start = stop
    return run


@njit(nogil=True)
def _gain_of_run(m, m_hat, kept, out):
    for i in range(out.size):
        out[i] = m[i] - m_hat[i] * kept


@njit(nogil=True)
def _subtract(out, apart, steered):
    for i in range(out.size):
        out[i] -= apart[i] * steered


@njit(nogil=True, error_model="numpy")
def _divide(out, v_hat, least):
    for i in range(out.size):
        out[i] /= _unit(v_hat[i], least)


@njit(nogil=True)
def _unit(v_hat, least):
    root = _about_root(v_hat)
    return root if root > least else least


@njit(nogil=True)
def _about_root(x):
    return float_of(add32(np.int32(bits_of(x) >> np.int32(1)), HALF))


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(kind, bits, block, key, m, m_hat, v_hat, apart, stops, factors, least, out):
    room = room_to_encode(block)
    p = np.empty(block, np.float32)
    run = 0
    for first in range(0, m.size, block):
        last = min(first + block, m.size)
        if last - first < block:
            fill(p, MINUS_ZERO)
        unit = _about_root(float_of(largest_bits(v_hat[first:last]))) * SHARE + SMALLEST
        least[first // block] = unit
        own = m, m_hat, v_hat, apart
        run = _gain_of_block(own, stops, factors, run, first, last, p[: last - first], True, unit)
        largest = largest_bits(p)
        if largest >= NOT_FINITE:
            return False
        encode_block(kind, bits, p, last - first, largest, key, first // block, room, out)
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def _make_up(vectors, mean, said, least, bounds, windows, since, steered, steers, watches):
    seen = 0.0, 0.0
    cut = 0
    size = mean.size
    for first in range(0, size, BLOCK):
        last = min(first + BLOCK, size)
        unit = least[first // BLOCK] if least.size else np.float32(0.0)
        told = mean[first:last], said[first:last], least.size > 0, unit
        cut, seen = _make_up_block(
            vectors, told, bounds, windows, since, steered, steers, watches, cut, first, last, seen
        )
    return seen


@njit(nogil=True, cache=True, error_model="numpy")
def _settle(
    vectors, kind, bits, block, codes, nbytes, weights, own, least, bounds, windows, since, steered, steers, watches
):
    unpacked, mean, said = np.empty(block, np.uint8), np.empty(block, np.float32), np.empty(block, np.float32)
    seen = 0.0, 0.0
    cut = 0
    size = vectors[0].size
    for first in range(0, size, block):
        last = min(first + block, size)
        read_block(kind, bits, block, codes, nbytes, weights, own, first, last - first, unpacked, mean, said)
        told = mean, said, True, least[first // block]
        cut, seen = _make_up_block(
            vectors, told, bounds, windows, since, steered, steers, watches, cut, first, last, seen
        )
    return seen


@njit(nogil=True, error_model="numpy")
def _make_up_block(vectors, told, bounds, windows, since, steered, steers, watches, cut, first, last, seen):
    """From `cut` on; the cut that goes on behind the block, and what has been seen of `apart`."""
    x_hat, m_hat, v_hat, x, m, v, apart = vectors
    mean, said, has_units, least = told
    is_watched = watches and first // BLOCK % WATCHED == 0
    while cut < len(bounds) and bounds[cut, 0] < last:
        a, b = max(bounds[cut, 0], first), min(bounds[cut, 1], last)
        news = mean[a - first : b - first], said[a - first : b - first]
        if is_watched:
            spread = windows[cut].spread
            seen = _see(*news, has_units, least, v_hat[a:b], apart[a:b], spread, not steers, seen)
        common = x_hat[a:b], m_hat[a:b], v_hat[a:b]
        own = x[a:b], m[a:b], v[a:b]
        if steers:
            _make_up_steering(
                *common, *own, apart[a:b], *news, has_units, least, windows[cut], since[cut], steered[cut]
            )
        else:
            _make_up_cut(*common, *own, *news, has_units, least, windows[cut], since[cut])
        if bounds[cut, 1] > last:
            break
        cut += 1
    return cut, seen


@njit(nogil=True, error_model="numpy")
def _see(mean, said, has_units, least, v_hat, apart, spread, takes, seen):
    products, squares = seen
    for i in range(mean.size):
        unit = _unit(v_hat[i], least) if has_units else np.float32(1.0)
        now = (mean[i] - said[i]) * unit * spread
        products += now * apart[i]
        squares += apart[i] * apart[i]
        if takes:
            apart[i] = now
    return products, squares


@njit(nogil=True, error_model="numpy")
def _make_up_cut(x_hat, m_hat, v_hat, x, m, v, mean, said, has_units, least, w, since):
    for i in range(x.size):
        unit = _unit(v_hat[i], least) if has_units else np.float32(1.0)
        gain, change = mean[i] * unit, (mean[i] - said[i]) * unit
        common = _step(x_hat[i], m_hat[i], v_hat[i], gain, w)
        m_i = m[i] + change * since.kept_m
        x[i], v[i] = _go_ahead(*common, m_i, v[i], since)
        x_hat[i], m_hat[i], v_hat[i] = common
        m[i] = m_i


@njit(nogil=True, error_model="numpy")
def _make_up_steering(x_hat, m_hat, v_hat, x, m, v, apart, mean, said, has_units, least, w, since, steered):
    for i in range(x.size):
        unit = _unit(v_hat[i], least) if has_units else np.float32(1.0)
        gain, change = mean[i] * unit, (mean[i] - said[i]) * unit
        common = _step(x_hat[i], m_hat[i], v_hat[i], gain, w)
        now = change * w.spread
        m_i = m[i] + change * since.kept_m - apart[i] * steered + now * since.steered
        x[i], v[i] = _go_ahead(*common, m_i, v[i], since)
        x_hat[i], m_hat[i], v_hat[i] = common
        m[i], apart[i] = m_i, now


@njit(nogil=True, error_model="numpy")
def _step(x_hat, m_hat, v_hat, gain, w):
    g = gain * w.spread
    surprise = g - m_hat * w.before
    v_hat = v_hat * w.kept_v + (g * g + surprise * surprise * w.noise) * w.new_v
    root = np.sqrt(v_hat * w.unbiased) + w.eps
    return x_hat * w.decay - (m_hat * w.coast + gain * w.push) / root, m_hat * w.kept_m + gain, v_hat


@njit(nogil=True, error_model="numpy")
def _go_ahead(x_hat, m_hat, v_hat, m, v, since):
    """The own x and v."""
    gain = m - m_hat * since.kept_m
    g = gain * since.spread
    v_since = v_hat * since.kept_v + g * g * since.new_v
    larger = v if v > v_since else v_since
    root = np.sqrt(larger * since.unbiased) + since.eps
    return x_hat * since.decay - (m_hat * since.coast + gain * since.push) / root, v_since if since.spread else larger
