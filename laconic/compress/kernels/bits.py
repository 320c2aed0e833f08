"""Building blocks of the kernels: floats as integers, and packing integers of a few bits into bytes."""

# mypy: ignore-errors
# numba compiles its own dialect of Python, which mypy would check as Python.

import numpy as np
from numba import types
from numba.extending import intrinsic

from laconic.compress.jit import helper

MAGNITUDE = np.int32(0x7FFFFFFF)
SIGN = np.int32(-0x80000000)
NOT_FINITE = np.int32(0x7F800000)  # the bits of inf; those of every NaN are larger

ONE_BIT = np.uint64(0x0101010101010101)
TWO_BITS = np.uint64(0x0303030303030303)
FOUR_BITS = np.uint64(0x0F0F0F0F0F0F0F0F)


@intrinsic
def bits_of(typing_context, value):
    """Reinterprets an fp32 number as int32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@intrinsic
def float_of(typing_context, value):
    """Reinterprets an int32 number as fp32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


def _int32_operation(name):
    """Makes an int32 operation. numba would widen to int64, which halves the lanes of a SIMD vector."""

    @intrinsic
    def operation(typing_context, left, right):
        def generate(context, builder, signature, arguments):
            return getattr(builder, name)(*arguments)

        return types.int32(types.int32, types.int32), generate

    return operation


add32, and32, shl32 = _int32_operation("add"), _int32_operation("and_"), _int32_operation("shl")


@intrinsic
def load_word(typing_context, data, start):
    """Loads eight bytes of a uint8 array as uint64, from any address."""

    def generate(context, builder, signature, arguments):
        pointer = builder.gep(
            context.make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]]
        )
        return builder.load(builder.bitcast(pointer, context.get_value_type(types.uint64).as_pointer()), align=1)

    return types.uint64(data, types.intp), generate


@intrinsic
def store_word(typing_context, data, start, word):
    """Stores a uint64 as eight bytes of a uint8 array, at any address."""

    def generate(context, builder, signature, arguments):
        pointer = builder.gep(
            context.make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]]
        )
        builder.store(arguments[2], builder.bitcast(pointer, arguments[2].type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(data, types.intp, types.uint64), generate


@intrinsic
def hash32(typing_context, index, first, second):
    """Hashes an index with a key (first, second), as `uniform_noise` in `laconic/compress/random.py` does.

    Written in LLVM operations, because numba would widen 32-bit operations to 64 bits.
    """

    def generate(context, builder, signature, arguments):
        index, first, second = arguments
        word = index.type
        h = builder.add(index, first)
        h = builder.mul(builder.xor(h, builder.lshr(h, word(16))), word(0x7FEB352D))
        h = builder.xor(builder.xor(h, builder.lshr(h, word(15))), second)
        h = builder.mul(h, word(0x846CA68B))
        return builder.xor(h, builder.lshr(h, word(16)))

    return types.int32(types.uint32, types.uint32, types.uint32), generate


@helper
def largest_bits(x):
    """Returns max |x| as bits. Magnitudes order like their bits; a float maximum would not vectorize and drop NaN."""
    largest = np.int32(0)
    for i in range(x.size):
        magnitude = and32(bits_of(x[i]), MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest


@helper
def largest_bits_of_sum(x, r):
    """Returns max |x + r| as bits, like `largest_bits`."""
    largest = np.int32(0)
    for i in range(x.size):
        magnitude = and32(bits_of(x[i] + r[i]), MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest


# Plain loops, because numba takes seconds to compile a slice assignment.
@helper
def fill(target, value):
    for i in range(target.size):
        target[i] = value


@helper
def copy_into(target, source):
    for i in range(source.size):
        target[i] = source[i]


@helper
def store_float(out, start, value):
    """Stores an fp32 number as four bytes, little-endian, at any address."""
    pattern = np.uint32(bits_of(value))
    for i in range(4):
        out[start + i] = np.uint8(pattern >> np.uint32(8 * i))


@helper
def load_float(code, start):
    """Inverts `store_float`."""
    pattern = np.uint32(0)
    for i in range(4):
        pattern |= np.uint32(code[start + i]) << np.uint32(8 * i)
    return float_of(np.int32(pattern))


@helper
def pack_fields(symbols, bits, out):
    """Packs the symbols of a full block, eight bytes at a time, in the layout of `pack_fields` in `packing.py`.

    Neighbouring symbols end up in neighbouring bytes, so the loops vectorize.
    """
    low = np.uint64(0)
    start = 0
    if bits & 4:
        n = symbols.size // 2
        for i in range(0, n, 8):
            a = (load_word(symbols, i) >> low) & FOUR_BITS
            b = (load_word(symbols, i + n) >> low) & FOUR_BITS
            store_word(out, start + i, a | (b << np.uint64(4)))
        low += np.uint64(4)
        start += n
    if bits & 2:
        n = symbols.size // 4
        for i in range(0, n, 8):
            a = (load_word(symbols, i) >> low) & TWO_BITS
            b = (load_word(symbols, i + n) >> low) & TWO_BITS
            c = (load_word(symbols, i + 2 * n) >> low) & TWO_BITS
            d = (load_word(symbols, i + 3 * n) >> low) & TWO_BITS
            store_word(out, start + i, a | (b << np.uint64(2)) | (c << np.uint64(4)) | (d << np.uint64(6)))
        low += np.uint64(2)
        start += n
    if bits & 1:
        n = symbols.size // 8
        for i in range(0, n, 8):
            packed = np.uint64(0)
            for j in range(8):
                packed |= ((load_word(symbols, i + j * n) >> low) & ONE_BIT) << np.uint64(j)
            store_word(out, start + i, packed)


@helper
def unpack_fields(packed, bits, symbols):
    """Inverts `pack_fields`."""
    low = np.uint64(0)
    start = 0
    if bits & 4:
        n = symbols.size // 2
        for i in range(0, n, 8):
            word = load_word(packed, i)
            store_word(symbols, i, word & FOUR_BITS)
            store_word(symbols, i + n, (word >> np.uint64(4)) & FOUR_BITS)
        low += np.uint64(4)
        start += n
    elif bits & 3:
        fill(symbols, np.uint8(0))
    if bits & 2:
        n = symbols.size // 4
        for i in range(0, n, 8):
            word = load_word(packed, start + i)
            for j in range(4):
                field = ((word >> np.uint64(2 * j)) & TWO_BITS) << low
                store_word(symbols, i + j * n, load_word(symbols, i + j * n) | field)
        low += np.uint64(2)
        start += n
    if bits & 1:
        n = symbols.size // 8
        for i in range(0, n, 8):
            word = load_word(packed, start + i)
            for j in range(8):
                field = ((word >> np.uint64(j)) & ONE_BIT) << low
                store_word(symbols, i + j * n, load_word(symbols, i + j * n) | field)


@helper
def pack_sequence(values, width, out):
    """Packs integers of `width` bits one after the other, lowest bit first."""
    pending = np.uint64(0)
    filled = 0
    position = 0
    for i in range(values.size):
        pending |= np.uint64(values[i]) << np.uint64(filled)
        filled += width
        while filled >= 8:
            out[position] = np.uint8(pending & np.uint64(255))
            pending >>= np.uint64(8)
            filled -= 8
            position += 1
    if filled > 0:
        out[position] = np.uint8(pending & np.uint64(255))


@helper
def unpack_sequence(code, width, values):
    """Inverts `pack_sequence`."""
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    pending = np.uint64(0)
    filled = 0
    position = 0
    for i in range(values.size):
        while filled < width:
            pending |= np.uint64(code[position]) << np.uint64(filled)
            filled += 8
            position += 1
        values[i] = pending & mask
        pending >>= np.uint64(width)
        filled -= width
