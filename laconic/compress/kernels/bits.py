"""Building blocks of the kernels: reinterpreting floats as integers, and packing small codes into bytes."""

# mypy: ignore-errors
# (numba compiles a dialect of Python that mypy takes for Python)

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

MAGNITUDE = np.int32(0x7FFFFFFF)
SIGN = np.int32(-0x80000000)
NOT_FINITE = np.int32(0x7F800000)  # the bits of inf; every nan has larger ones

ONE_BIT = np.uint64(0x0101010101010101)
TWO_BITS = np.uint64(0x0303030303030303)
FOUR_BITS = np.uint64(0x0F0F0F0F0F0F0F0F)


@intrinsic
def bits_of(typing_context, value):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@intrinsic
def float_of(typing_context, value):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


def _int32_operation(name):
    """An operation on 32 bits, where numba would widen to 64 and halve the lanes of a vector."""

    @intrinsic
    def operation(typing_context, left, right):
        def generate(context, builder, signature, arguments):
            return getattr(builder, name)(*arguments)

        return types.int32(types.int32, types.int32), generate

    return operation


add32, and32, shl32 = _int32_operation("add"), _int32_operation("and_"), _int32_operation("shl")


@intrinsic
def load_word(typing_context, data, start):
    """Eight bytes of a uint8 array from any address, aligned or not."""

    def generate(context, builder, signature, arguments):
        pointer = builder.gep(
            context.make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]]
        )
        return builder.load(builder.bitcast(pointer, context.get_value_type(types.uint64).as_pointer()), align=1)

    return types.uint64(data, types.intp), generate


@intrinsic
def store_word(typing_context, data, start, word):
    """The counterpart of `load_word`."""

    def generate(context, builder, signature, arguments):
        pointer = builder.gep(
            context.make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]]
        )
        builder.store(arguments[2], builder.bitcast(pointer, arguments[2].type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(data, types.intp, types.uint64), generate


@intrinsic
def pointer_to(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.uint64), generate


@njit(nogil=True, cache=True)
def bytes_at(address, size):
    """An array over memory that others own: so a kernel takes any number of codes, wherever they are."""
    return carray(pointer_to(address), (size,), np.uint8)


@intrinsic
def scramble(typing_context, index, first, second):
    """The counter-based generator of `laconic.compress.random`, in 32-bit operations that numba would widen to 64."""

    def generate(context, builder, signature, arguments):
        index, first, second = arguments
        word = index.type
        h = builder.add(index, first)
        h = builder.mul(builder.xor(h, builder.lshr(h, word(16))), word(0x7FEB352D))
        h = builder.xor(builder.xor(h, builder.lshr(h, word(15))), second)
        h = builder.mul(h, word(0x846CA68B))
        return builder.xor(h, builder.lshr(h, word(16)))

    return types.int32(types.uint32, types.uint32, types.uint32), generate


@njit(nogil=True, cache=True)
def largest_bits(x):
    """Of the largest magnitude: as an integer, because a float maximum would neither vectorise nor keep a nan."""
    largest = np.int32(0)
    for i in range(x.size):
        magnitude = and32(bits_of(x[i]), MAGNITUDE)
        largest = magnitude if magnitude > largest else largest
    return largest


# A plain loop, because a slice assignment takes numba seconds to compile.
@njit(nogil=True, cache=True)
def fill(target, value):
    for i in range(target.size):
        target[i] = value


@njit(nogil=True, cache=True)
def move(source, target):
    for i in range(source.size):
        target[i] = source[i]


@njit(nogil=True, cache=True)
def store_float(out, start, value):
    """Four bytes, little-endian: `out` has no alignment to rely on."""
    pattern = np.uint32(bits_of(value))
    for i in range(4):
        out[start + i] = np.uint8(pattern >> np.uint32(8 * i))


@njit(nogil=True, cache=True)
def load_float(code, start):
    pattern = np.uint32(0)
    for i in range(4):
        pattern |= np.uint32(code[start + i]) << np.uint32(8 * i)
    return float_of(np.int32(pattern))


@njit(nogil=True, cache=True)
def pack_fields(codes, bits, out):
    """Pack one block of `bits`-wide codes, eight bytes at a time.

    The codes are cut into fields of 4, 2 and 1 bits, lowest bits first (3 = 2 + 1). A field of w bits is a plane in
    which byte i holds the field of codes i, i + n, i + 2n … for n = block·w/8: neighbours stay neighbours, and loops
    vectorise.
    """
    low = np.uint64(0)
    start = 0
    if bits & 4:
        n = codes.size // 2
        for i in range(0, n, 8):
            a = (load_word(codes, i) >> low) & FOUR_BITS
            b = (load_word(codes, i + n) >> low) & FOUR_BITS
            store_word(out, start + i, a | (b << np.uint64(4)))
        low += np.uint64(4)
        start += n
    if bits & 2:
        n = codes.size // 4
        for i in range(0, n, 8):
            a = (load_word(codes, i) >> low) & TWO_BITS
            b = (load_word(codes, i + n) >> low) & TWO_BITS
            c = (load_word(codes, i + 2 * n) >> low) & TWO_BITS
            d = (load_word(codes, i + 3 * n) >> low) & TWO_BITS
            store_word(out, start + i, a | (b << np.uint64(2)) | (c << np.uint64(4)) | (d << np.uint64(6)))
        low += np.uint64(2)
        start += n
    if bits & 1:
        n = codes.size // 8
        for i in range(0, n, 8):
            packed = np.uint64(0)
            for j in range(8):
                packed |= ((load_word(codes, i + j * n) >> low) & ONE_BIT) << np.uint64(j)
            store_word(out, start + i, packed)


@njit(nogil=True, cache=True)
def unpack_fields(packed, bits, codes):
    """The inverse of `pack_fields`."""
    low = np.uint64(0)
    start = 0
    if bits & 4:
        n = codes.size // 2
        for i in range(0, n, 8):
            word = load_word(packed, i)
            store_word(codes, i, word & FOUR_BITS)
            store_word(codes, i + n, (word >> np.uint64(4)) & FOUR_BITS)
        low += np.uint64(4)
        start += n
    elif bits & 3:
        fill(codes, np.uint8(0))
    if bits & 2:
        n = codes.size // 4
        for i in range(0, n, 8):
            word = load_word(packed, start + i)
            for j in range(4):
                field = ((word >> np.uint64(2 * j)) & TWO_BITS) << low
                store_word(codes, i + j * n, load_word(codes, i + j * n) | field)
        low += np.uint64(2)
        start += n
    if bits & 1:
        n = codes.size // 8
        for i in range(0, n, 8):
            word = load_word(packed, start + i)
            for j in range(8):
                field = ((word >> np.uint64(j)) & ONE_BIT) << low
                store_word(codes, i + j * n, load_word(codes, i + j * n) | field)


@njit(nogil=True, cache=True)
def pack_sequence(values, width, out):
    """Pack numbers of `width` bits one after the other, lowest bit first."""
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


@njit(nogil=True, cache=True)
def unpack_sequence(code, width, values):
    """The inverse of `pack_sequence`."""
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
