"""Kernels of `Identity` and `Half`, and the checks that all entries are finite."""

# mypy: ignore-errors
# numba compiles its own dialect of Python, which mypy would check as Python.

import numpy as np

from laconic.compress.jit import helper, kernel
from laconic.compress.kernels.bits import (
    MAGNITUDE,
    NOT_FINITE,
    SIGN,
    add32,
    and32,
    bits_of,
    float_of,
    largest_bits,
    largest_bits_of_sum,
    shl32,
)

FP16_LARGEST = np.int32(0x477FE000)  # 65504
FP16_SMALLEST_NORMAL = np.int32(0x38800000)  # 2⁻¹⁴
BF16_LARGEST = np.int32(0x7F7F0000)
HALF = np.float32(0.5)
FP16_TO_FP32 = np.float32(2.0**112)  # 127 − 15, the difference of the exponent biases


@kernel
def all_finite(x):
    return largest_bits(x) < NOT_FINITE


@kernel
def sum_is_finite(x, r):
    return largest_bits_of_sum(x, r) < NOT_FINITE


@kernel
def halves_are_finite(halves, exponent):
    """Returns whether no 16-bit float has all bits of its exponent set. `exponent`: the mask of these bits."""
    largest = np.uint16(0)
    for i in range(halves.size):
        masked = np.uint16(halves[i] & exponent)
        largest = masked if masked > largest else largest
    return largest < exponent


@kernel
def add_scaled(values, target, factor):
    """target += factor · values."""
    for i in range(target.size):
        target[i] += factor * values[i]


@helper
def to_fp16(value):
    """Returns the bits of `value` in fp16, as int32: rounded to nearest even, clamped to the largest number."""
    pattern = bits_of(value)
    magnitude = and32(pattern, MAGNITUDE)
    magnitude = FP16_LARGEST if magnitude > FP16_LARGEST else magnitude
    odd = and32(np.int32(magnitude >> 13), np.int32(1))
    normal = np.int32(np.int32(add32(add32(magnitude, np.int32(0xFFF)), odd) >> 13) - np.int32(112 << 10))
    subnormal = np.int32(bits_of(float_of(magnitude) + HALF) - bits_of(HALF))
    rounded = normal if magnitude >= FP16_SMALLEST_NORMAL else subnormal
    return np.int32(rounded | and32(np.int32(pattern >> 16), np.int32(0x8000)))


@helper
def from_fp16(half):
    """Inverts `to_fp16` up to rounding."""
    magnitude = float_of(shl32(and32(half, np.int32(0x7FFF)), np.int32(13))) * FP16_TO_FP32
    return float_of(np.int32(bits_of(magnitude) | and32(shl32(half, np.int32(16)), SIGN)))


@helper
def to_bf16(value):
    """Returns the bits of `value` in bf16, rounded and clamped like `to_fp16`."""
    pattern = bits_of(value)
    magnitude = and32(pattern, MAGNITUDE)
    magnitude = BF16_LARGEST if magnitude > BF16_LARGEST else magnitude
    odd = and32(np.int32(magnitude >> 16), np.int32(1))
    rounded = np.int32(add32(add32(magnitude, np.int32(0x7FFF)), odd) >> 16)
    return np.int32(rounded | and32(np.int32(pattern >> 16), np.int32(0x8000)))


@helper
def from_bf16(half):
    return float_of(shl32(half, np.int32(16)))


@kernel
def encode_half(x, is_bf16, out):
    if is_bf16:
        for i in range(x.size):
            out[i] = np.uint16(to_bf16(x[i]))
    else:
        for i in range(x.size):
            out[i] = np.uint16(to_fp16(x[i]))


@kernel
def encode_half_with_feedback(x, residual, is_bf16, out):
    """Encodes p = x + residual into `out` and writes the rounding error to `residual`."""
    if is_bf16:
        for i in range(x.size):
            p = x[i] + residual[i]
            half = to_bf16(p)
            residual[i] = p - from_bf16(half)
            out[i] = np.uint16(half)
    else:
        for i in range(x.size):
            p = x[i] + residual[i]
            half = to_fp16(p)
            residual[i] = p - from_fp16(half)
            out[i] = np.uint16(half)


@kernel
def add_half(code, is_bf16, target, factor):
    """target += factor · decoded."""
    if is_bf16:
        for i in range(target.size):
            target[i] += factor * from_bf16(np.int32(code[i]))
    else:
        for i in range(target.size):
            target[i] += factor * from_fp16(np.int32(code[i]))
