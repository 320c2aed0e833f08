"""The quantizing loops over one block: the symbols of p = x + r, and the error p − level into r."""

# mypy: ignore-errors
# numba compiles its own dialect of Python, which mypy would check as Python.

import numpy as np

from laconic.compress.jit import helper
from laconic.compress.kernels.bits import (
    MAGNITUDE,
    SIGN,
    add32,
    and32,
    bits_of,
    float_of,
    hash32,
)
from laconic.compress.kernels.pick import add_picked, pack_picks

SIGN_AND_EXPONENT = np.int32(-0x800000)
MAGIC = np.float32(12582912.0)  # 1.5·2²³: adding it rounds to an integer, ties to even, held in the low bits
TINY = np.float32(2.0**-60)
ENLARGE = np.float32(2.0**64)
NOISE_UNIT = np.float32(2.0**-32)  # maps int32 to [−½, ½)
SMALLEST = np.float32(2.0**-149)


@helper
def sign_block(x, r, scale, symbols):
    level = bits_of(scale)
    for i in range(x.size):
        p = x[i] + r[i]
        sign = np.int32(bits_of(p) & SIGN)
        r[i] = p - float_of(np.int32(sign | level))
        symbols[i] = np.uint8(np.uint32(sign) >> np.uint32(31))


@helper
def pick_threshold(scale):
    """Returns the bits of scale/2, from which on entries round to ±scale; at least the smallest number, never 0."""
    threshold = np.float32(0.5) * scale
    return bits_of(threshold if threshold > SMALLEST else SMALLEST)


@helper
def log_block(x, r, scale, bits, high_halves, symbols):
    """Works on the bits of the numbers; `high_halves` (block) uint16 is scratch memory."""
    levels = np.int32((1 << (bits - 1)) - 1)
    largest = bits_of(scale)
    if largest < np.int32((levels + 1) << 23):
        log_block_near_zero(x, r, scale, bits, symbols)
        return
    # `top`: the smallest fp32 number that is at least ¾ of the scale, the lower bound of the top level. The bound of
    # each level below is half of the one above it: in bits, one exponent (1 << 23) less. Magnitudes below `lowest`
    # round to the lowest level if they reach half of it (`below`), else to 0.
    exact = 0.75 * np.float64(scale)
    rounded = np.float32(exact)
    top = bits_of(rounded)
    if np.float64(rounded) < exact:
        top = np.int32(top + 1)
    lowest = np.int32(top - ((levels - 1) << 23))
    below = np.int32(largest - (levels << 23))
    # After subtracting the mantissa of `top`, the bounds are powers of two, so the exponent alone gives the level.
    mantissa = np.int32(top & np.int32(0x7FFFFF))
    shift = np.int32(largest - np.int32(top - mantissa))
    for i in range(x.size):
        p = x[i] + r[i]
        pattern = bits_of(p)
        magnitude = and32(pattern, MAGNITUDE)
        raised = lowest if magnitude < lowest else magnitude
        level = add32(and32(np.int32(raised - mantissa), SIGN_AND_EXPONENT), shift)
        level = level if magnitude >= below else np.int32(0)
        signed = np.int32(level | and32(pattern, SIGN))
        r[i] = p - float_of(signed)
        high_halves[i] = np.uint16(np.uint32(signed) >> np.uint32(16))
    # The symbol of a level is its exponent minus that of `below`. Sign and exponent are in the high 16 bits, and a
    # SIMD vector holds twice as many of these.
    zero = np.uint16(below >> 23)
    negative = np.uint16(1 << (bits - 1))
    for i in range(x.size):
        exponent = np.uint16(np.uint16(high_halves[i] & np.uint16(0x7FFF)) >> np.uint16(7))
        index = np.uint16((exponent if exponent > zero else zero) - zero)
        sign = negative if high_halves[i] >= np.uint16(0x8000) else np.uint16(0)
        symbols[i] = np.uint8(np.uint16(index | sign))


@helper
def log_block_near_zero(x, r, scale, bits, symbols):
    """Does what `log_block` does for scales so small that a level is subnormal: exact thresholds in fp64."""
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
        symbols[i] = np.uint8(index | negative) if is_negative else np.uint8(index)


@helper
def uniform_block(x, r, scale, bits, symbols):
    if scale < TINY:
        uniform_block_near_zero(x, r, scale, bits, False, np.uint64(0), symbols)
        return
    levels = np.float32((1 << (bits - 1)) - 1)
    steps = levels / scale
    unit = np.float32(1.0) / levels
    offset = np.int32(np.int32(levels) - bits_of(MAGIC))
    for i in range(x.size):
        p = x[i] + r[i]
        shifted = p * steps + MAGIC
        r[i] = p - ((shifted - MAGIC) * unit) * scale
        symbols[i] = saturate(add32(bits_of(shifted), offset))


@helper
def uniform_stochastic_block(x, r, scale, bits, key, symbols):
    """Adds noise of ±½ level before rounding, so that the expected value is exact."""
    if scale < TINY:
        uniform_block_near_zero(x, r, scale, bits, True, key, symbols)
        return
    levels = np.float32((1 << (bits - 1)) - 1)
    steps = levels / scale
    unit = np.float32(1.0) / levels
    offset = np.int32(np.int32(levels) - bits_of(MAGIC))
    first, second = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    for i in range(x.size):
        p = x[i] + r[i]
        noisy = p * steps + np.float32(hash32(np.uint32(i), first, second)) * NOISE_UNIT
        noisy = levels if noisy > levels else noisy
        noisy = -levels if noisy < -levels else noisy
        shifted = noisy + MAGIC
        r[i] = p - ((shifted - MAGIC) * unit) * scale
        symbols[i] = saturate(add32(bits_of(shifted), offset))


@helper
def uniform_block_near_zero(x, r, scale, bits, stochastic, key, symbols):
    """Does what the two functions above do, for scales so small that levels / scale could overflow.

    Everything is multiplied by a power of two, which is exact.
    """
    levels = np.float32((1 << (bits - 1)) - 1)
    steps = np.float32(0.0)
    if scale > np.float32(0.0):
        steps = levels / (scale * ENLARGE)
    unit = np.float32(1.0) / levels
    first, second = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    for i in range(x.size):
        p = x[i] + r[i]
        level = (p * ENLARGE) * steps
        if stochastic:
            level += np.float32(hash32(np.uint32(i), first, second)) * NOISE_UNIT
            level = min(max(level, -levels), levels)
        rounded = (level + MAGIC) - MAGIC
        r[i] = p - (rounded * unit) * scale
        symbols[i] = np.uint8(np.int32(rounded) + np.int32(levels))


@helper
def saturate(symbol):
    """Returns an int32 as a byte. It is in range anyway; the bounds let LLVM use saturating SIMD packs."""
    symbol = np.int32(0) if symbol < np.int32(0) else symbol
    return np.uint8(np.int32(255) if symbol > np.int32(255) else symbol)


@helper
def splitmix64(value):
    """Hashes as `splitmix64` in `laconic/compress/random.py` does."""
    value += np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@helper
def pick_block(of, x, r, scale, symbols, packed):
    """Writes packed symbols; `symbols` is scratch memory."""
    for i in range(x.size):
        r[i] = x[i] + r[i]
    pack_picks(of, r, pick_threshold(scale), packed)
    add_picked(of, packed, scale, np.float32(-1.0), symbols, r)
