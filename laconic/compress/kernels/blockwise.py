"""Fused kernels of the block quantizers `Sign`, `Pick`, `Log` and `Uniform`.

Encoding takes two passes. `find_scales` reads everything and writes only scales, so that a NaN is found before any
residual changes. `encode` quantizes, packs and writes the residual.

Common arguments: `kind` selects the quantizer, `bits` is the width of a symbol (for `Pick`, whose symbols have 4 bits,
it is the group size `of`), `block` the entries per scale, `feedback` whether `residual` is to be added and updated.
"""

# mypy: ignore-errors
# numba compiles its own dialect of Python, which mypy would check as Python.

import numpy as np

from laconic.compress.jit import njit
from laconic.compress.kernels.bits import (
    MAGNITUDE,
    NOT_FINITE,
    bits_of,
    copy_into,
    fill,
    float_of,
    largest_bits_of_sum,
    load_float,
    pack_fields,
    pack_sequence,
    store_float,
    unpack_fields,
    unpack_sequence,
)
from laconic.compress.kernels.levels import PICK_KIND, SIGN_KIND, add_levels, levels_of
from laconic.compress.kernels.pick import add_picked, picked_nbytes
from laconic.compress.kernels.quantize import pick_block, quantize_block, splitmix64
from laconic.compress.quantizers import PICK_FACTOR

# The number of partial sums of a block's mean magnitude. It is part of the definition of `Sign` and `Pick`, because the
# rounding of a sum depends on its order.
LANES = 16
MINUS_ZERO = np.float32(-0.0)  # the neutral padding: x + −0.0 is x, also for x = −0.0
FACTOR = np.float32(PICK_FACTOR)


@njit(nogil=True)
def mean_magnitude(x, r, count, lanes):
    """Returns the mean of |x + r| over `count` entries.

    Sums of four in fp32, quartered so that they cannot overflow, are added up in `LANES` fp64 lanes.
    """
    quarter = np.float32(0.25)
    fill(lanes, 0.0)
    for start in range(0, x.size, 4 * LANES):
        xs, rs = x[start : start + 4 * LANES], r[start : start + 4 * LANES]
        for i in range(LANES):
            a = abs(xs[i] + rs[i]) * quarter
            b = abs(xs[i + LANES] + rs[i + LANES]) * quarter
            c = abs(xs[i + 2 * LANES] + rs[i + 2 * LANES]) * quarter
            d = abs(xs[i + 3 * LANES] + rs[i + 3 * LANES]) * quarter
            lanes[i] += np.float64((a + b) + (c + d))
    width = LANES
    while width > 1:
        width //= 2
        for i in range(width):
            lanes[i] += lanes[i + width]
    return np.float32(4.0 * lanes[0] / count)


@njit(nogil=True)
def block_scale(kind, x, r, count, lanes):
    """Returns the scale of the padded block x + r with `count` entries; not finite if one of its entries is not."""
    largest = MINUS_ZERO if kind == SIGN_KIND else float_of(largest_bits_of_sum(x, r))
    return scale_of(kind, largest, x, r, count, lanes)


@njit(nogil=True)
def scale_of(kind, largest, x, r, count, lanes):
    """Returns the scale of a block whose largest magnitude is known. `Sign` does not use `largest`."""
    if kind not in (SIGN_KIND, PICK_KIND):
        return largest
    mean = mean_magnitude(x, r, count, lanes)
    if kind == SIGN_KIND:
        return mean
    level = FACTOR * mean
    return level if level < largest else largest


@njit(nogil=True)
def find_scales(kind, block, x, residual, feedback, scales):
    """Pass one: writes the scale of every block. Returns False if an entry of x (+ residual) is not finite."""
    lanes = np.empty(LANES, np.float64)
    r_padded = np.empty(block, np.float32)
    fill(r_padded, MINUS_ZERO)
    full = x.size // block
    for b in range(full):
        xb = x[b * block : (b + 1) * block]
        if feedback:
            scales[b] = block_scale(kind, xb, residual[b * block : (b + 1) * block], block, lanes)
        else:
            scales[b] = block_scale(kind, xb, r_padded, block, lanes)
    if full < scales.size:
        x_padded = np.empty(block, np.float32)
        fill(x_padded, MINUS_ZERO)
        copy_into(x_padded, x[full * block :])
        if feedback:
            copy_into(r_padded, residual[full * block :])
        scales[full] = block_scale(kind, x_padded, r_padded, x.size - full * block, lanes)
    largest = np.int32(0)
    for b in range(scales.size):
        magnitude = np.int32(bits_of(scales[b]) & MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest < NOT_FINITE


@njit(nogil=True)
def stride_of(kind, bits, block):
    """Returns the bytes of a block's code: its scale and its packed symbols."""
    return 4 + (picked_nbytes(bits, block) if kind == PICK_KIND else block * bits // 8)


@njit(nogil=True)
def encode(kind, bits, block, x, residual, feedback, scales, key, out):
    """Pass two: writes scales and packed symbols to `out` and, with `feedback`, the errors to `residual`."""
    symbols, high_halves = np.empty(block, np.uint8), np.empty(block, np.uint16)
    x_padded, r_padded = np.empty(block, np.float32), np.empty(block, np.float32)
    stride = stride_of(kind, bits, block)
    for b in range(scales.size):
        start = b * block
        xb, rb = x[start : start + block], residual[start : start + block]
        count = xb.size
        if count < block:
            fill(x_padded, MINUS_ZERO)
            copy_into(x_padded, xb)
            xb = x_padded
        if count < block or not feedback:
            fill(r_padded, MINUS_ZERO)
            if feedback:
                copy_into(r_padded, rb)
            rb = r_padded
        packed = out[b * stride + 4 : (b + 1) * stride]
        unpacked = packed if packed.size == block else symbols  # 8-bit symbols need no packing
        if kind == PICK_KIND:
            pick_block(bits, xb[:count], rb[:count], scales[b], symbols, packed)
        else:
            quantize_block(kind, bits, xb, rb, scales[b], splitmix64(key + np.uint64(b)), high_halves, unpacked)
            if count < block:
                pack_sequence(symbols[:count], bits, packed)
            elif bits < 8:
                pack_fields(symbols, bits, packed)
        store_float(out, b * stride, scales[b])
        if count < block and feedback:
            copy_into(residual[start:], r_padded[:count])


@njit(nogil=True)
def scales_are_valid(kind, bits, block, code, blocks):
    """Returns whether the scales of all blocks are finite and not negative."""
    stride = stride_of(kind, bits, block)
    for b in range(blocks):
        pattern = bits_of(load_float(code, b * stride))
        if pattern < np.int32(0) or pattern >= NOT_FINITE:
            return False
    return True


@njit(nogil=True)
def decode(kind, bits, block, code, target, accumulate, factor):
    """target = levels or, with `accumulate`, target += factor · levels."""
    unpacked = np.empty(block, np.uint8)
    stride = stride_of(kind, bits, block)
    for start in range(0, target.size, block):
        offset = start // block * stride
        values = target[start : start + block]
        scale = load_float(code, offset)
        packed = code[offset + 4 : offset + stride]
        if kind == PICK_KIND:
            if not accumulate:
                fill(values, MINUS_ZERO)  # so that adding a level gives the level, also for −0.0
            add_picked(bits, packed, scale, factor, unpacked, values)
            continue
        if values.size < block:
            unpack_sequence(packed, bits, unpacked[: values.size])
            symbols = unpacked
        elif bits == 8:
            symbols = packed
        else:
            unpack_fields(packed, bits, unpacked)
            symbols = unpacked
        if accumulate:
            add_levels(kind, bits, symbols, scale, factor, values)
        else:
            levels_of(kind, bits, symbols, scale, values)
