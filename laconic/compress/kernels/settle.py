"""Kernels for vectors that all workers share: encode x − base, and apply the workers' codes, each in one pass.

Used by Divisible only.
"""

# mypy: ignore-errors
# numba compiles its own dialect of Python, which mypy would check as Python.

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from laconic.compress.kernels.bits import (
    MAGNITUDE,
    NOT_FINITE,
    add32,
    bits_of,
    fill,
    float_of,
    load_float,
    pack_fields,
    pack_sequence,
    store_float,
    unpack_fields,
    unpack_sequence,
)
from laconic.compress.kernels.blockwise import LANES, MINUS_ZERO, scale_of, scales_are_valid, stride_of
from laconic.compress.kernels.dense import add_scaled
from laconic.compress.kernels.levels import (
    PICK_KIND,
    STOCHASTIC_KIND,
    TERNARY_KIND,
    UNIFORM_KIND,
    add_levels,
    levels_of,
    uniform_level,
)
from laconic.compress.kernels.pick import add_picked, pack_picks
from laconic.compress.kernels.quantize import (
    MAGIC,
    TINY,
    quantize_block,
    saturate,
    splitmix64,
    ternary_symbol,
    ternary_threshold,
)


@njit(nogil=True, cache=True)
def difference_of(x, base, p):
    """Writes x − base to p and returns the bits of its largest magnitude."""
    largest = np.int32(0)
    for i in range(x.size):
        p[i] = x[i] - base[i]
        magnitude = np.int32(bits_of(p[i]) & MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest


@njit(nogil=True, cache=True)
def encode_difference(kind, bits, block, key, x, base, out):
    """Encodes x − base. Returns False, with an unusable code, if an entry is not finite."""
    room = room_to_encode(block)
    p = np.empty(block, np.float32)
    for start in range(0, x.size, block):
        xb = x[start : start + block]
        if xb.size < block:
            fill(p, MINUS_ZERO)
        largest = difference_of(xb, base[start : start + block], p)
        if largest >= NOT_FINITE:
            return False
        encode_block(kind, bits, p, xb.size, largest, key, start // block, room, out)
    return True


@njit(nogil=True, cache=True)
def room_to_encode(block):
    """Allocates the scratch memory of `encode_block`."""
    zeros = np.empty(block, np.float32)
    fill(zeros, MINUS_ZERO)
    return zeros, np.empty(block, np.uint8), np.empty(block, np.uint16), np.empty(LANES, np.float64)


@njit(nogil=True, cache=True)
def encode_block(kind, bits, p, count, largest, key, number, room, out):
    """Encodes the padded block p of `count` entries, overwriting p; `largest` holds the bits of max |p|."""
    zeros, codes, uppers, lanes = room
    stride = stride_of(kind, bits, p.size)
    scale = scale_of(kind, float_of(largest), zeros, p, count, lanes)
    store_float(out, number * stride, scale)
    packed = out[number * stride + 4 : (number + 1) * stride]
    if kind == PICK_KIND:
        pack_picks(bits, p[:count], ternary_threshold(scale), packed)
        return
    place = packed if packed.size == p.size else codes  # eight bits need no packing
    if kind == UNIFORM_KIND and scale >= TINY:
        uniform_codes(p, scale, bits, place)
    elif kind == TERNARY_KIND:
        ternary_codes(p, scale, place)
    else:
        quantize_block(kind, bits, zeros, p, scale, splitmix64(key + np.uint64(number)), uppers, place)
    if count < p.size:
        pack_sequence(codes[:count], bits, packed)
    elif bits < 8:
        pack_fields(codes, bits, packed)


@njit(nogil=True, cache=True)
def settle(kind, bits, block, codes, nbytes, weights, own, x, base, has_base):
    """With mean = Σ weight · decoded: base += mean and x += mean − decoded[own]; without a base, x is set to that.

    `codes` are the addresses of the codes, each of `nbytes` bytes.
    """
    unpacked = np.empty(block, np.uint8)
    mean, sent = np.empty(block, np.float32), np.empty(block, np.float32)
    for start in range(0, x.size, block):
        target = x[start : start + block]
        count = target.size
        read_block(kind, bits, block, codes, nbytes, weights, own, start, count, unpacked, mean, sent)
        if has_base:
            move_both(target, base[start : start + block], mean[:count], sent[:count])
        else:
            subtract(mean[:count], sent[:count], target)


@njit(nogil=True, cache=True)
def find_bad_code(kind, bits, block, codes, nbytes, blocks):
    """Returns the number of the first code with an invalid scale, or −1."""
    for row in range(codes.size):
        if not scales_are_valid(kind, bits, block, bytes_at(codes[row], nbytes), blocks):
            return row
    return -1


@njit(nogil=True, cache=True)
def read_block(kind, bits, block, codes, nbytes, weights, own, start, count, unpacked, mean, sent):
    """Writes the weighted mean and the values of code `own` of the block at `start`; `unpacked` is scratch memory."""
    fill(mean, np.float32(0.0))
    stride = stride_of(kind, bits, block)
    place = start // block * stride
    for row in range(codes.size):
        code = bytes_at(codes[row], nbytes)
        packed = code[place + 4 : place + stride]
        scale = load_float(code, place)
        if kind == PICK_KIND:
            if row == own:
                fill(sent[:count], MINUS_ZERO)
                add_picked(bits, packed, scale, np.float32(1.0), unpacked, sent[:count])
                add_scaled(sent[:count], mean[:count], weights[row])
            else:
                add_picked(bits, packed, scale, weights[row], unpacked, mean[:count])
            continue
        if kind in (TERNARY_KIND, UNIFORM_KIND, STOCHASTIC_KIND) and bits == 4 and count == block:
            add_levels_of_halves(packed, scale, weights[row], mean)
            if row == own:
                levels_of_halves(packed, scale, sent)
            continue
        if kind in (TERNARY_KIND, UNIFORM_KIND, STOCHASTIC_KIND) and bits == 2 and count == block:
            add_levels_of_quarters(packed, scale, weights[row], mean)
            if row == own:
                levels_of_quarters(packed, scale, sent)
            continue
        plain = unpacked
        if count < block:
            unpack_sequence(packed, bits, unpacked[:count])
        elif bits == 8:
            plain = packed
        else:
            unpack_fields(packed, bits, unpacked)
        if row == own:
            levels_of(kind, bits, plain, scale, sent[:count])
            add_scaled(sent[:count], mean[:count], weights[row])
        else:
            add_levels(kind, bits, plain, scale, weights[row], mean[:count])


@njit(nogil=True, cache=True)
def move_both(x, base, mean, sent):
    for i in range(x.size):
        base[i] += mean[i]
        x[i] += mean[i] - sent[i]


@njit(nogil=True, cache=True)
def subtract(left, right, target):
    for i in range(target.size):
        target[i] = left[i] - right[i]


@intrinsic
def pointer_to(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.uint64), generate


@njit(nogil=True, cache=True)
def bytes_at(address, size):
    """Returns a uint8 array over memory at an address, so that a kernel can take any number of codes."""
    return carray(pointer_to(address), (size,), np.uint8)


@njit(nogil=True, cache=True)
def levels_of_halves(packed, scale, values):
    """Decodes packed 4-bit symbols of evenly spaced levels: the low half-bytes hold the first half of the values."""
    half = packed.size
    low, high = values[:half], values[half:]
    top, unit = np.int32(7), np.float32(1.0) / np.float32(7)
    for i in range(half):
        low[i] = uniform_level(packed[i] & np.uint8(15), top, unit, scale)
        high[i] = uniform_level(packed[i] >> np.uint8(4), top, unit, scale)


@njit(nogil=True, cache=True)
def add_levels_of_halves(packed, scale, weight, target):
    half = packed.size
    low, high = target[:half], target[half:]
    top, unit = np.int32(7), np.float32(1.0) / np.float32(7)
    for i in range(half):
        low[i] += weight * uniform_level(packed[i] & np.uint8(15), top, unit, scale)
        high[i] += weight * uniform_level(packed[i] >> np.uint8(4), top, unit, scale)


@njit(nogil=True, cache=True)
def levels_of_quarters(packed, scale, values):
    """Decodes packed 2-bit symbols in the same way, in quarters."""
    n = packed.size
    a, b, c, d = values[:n], values[n : 2 * n], values[2 * n : 3 * n], values[3 * n :]
    top, unit = np.int32(1), np.float32(1.0)
    for i in range(n):
        byte = packed[i]
        a[i] = uniform_level(byte & np.uint8(3), top, unit, scale)
        b[i] = uniform_level((byte >> np.uint8(2)) & np.uint8(3), top, unit, scale)
        c[i] = uniform_level((byte >> np.uint8(4)) & np.uint8(3), top, unit, scale)
        d[i] = uniform_level(byte >> np.uint8(6), top, unit, scale)


@njit(nogil=True, cache=True)
def add_levels_of_quarters(packed, scale, weight, target):
    n = packed.size
    a, b, c, d = target[:n], target[n : 2 * n], target[2 * n : 3 * n], target[3 * n :]
    top, unit = np.int32(1), np.float32(1.0)
    for i in range(n):
        byte = packed[i]
        a[i] += weight * uniform_level(byte & np.uint8(3), top, unit, scale)
        b[i] += weight * uniform_level((byte >> np.uint8(2)) & np.uint8(3), top, unit, scale)
        c[i] += weight * uniform_level((byte >> np.uint8(4)) & np.uint8(3), top, unit, scale)
        d[i] += weight * uniform_level(byte >> np.uint8(6), top, unit, scale)


@njit(nogil=True, cache=True)
def ternary_codes(p, scale, codes):
    """`ternary_block` without a residual."""
    threshold = ternary_threshold(scale)
    for i in range(p.size):
        codes[i] = saturate(ternary_symbol(p[i], threshold))


@njit(nogil=True, cache=True)
def uniform_codes(p, scale, bits, codes):
    """`uniform_block` without a residual, for scales that are not near zero."""
    levels = np.float32((1 << (bits - 1)) - 1)
    steps = levels / scale
    offset = np.int32(np.int32(levels) - bits_of(MAGIC))
    for i in range(p.size):
        codes[i] = saturate(add32(bits_of(p[i] * steps + MAGIC), offset))
