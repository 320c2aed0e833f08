"""Fused kernels of the block quantizers `Sign`, `Pick`, `Log` and `Uniform`.

Encoding takes two passes. `find_scales` reads everything and writes only scales, so that a NaN is found before any
residual changes. `encode` quantizes, packs and writes the residual.

`kernels_of(kind)` compiles these functions for one quantizer: `kind` is a constant in them, and numba leaves out the
branches of other kinds. Common arguments: `bits` is the width of a symbol (for `Pick`, whose symbols have 4 bits, it is
the group size `of`), `block` the entries per scale, `feedback` whether `residual` is to be added and updated.
"""

# mypy: ignore-errors
# numba compiles its own dialect of Python, which mypy would check as Python.

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from laconic.compress.jit import helper, kernel
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
from laconic.compress.kernels.levels import add_log_levels, add_sign_levels, add_uniform_levels
from laconic.compress.kernels.pick import add_picked, picked_nbytes
from laconic.compress.kernels.quantize import (
    log_block,
    pick_block,
    sign_block,
    splitmix64,
    uniform_block,
    uniform_stochastic_block,
)
from laconic.compress.quantizers import PICK_FACTOR

SIGN_KIND, LOG_KIND, PICK_KIND, UNIFORM_KIND, STOCHASTIC_KIND = range(5)
KINDS = {
    "sign": SIGN_KIND,
    "log": LOG_KIND,
    "pick": PICK_KIND,
    "uniform": UNIFORM_KIND,
    "stochastic": STOCHASTIC_KIND,
}

# The number of partial sums of a block's mean magnitude. It is part of the definition of `Sign` and `Pick`, because the
# rounding of a sum depends on its order.
LANES = 16
MINUS_ZERO = np.float32(-0.0)  # the neutral padding: x + −0.0 is x, also for x = −0.0
FACTOR = np.float32(PICK_FACTOR)


@helper
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


class Kernels(NamedTuple):
    """The kernels of one kind of quantizer."""

    find_scales: Any
    encode: Any
    scales_are_valid: Any
    decode: Any


@cache
def kernels_of(kind):
    """Returns the kernels of one kind; each is compiled at its first call."""

    @kernel
    def find_scales(block, x, residual, feedback, scales):
        """Pass one: writes the scale of every block. Returns False if an entry of x (+ residual) is not finite."""
        lanes = np.empty(LANES, np.float64)
        x_padded, r_padded = np.empty(block, np.float32), np.empty(block, np.float32)
        fill(r_padded, MINUS_ZERO)
        worst = np.int32(0)
        for b in range(scales.size):
            xb = x[b * block : (b + 1) * block]
            rb = residual[b * block : (b + 1) * block] if feedback else r_padded
            count = xb.size
            if count < block:
                fill(x_padded, MINUS_ZERO)
                copy_into(x_padded, xb)
                xb = x_padded
                if feedback:
                    copy_into(r_padded, rb)
                    rb = r_padded
            if kind == SIGN_KIND:
                scale = mean_magnitude(xb, rb, count, lanes)
            elif kind == PICK_KIND:
                largest = float_of(largest_bits_of_sum(xb, rb))
                level = FACTOR * mean_magnitude(xb, rb, count, lanes)
                scale = level if level < largest else largest
            else:
                scale = float_of(largest_bits_of_sum(xb, rb))
            scales[b] = scale
            magnitude = np.int32(bits_of(scale) & MAGNITUDE)
            worst = magnitude if magnitude > worst else worst
        return worst < NOT_FINITE

    @kernel
    def encode(bits, block, x, residual, feedback, scales, key, out):
        """Pass two: writes scales and packed symbols to `out` and, with `feedback`, the errors to `residual`."""
        symbols, high_halves = np.empty(block, np.uint8), np.empty(block, np.uint16)
        x_padded, r_padded = np.empty(block, np.float32), np.empty(block, np.float32)
        stride = 4 + (picked_nbytes(bits, block) if kind == PICK_KIND else block * bits // 8)
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
            elif kind == SIGN_KIND:
                sign_block(xb, rb, scales[b], unpacked)
            elif kind == LOG_KIND:
                log_block(xb, rb, scales[b], bits, high_halves, unpacked)
            elif kind == UNIFORM_KIND:
                uniform_block(xb, rb, scales[b], bits, unpacked)
            else:
                uniform_stochastic_block(xb, rb, scales[b], bits, splitmix64(key + np.uint64(b)), unpacked)
            if kind != PICK_KIND:
                if count < block:
                    pack_sequence(symbols[:count], bits, packed)
                elif bits < 8:
                    pack_fields(symbols, bits, packed)
            store_float(out, b * stride, scales[b])
            if count < block and feedback:
                copy_into(residual[start:], r_padded[:count])

    @kernel
    def scales_are_valid(bits, block, code, blocks):
        """Returns whether the scales of all blocks are finite and not negative."""
        stride = 4 + (picked_nbytes(bits, block) if kind == PICK_KIND else block * bits // 8)
        for b in range(blocks):
            pattern = bits_of(load_float(code, b * stride))
            if pattern < np.int32(0) or pattern >= NOT_FINITE:
                return False
        return True

    @kernel
    def decode(bits, block, code, target, accumulate, factor):
        """target += factor · levels or, without `accumulate`, target = factor · levels."""
        unpacked = np.empty(block, np.uint8)
        stride = 4 + (picked_nbytes(bits, block) if kind == PICK_KIND else block * bits // 8)
        for start in range(0, target.size, block):
            offset = start // block * stride
            values = target[start : start + block]
            scale = load_float(code, offset)
            packed = code[offset + 4 : offset + stride]
            if not accumulate:
                fill(values, MINUS_ZERO)  # adding to −0.0 gives what is added, also if that is −0.0
            if kind == PICK_KIND:
                add_picked(bits, packed, scale, factor, unpacked, values)
                continue
            symbols = unpacked
            if values.size < block:
                unpack_sequence(packed, bits, unpacked[: values.size])
            elif bits == 8:
                symbols = packed
            else:
                unpack_fields(packed, bits, unpacked)
            if kind == SIGN_KIND:
                add_sign_levels(symbols, scale, factor, values)
            elif kind == LOG_KIND:
                add_log_levels(bits, symbols, scale, factor, values)
            else:
                add_uniform_levels(bits, symbols, scale, factor, values)

    return Kernels(find_scales, encode, scales_are_valid, decode)
