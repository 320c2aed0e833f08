"""Fused kernels of the block quantizers for vectors that several workers have: the code of a difference, and what
becomes of the vectors when all codes are there. Each is one pass over memory; what a block needs stays in the cache.
"""

# mypy: ignore-errors
# (numba compiles a dialect of Python that mypy takes for Python)

import numpy as np
from numba import njit

from laconic.compress.kernels.bits import (
    MAGNITUDE,
    NOT_FINITE,
    bits_of,
    bytes_at,
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
    EVEN,
    PICK_KIND,
    TERNARY_KIND,
    UNIFORM_KIND,
    add_levels,
    add_levels_of_halves,
    add_levels_of_quarters,
    levels_of,
    levels_of_halves,
    levels_of_quarters,
)
from laconic.compress.kernels.pick import add_picked, pick_codes
from laconic.compress.kernels.quantize import (
    TINY,
    middle_of,
    quantize_block,
    splitmix64,
    ternary_codes,
    uniform_codes,
)


@njit(nogil=True, cache=True)
def difference_of(x, base, p):
    """p = x − base, and the bits of its largest magnitude."""
    largest = np.int32(0)
    for i in range(x.size):
        p[i] = x[i] - base[i]
        magnitude = np.int32(bits_of(p[i]) & MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest


@njit(nogil=True, cache=True)
def encode_difference(kind, bits, block, key, x, base, out):
    """The code of x − base; false, and a code of no use, when some entry of it is not finite."""
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
    nothing = np.empty(block, np.float32)
    fill(nothing, MINUS_ZERO)
    return nothing, np.empty(block, np.uint8), np.empty(block, np.uint16), np.empty(LANES, np.float64)


@njit(nogil=True, cache=True)
def encode_block(kind, bits, p, count, largest, key, number, room, out):
    """The code of p, of which `count` entries are no padding, and which is used up; `largest`: bits of a magnitude."""
    nothing, codes, uppers, lanes = room
    stride = stride_of(kind, bits, p.size)
    scale = scale_of(kind, float_of(largest), nothing, p, count, lanes)
    store_float(out, number * stride, scale)
    packed = out[number * stride + 4 : (number + 1) * stride]
    if kind == PICK_KIND:
        pick_codes(bits, p[:count], middle_of(scale), packed)
        return
    place = packed if packed.size == p.size else codes  # eight bits need no packing
    if kind == UNIFORM_KIND and scale >= TINY:
        uniform_codes(p, scale, bits, place)
    elif kind == TERNARY_KIND:
        ternary_codes(p, scale, place)
    else:
        quantize_block(kind, bits, nothing, p, scale, splitmix64(key + np.uint64(number)), uppers, place)
    if count < p.size:
        pack_sequence(codes[:count], bits, packed)
    elif bits < 8:
        pack_fields(codes, bits, packed)


@njit(nogil=True, cache=True)
def settle(kind, bits, block, codes, nbytes, weights, own, x, base, has_base):
    """news = Σ weights · levels of codes at these addresses. base += news, and x += news − the levels of code `own`;
    without a base x becomes that."""
    unpacked = np.empty(block, np.uint8)
    news, said = np.empty(block, np.float32), np.empty(block, np.float32)
    for start in range(0, x.size, block):
        goal = x[start : start + block]
        count = goal.size
        read_block(kind, bits, block, codes, nbytes, weights, own, start, count, unpacked, news, said)
        if has_base:
            move_both(goal, base[start : start + block], news[:count], said[:count])
        else:
            subtract(news[:count], said[:count], goal)


@njit(nogil=True, cache=True)
def find_bad_code(kind, bits, block, codes, nbytes, blocks):
    """The number of the first with a scale that cannot be, or −1."""
    for row in range(codes.size):
        if not scales_are_valid(kind, bits, block, bytes_at(codes[row], nbytes), blocks):
            return row
    return -1


@njit(nogil=True, cache=True)
def read_block(kind, bits, block, codes, nbytes, weights, own, start, count, unpacked, news, said):
    """`news` and the levels of code `own` in the block that begins at `start`; `unpacked` is room to work in."""
    fill(news, np.float32(0.0))
    stride = stride_of(kind, bits, block)
    place = start // block * stride
    for row in range(codes.size):
        code = bytes_at(codes[row], nbytes)
        packed = code[place + 4 : place + stride]
        scale = load_float(code, place)
        if kind == PICK_KIND:
            if row == own:
                fill(said[:count], MINUS_ZERO)
                add_picked(bits, packed, scale, np.float32(1.0), unpacked, said[:count])
                add_scaled(said[:count], news[:count], weights[row])
            else:
                add_picked(bits, packed, scale, weights[row], unpacked, news[:count])
            continue
        if kind >= EVEN and bits == 4 and count == block:
            add_levels_of_halves(packed, scale, weights[row], news)
            if row == own:
                levels_of_halves(packed, scale, said)
            continue
        if kind >= EVEN and bits == 2 and count == block:
            add_levels_of_quarters(packed, scale, weights[row], news)
            if row == own:
                levels_of_quarters(packed, scale, said)
            continue
        plain = unpacked
        if count < block:
            unpack_sequence(packed, bits, unpacked[:count])
        elif bits == 8:
            plain = packed
        else:
            unpack_fields(packed, bits, unpacked)
        if row == own:
            levels_of(kind, bits, plain, scale, said[:count])
            add_scaled(said[:count], news[:count], weights[row])
        else:
            add_levels(kind, bits, plain, scale, weights[row], news[:count])


@njit(nogil=True, cache=True)
def move_both(x, base, news, said):
    for i in range(x.size):
        base[i] += news[i]
        x[i] += news[i] - said[i]


@njit(nogil=True, cache=True)
def subtract(left, right, target):
    for i in range(target.size):
        target[i] = left[i] - right[i]
