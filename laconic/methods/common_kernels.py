"""`laconic.methods.common` for fp32 on the CPU: block by block, so that memory is passed over once.

Each loop works on few vectors, or the compiler would not use the processor's: it must see that they do not overlap.
"""

# mypy: ignore-errors
# (numba compiles a dialect of Python that mypy takes for Python)

import numpy as np
from numba import njit
from torch import Tensor

from laconic.compress.kernels.settle import read_block
from laconic.methods import common
from laconic.methods.carried import Codes

BLOCK = common.BLOCK
NO_UNITS = np.empty(0, np.float32)
PASS = ((-1.0,) * len(common.Window._fields),) * 2  # nothing is made up for


def take_gain(vectors: common.Vectors, kept: float, out: Tensor, least: Tensor | None, offset: int) -> None:
    arrays = [vector.numpy() for vector in (vectors.m, vectors.m_hat, vectors.v_hat, out)]
    _take_gain(*arrays, np.float32(kept), NO_UNITS if least is None else least.numpy(), offset)


def make_up(
    vectors: common.Vectors,
    mean: Tensor,
    change: Tensor,
    window: common.Window,
    since: common.Window,
    least: Tensor | None,
    offset: int,
) -> None:
    arrays = [vector.numpy() for vector in (*vectors, mean, change)]
    factors = np.array(window, np.float32), np.array(since, np.float32)
    _make_up(*arrays, *factors, NO_UNITS if least is None else least.numpy(), offset)


def settle(vectors: common.Vectors, codes: Codes, cuts: list[common.Cut], least: Tensor) -> None:
    """`make_up` with the mean of codes, which is nowhere stored."""
    numel = vectors.x.numel()
    stops, windows = [0], [PASS]
    for cut in cuts:
        if cut.part.start > stops[-1]:
            stops.append(cut.part.start)
            windows.append(PASS)
        stops.append(cut.part.stop)
        windows.append((cut.window, cut.since))
    stops.append(numel + 1)  # there is always one more
    windows.append(PASS)
    readable = codes.compressor.readable(codes.codes, codes.weights, codes.own, numel)
    arrays = [vector.numpy() for vector in vectors]
    _settle(*readable, *arrays, np.array(stops), np.array(windows, np.float32), least.numpy())


@njit(nogil=True, cache=True, error_model="numpy")
def _take_gain(m, m_hat, v_hat, out, kept, least, offset):
    start = 0
    while start < out.size:
        stop = min(out.size, start + BLOCK - (offset + start) % BLOCK)
        gain = out[start:stop]
        _gain(m[start:stop], m_hat[start:stop], kept, gain)
        if least.size:
            _divide(gain, v_hat[start:stop], least[(offset + start) // BLOCK])
        start = stop


@njit(nogil=True, error_model="numpy")
def _gain(m, m_hat, kept, gain):
    for i in range(gain.size):
        gain[i] = m[i] - m_hat[i] * kept


@njit(nogil=True, error_model="numpy")
def _divide(gain, v_hat, least):
    for i in range(gain.size):
        unit = np.sqrt(v_hat[i])
        gain[i] = gain[i] / (unit if unit > least else least)


@njit(nogil=True, cache=True, error_model="numpy")
def _make_up(x_hat, m_hat, v_hat, x, m, v, mean, change, window, since, least, offset):
    root = np.empty(BLOCK, np.float32)
    start = 0
    while start < x.size:
        stop = min(x.size, start + BLOCK - (offset + start) % BLOCK)
        if least.size:
            _multiply(mean[start:stop], change[start:stop], v_hat[start:stop], least[(offset + start) // BLOCK])
        common = x_hat[start:stop], m_hat[start:stop], v_hat[start:stop]
        own = x[start:stop], m[start:stop], v[start:stop]
        _make_up_block(common, own, mean[start:stop], change[start:stop], root[: stop - start], window, since)
        start = stop


@njit(nogil=True, cache=True, error_model="numpy")
def _settle(kind, bits, block, codes, nbytes, weights, own, x_hat, m_hat, v_hat, x, m, v, stops, windows, least):
    unpacked, root = np.empty(block, np.uint8), np.empty(block, np.float32)
    news, said = np.empty(block, np.float32), np.empty(block, np.float32)
    cut = 0
    for first in range(0, x.size, block):
        count = min(block, x.size - first)
        read_block(kind, bits, block, codes, nbytes, weights, own, first, count, unpacked, news, said)
        _subtract_from(news[:count], said[:count])
        _multiply(news[:count], said[:count], v_hat[first : first + count], least[first // block])
        start = first
        while start < first + count:
            while stops[cut] <= start:
                cut += 1
            stop = min(stops[cut], first + count)
            if windows[cut, 0, 0] >= 0:
                mine = x[start:stop], m[start:stop], v[start:stop]
                common = x_hat[start:stop], m_hat[start:stop], v_hat[start:stop]
                gain, change = news[start - first : stop - first], said[start - first : stop - first]
                _make_up_block(common, mine, gain, change, root[: stop - start], windows[cut, 0], windows[cut, 1])
            start = stop


@njit(nogil=True, error_model="numpy")
def _make_up_block(common, own, gain, change, root, window, since):
    x_hat, m_hat, v_hat = common
    x, m, v = own
    _step_v(gain, m_hat, v_hat, window)
    _copy(v_hat, root)
    _take_root(root, window)
    _step_x(x_hat, m_hat, gain, root, window)
    _step_m(m_hat, gain, window)
    _settle_m(m, m_hat, change, since)
    _own_v(v, v_hat, change, root, since)
    _take_root(root, since)
    _copy(x_hat, x)
    _step_x(x, m_hat, change, root, since)


@njit(nogil=True, error_model="numpy")
def _subtract_from(left, right):
    for i in range(right.size):
        right[i] = left[i] - right[i]


@njit(nogil=True, error_model="numpy")
def _multiply(gain, change, v_hat, least):
    for i in range(gain.size):
        unit = np.sqrt(v_hat[i])
        unit = unit if unit > least else least
        gain[i] = gain[i] * unit
        change[i] = change[i] * unit


@njit(nogil=True, error_model="numpy")
def _step_v(gain, m_hat, v_hat, window):
    kept, new, spread, before, noise = window[1], window[2], window[3], window[4], window[5]
    for i in range(gain.size):
        g = gain[i] * spread
        surprise = g - m_hat[i] * before
        v_hat[i] = v_hat[i] * kept + (g * g + surprise * surprise * noise) * new


@njit(nogil=True, error_model="numpy")
def _take_root(v, window):
    unbiased, eps = window[6], window[7]
    for i in range(v.size):
        v[i] = np.sqrt(v[i] * unbiased) + eps


@njit(nogil=True, error_model="numpy")
def _step_x(x, m, gain, root, window):
    decay, coast, push = window[8], window[9], window[10]
    for i in range(root.size):
        x[i] = x[i] * decay - (m[i] * coast + gain[i] * push) / root[i]


@njit(nogil=True)
def _copy(source, target):
    for i in range(source.size):
        target[i] = source[i]


@njit(nogil=True, error_model="numpy")
def _step_m(m_hat, gain, window):
    kept = window[0]
    for i in range(gain.size):
        m_hat[i] = m_hat[i] * kept + gain[i]


@njit(nogil=True, error_model="numpy")
def _settle_m(m, m_hat, change, since):
    """The change becomes the own gain since."""
    kept = since[0]
    for i in range(m.size):
        m[i] = m[i] + change[i] * kept
        change[i] = m[i] - m_hat[i] * kept


@njit(nogil=True, error_model="numpy")
def _own_v(v, v_hat, gain, larger, since):
    kept, new, spread = since[1], since[2], since[3]
    for i in range(v.size):
        g = gain[i] * spread
        v_since = v_hat[i] * kept + g * g * new
        larger[i] = v[i] if v[i] > v_since else v_since
        v[i] = v_since
