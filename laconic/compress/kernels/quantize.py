"""Loops over one block for each quantizer with one scale a block: codes of x + r, and what they leave behind in r."""

# mypy: ignore-errors
# (numba compiles a dialect of Python that mypy takes for Python)

import numpy as np
from numba import njit

from laconic.compress.kernels.bits import (
    MAGNITUDE,
    SIGN,
    add32,
    and32,
    bits_of,
    float_of,
    scramble,
)
from laconic.compress.kernels.levels import LOG_KIND, SIGN_KIND, TERNARY_KIND, UNIFORM_KIND, uniform_level
from laconic.compress.kernels.pick import add_picked, pick_codes

EXPONENT = np.int32(-0x800000)  # sign and exponent
MAGIC = np.float32(12582912.0)  # 1.5·2²³: adding it rounds to an integer, half to even, and leaves it in the low bits
TINY = np.float32(2.0**-60)
ENLARGE = np.float32(2.0**64)
CHANCE = np.float32(2.0**-32)  # takes an int32 to ±½
LEAST = np.float32(2.0**-149)


@njit(nogil=True, cache=True)
def sign_block(x, r, scale, codes):
    level = bits_of(scale)
    for i in range(x.size):
        p = x[i] + r[i]
        sign = np.int32(bits_of(p) & SIGN)
        r[i] = p - float_of(np.int32(sign | level))
        codes[i] = np.uint8(np.uint32(sign) >> np.uint32(31))


@njit(nogil=True, cache=True)
def ternary_block(x, r, scale, codes):
    middle = middle_of(scale)
    for i in range(x.size):
        p = x[i] + r[i]
        code = ternary_code(p, middle)
        r[i] = p - uniform_level(code, np.int32(1), np.float32(1.0), scale)
        codes[i] = saturated(code)


@njit(nogil=True, cache=True)
def ternary_codes(p, scale, codes):
    """`ternary_block` without what is left."""
    middle = middle_of(scale)
    for i in range(p.size):
        codes[i] = saturated(ternary_code(p[i], middle))


@njit(nogil=True, cache=True)
def middle_of(scale):
    """The bits of what is as far from 0 as from the level above; all but 0 if that is too small a number."""
    middle = np.float32(0.5) * scale
    return bits_of(middle if middle > LEAST else LEAST)


@njit(nogil=True, cache=True)
def ternary_code(p, middle):
    pattern = bits_of(p)
    level = np.int32(1) if and32(pattern, MAGNITUDE) >= middle else np.int32(0)
    return add32(np.int32(1), -level if pattern < np.int32(0) else level)


@njit(nogil=True, cache=True)
def log_block(x, r, scale, bits, uppers, codes):
    levels = np.int32((1 << (bits - 1)) - 1)
    largest = bits_of(scale)
    if largest < np.int32((levels + 1) << 23):
        log_block_near_zero(x, r, scale, bits, codes)
        return
    # The smallest fp32 number that is at least ¾ of the scale, where the top level begins. Each level below begins at
    # half of the one above it: in bits, one exponent (1 << 23) less. The lowest one reaches down to half of itself.
    exact = 0.75 * np.float64(scale)
    rounded = np.float32(exact)
    top = bits_of(rounded)
    if np.float64(rounded) < exact:
        top = np.int32(top + 1)
    lowest = np.int32(top - ((levels - 1) << 23))
    below = np.int32(largest - (levels << 23))
    # Without the mantissa of `top`, what begins a level is an exponent, and the rest of the bits can be cut off.
    mantissa = np.int32(top & np.int32(0x7FFFFF))
    shift = np.int32(largest - np.int32(top - mantissa))
    for i in range(x.size):
        p = x[i] + r[i]
        pattern = bits_of(p)
        magnitude = and32(pattern, MAGNITUDE)
        raised = lowest if magnitude < lowest else magnitude
        level = add32(and32(np.int32(raised - mantissa), EXPONENT), shift)
        level = level if magnitude >= below else np.int32(0)
        signed = np.int32(level | and32(pattern, SIGN))
        r[i] = p - float_of(signed)
        uppers[i] = np.uint16(np.uint32(signed) >> np.uint32(16))
    # The code of a level is its exponent above that of `below`. Upper halves hold all of that, twice as many a vector.
    zero = np.uint16(below >> 23)
    negative = np.uint16(1 << (bits - 1))
    for i in range(x.size):
        exponent = np.uint16(np.uint16(uppers[i] & np.uint16(0x7FFF)) >> np.uint16(7))
        index = np.uint16((exponent if exponent > zero else zero) - zero)
        sign = negative if uppers[i] >= np.uint16(0x8000) else np.uint16(0)
        codes[i] = np.uint8(np.uint16(index | sign))


@njit(nogil=True, cache=True)
def log_block_near_zero(x, r, scale, bits, codes):
    """`log_block` where some level is not a normal number: exact thresholds in fp64, one by one."""
    levels = (1 << (bits - 1)) - 1
    negative = 1 << (bits - 1)
    for i in range(x.size):
        p = x[i] + r[i]
        magnitude = np.float64(abs(p))
        index = 0
        if magnitude > 0.0:
            threshold = 0.5 * np.float64(scale) * 2.0 ** (1 - levels)
            while index < levels and magnitude >= threshold:
                index += 1
                threshold = 0.75 * np.float64(scale) * 2.0 ** (index + 1 - levels)
        level = np.float32(0.0)
        if index > 0:
            level = np.float32(np.float64(scale) * 2.0 ** (index - levels))
        is_negative = bits_of(p) < np.int32(0)
        r[i] = p - (-level if is_negative else level)
        codes[i] = np.uint8(index | negative) if is_negative else np.uint8(index)


@njit(nogil=True, cache=True)
def uniform_block(x, r, scale, bits, codes):
    if scale < TINY:
        uniform_block_near_zero(x, r, scale, bits, False, np.uint64(0), codes)
        return
    levels = np.float32((1 << (bits - 1)) - 1)
    steps = levels / scale
    unit = np.float32(1.0) / levels
    offset = np.int32(np.int32(levels) - bits_of(MAGIC))
    for i in range(x.size):
        p = x[i] + r[i]
        shifted = p * steps + MAGIC
        r[i] = p - ((shifted - MAGIC) * unit) * scale
        codes[i] = saturated(add32(bits_of(shifted), offset))


@njit(nogil=True, cache=True)
def uniform_codes(p, scale, bits, codes):
    """`uniform_block` without what is left; the scale is not near zero."""
    levels = np.float32((1 << (bits - 1)) - 1)
    steps = levels / scale
    offset = np.int32(np.int32(levels) - bits_of(MAGIC))
    for i in range(p.size):
        codes[i] = saturated(add32(bits_of(p[i] * steps + MAGIC), offset))


@njit(nogil=True, cache=True)
def uniform_stochastic_block(x, r, scale, bits, key, codes):
    """Add a chance of ±½ step before rounding, so that the mean is right."""
    if scale < TINY:
        uniform_block_near_zero(x, r, scale, bits, True, key, codes)
        return
    levels = np.float32((1 << (bits - 1)) - 1)
    steps = levels / scale
    unit = np.float32(1.0) / levels
    offset = np.int32(np.int32(levels) - bits_of(MAGIC))
    first, second = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    for i in range(x.size):
        p = x[i] + r[i]
        moved = p * steps + np.float32(scramble(np.uint32(i), first, second)) * CHANCE
        moved = levels if moved > levels else moved
        moved = -levels if moved < -levels else moved
        shifted = moved + MAGIC
        r[i] = p - ((shifted - MAGIC) * unit) * scale
        codes[i] = saturated(add32(bits_of(shifted), offset))


@njit(nogil=True, cache=True)
def uniform_block_near_zero(x, r, scale, bits, stochastic, key, codes):
    """Both of the above where levels / scale could overflow: all is enlarged by a power of two, which is exact."""
    levels = np.float32((1 << (bits - 1)) - 1)
    steps = np.float32(0.0)
    if scale > np.float32(0.0):
        steps = levels / (scale * ENLARGE)
    unit = np.float32(1.0) / levels
    first, second = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    for i in range(x.size):
        p = x[i] + r[i]
        moved = (p * ENLARGE) * steps
        if stochastic:
            moved += np.float32(scramble(np.uint32(i), first, second)) * CHANCE
            moved = min(max(moved, -levels), levels)
        rounded = (moved + MAGIC) - MAGIC
        r[i] = p - (rounded * unit) * scale
        codes[i] = np.uint8(np.int32(rounded) + np.int32(levels))


@njit(nogil=True, cache=True)
def saturated(code):
    """A code as a byte. It is in range anyway; the bounds let the compiler use the processor's saturating packs."""
    code = np.int32(0) if code < np.int32(0) else code
    return np.uint8(np.int32(255) if code > np.int32(255) else code)


@njit(nogil=True, cache=True)
def splitmix64(value):
    value += np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(nogil=True, cache=True)
def pick_block(of, x, r, scale, codes, packed):
    for i in range(x.size):
        r[i] = x[i] + r[i]
    pick_codes(of, r, middle_of(scale), packed)
    add_picked(of, packed, scale, np.float32(-1.0), codes, r)


@njit(nogil=True, cache=True)
def quantize_block(kind, bits, x, r, scale, key, uppers, codes):
    if kind == SIGN_KIND:
        sign_block(x, r, scale, codes)
    elif kind == LOG_KIND:
        log_block(x, r, scale, bits, uppers, codes)
    elif kind == TERNARY_KIND:
        ternary_block(x, r, scale, codes)
    elif kind == UNIFORM_KIND:
        uniform_block(x, r, scale, bits, codes)
    else:
        uniform_stochastic_block(x, r, scale, bits, key, codes)
