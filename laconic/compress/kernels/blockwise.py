"""Fused kernels of the quantizers with one scale a block: `Sign`, `Ternary`, `Pick`, `Log` and `Uniform`.

Pass one (`find_scales`) reads everything and writes nothing but scales, so that a nan is found before any residual
changes; pass two (`encode`) quantizes, packs and writes the residual.
"""

# mypy: ignore-errors
# (numba compiles a dialect of Python that mypy takes for Python)

import numpy as np
from numba import njit

from laconic.compress.kernels.bits import (
    MAGNITUDE,
    NOT_FINITE,
    bits_of,
    fill,
    float_of,
    load_float,
    move,
    pack_fields,
    pack_sequence,
    store_float,
    unpack_fields,
    unpack_sequence,
)
from laconic.compress.kernels.levels import PICK_KIND, SIGN_KIND, TERNARY_KIND, add_levels, levels_of
from laconic.compress.kernels.pick import add_picked, picked_nbytes
from laconic.compress.kernels.quantize import pick_block, quantize_block, splitmix64
from laconic.compress.quantizers import LEVEL_IN_MEANS

# Partial sums of a block's mean magnitude; part of the definition of `Sign` and others, for a sum depends on its order.
LANES = 16
MINUS_ZERO = np.float32(-0.0)  # x + -0.0 is x, also for x = -0.0
MEANS = np.float32(LEVEL_IN_MEANS)


@njit(nogil=True, cache=True)
def largest_magnitude(x, r):
    """The bits of max |x + r|: as an integer, because a float maximum would neither vectorise nor keep a nan."""
    largest = np.int32(0)
    for i in range(x.size):
        magnitude = np.int32(bits_of(x[i] + r[i]) & MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest


@njit(nogil=True, cache=True)
def mean_magnitude(x, r, count, lanes):
    """Mean of |x + r| over `count` entries: four by four in fp32, quartered lest they overflow, then fp64 lanes."""
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


@njit(nogil=True, cache=True)
def block_scale(kind, x, r, count, lanes):
    largest = MINUS_ZERO if kind == SIGN_KIND else float_of(largest_magnitude(x, r))
    return scale_of(kind, largest, x, r, count, lanes)


@njit(nogil=True, cache=True)
def scale_of(kind, largest, x, r, count, lanes):
    """Of a block with this largest magnitude, which `Sign` does not ask for."""
    if kind not in (SIGN_KIND, TERNARY_KIND, PICK_KIND):
        return largest
    mean = mean_magnitude(x, r, count, lanes)
    if kind == SIGN_KIND:
        return mean
    means = MEANS * mean
    return means if means < largest else largest


@njit(nogil=True, cache=True)
def find_scales(kind, block, x, residual, feedback, scales):
    """Pass one: the scale of every block; false when some entry of x (+ residual) is not finite."""
    lanes = np.empty(LANES, np.float64)
    r_spare = np.empty(block, np.float32)
    fill(r_spare, MINUS_ZERO)
    full = x.size // block
    for b in range(full):
        xb = x[b * block : (b + 1) * block]
        if feedback:
            scales[b] = block_scale(kind, xb, residual[b * block : (b + 1) * block], block, lanes)
        else:
            scales[b] = block_scale(kind, xb, r_spare, block, lanes)
    if full < scales.size:
        x_spare = np.empty(block, np.float32)
        fill(x_spare, MINUS_ZERO)
        move(x[full * block :], x_spare)
        if feedback:
            move(residual[full * block :], r_spare)
        scales[full] = block_scale(kind, x_spare, r_spare, x.size - full * block, lanes)
    largest = np.int32(0)
    for b in range(scales.size):
        magnitude = np.int32(bits_of(scales[b]) & MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest < NOT_FINITE


@njit(nogil=True, cache=True)
def stride_of(kind, bits, block):
    """Bytes of a block: its scale and its codes. (Of a `Pick`, `bits` is what it picks from.)"""
    return 4 + (picked_nbytes(bits, block) if kind == PICK_KIND else block * bits // 8)


@njit(nogil=True, cache=True)
def encode(kind, bits, block, x, residual, feedback, scales, key, out):
    """Pass two: scale and packed codes of every block, and with `feedback` what they leave behind into `residual`."""
    codes, uppers = np.empty(block, np.uint8), np.empty(block, np.uint16)
    x_spare, r_spare = np.empty(block, np.float32), np.empty(block, np.float32)
    stride = stride_of(kind, bits, block)
    for b in range(scales.size):
        start = b * block
        xb, rb = x[start : start + block], residual[start : start + block]
        count = xb.size
        if count < block:
            fill(x_spare, MINUS_ZERO)
            move(xb, x_spare)
            xb = x_spare
        if count < block or not feedback:
            fill(r_spare, MINUS_ZERO)
            if feedback:
                move(rb, r_spare)
            rb = r_spare
        packed = out[b * stride + 4 : (b + 1) * stride]
        place = packed if packed.size == block else codes  # eight bits need no packing
        if kind == PICK_KIND:
            pick_block(bits, xb[:count], rb[:count], scales[b], codes, packed)
        else:
            quantize_block(kind, bits, xb, rb, scales[b], splitmix64(key + np.uint64(b)), uppers, place)
            if count < block:
                pack_sequence(codes[:count], bits, packed)
            elif bits < 8:
                pack_fields(codes, bits, packed)
        store_float(out, b * stride, scales[b])
        if count < block and feedback:
            move(r_spare[:count], residual[start:])


@njit(nogil=True, cache=True)
def scales_are_valid(kind, bits, block, code, blocks):
    stride = stride_of(kind, bits, block)
    for b in range(blocks):
        pattern = bits_of(load_float(code, b * stride))
        if pattern < np.int32(0) or pattern >= NOT_FINITE:
            return False
    return True


@njit(nogil=True, cache=True)
def decode(kind, bits, block, code, target, accumulate, factor):
    """target = levels, or with `accumulate` target += factor·levels."""
    unpacked = np.empty(block, np.uint8)
    stride = stride_of(kind, bits, block)
    for start in range(0, target.size, block):
        place = start // block * stride
        goal = target[start : start + block]
        scale = load_float(code, place)
        packed = code[place + 4 : place + stride]
        if kind == PICK_KIND:
            if not accumulate:
                fill(goal, MINUS_ZERO)  # to which any level adds to itself, −0.0 too
            add_picked(bits, packed, scale, factor, unpacked, goal)
            continue
        if goal.size < block:
            unpack_sequence(packed, bits, unpacked[: goal.size])
            codes = unpacked
        elif bits == 8:
            codes = packed
        else:
            unpack_fields(packed, bits, unpacked)
            codes = unpacked
        if accumulate:
            add_levels(kind, bits, codes, scale, factor, goal)
        else:
            levels_of(kind, bits, codes, scale, goal)
