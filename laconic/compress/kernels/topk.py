"""Kernels of `TopK`: the k-th largest magnitude without sorting, and indices as an Elias–Fano list."""

# mypy: ignore-errors
# (numba compiles a dialect of Python that mypy takes for Python)

import numpy as np
from numba import njit

from laconic.compress.kernels.bits import (
    MAGNITUDE,
    NOT_FINITE,
    and32,
    bits_of,
    load_word,
    pack_sequence,
    unpack_sequence,
)

CHUNK = 2048
SAMPLE_RUN = 16  # one cache line …
SAMPLE_STRIDE = 1024  # … out of every 64
RADIX_BITS = 11


@njit(nogil=True, cache=True)
def magnitude_at(x, residual, feedback, i):
    value = x[i] + residual[i] if feedback else x[i]
    return and32(bits_of(value), MAGNITUDE)


@njit(nogil=True, cache=True)
def load_magnitudes(x, residual, feedback, start, magnitudes):
    """Magnitudes of one chunk as integers, which order like the floats; returns the largest."""
    count = min(magnitudes.size, x.size - start)
    xs = x[start : start + count]
    largest = np.int32(0)
    if feedback:
        rs = residual[start : start + count]
        for i in range(count):
            magnitude = and32(bits_of(xs[i] + rs[i]), MAGNITUDE)
            magnitudes[i] = magnitude
            largest = magnitude if magnitude > largest else largest
    else:
        for i in range(count):
            magnitude = and32(bits_of(xs[i]), MAGNITUDE)
            magnitudes[i] = magnitude
            largest = magnitude if magnitude > largest else largest
    return largest


@njit(nogil=True, cache=True)
def narrow(histogram, rank):
    """The bin that holds the rank-th largest entry, and its rank within that bin."""
    bin_index = histogram.size - 1
    while histogram[bin_index] < rank:
        rank -= histogram[bin_index]
        bin_index -= 1
    return bin_index, rank


@njit(nogil=True, cache=True)
def rank_th_largest(values, rank):
    """Radix selection: 31 bits in three rounds, from the top."""
    histogram = np.empty(1 << RADIX_BITS, np.int64)
    prefix = 0
    for shift in (20, 9, 0):
        for j in range(histogram.size):
            histogram[j] = 0
        high = shift + (RADIX_BITS if shift else 9)
        for i in range(values.size):
            value = np.int64(values[i])
            if value >> high == prefix >> high:
                histogram[(value >> shift) & ((1 << (high - shift)) - 1)] += 1
        bin_index, rank = narrow(histogram, rank)
        prefix |= bin_index << shift
    return np.int32(prefix), rank


@njit(nogil=True, cache=True)
def rank_th_largest_of_all(x, residual, feedback, rank):
    """The same over the whole input, for when the sample misled: three more reads of it."""
    histogram = np.empty(1 << RADIX_BITS, np.int64)
    prefix = 0
    for shift in (20, 9, 0):
        for j in range(histogram.size):
            histogram[j] = 0
        high = shift + (RADIX_BITS if shift else 9)
        for i in range(x.size):
            value = np.int64(magnitude_at(x, residual, feedback, i))
            if value >> high == prefix >> high:
                histogram[(value >> shift) & ((1 << (high - shift)) - 1)] += 1
        bin_index, rank = narrow(histogram, rank)
        prefix |= bin_index << shift
    return np.int32(prefix), rank


@njit(nogil=True, cache=True)
def guess_threshold(x, residual, feedback, k):
    """A magnitude that, going by a sample, somewhat more than k entries reach."""
    if x.size < 16 * SAMPLE_STRIDE:
        return np.int32(0)
    sample = np.empty(x.size // SAMPLE_STRIDE * SAMPLE_RUN, np.int32)
    for j in range(sample.size):
        i = j // SAMPLE_RUN * SAMPLE_STRIDE + j % SAMPLE_RUN
        sample[j] = magnitude_at(x, residual, feedback, i)
    expected = k * sample.size / x.size
    rank = int(1.2 * expected + 4.0 * np.sqrt(expected)) + 1
    if rank >= sample.size:
        return np.int32(0)
    return rank_th_largest(sample, rank)[0]


@njit(nogil=True, cache=True)
def collect(x, residual, feedback, threshold, candidates, magnitudes):
    """Indices and magnitudes of entries that reach `threshold`, in order, in buffers with eight places to spare.

    Returns how many there are, or -1 if they do not fit, and the largest magnitude. Nothing branches on the data but
    the overflow: a branch that is taken one time in eight would cost more than all the rest.
    """
    chunk = np.empty(CHUNK, np.int32)
    flags = np.empty(CHUNK, np.uint8)
    hits = np.empty(CHUNK // 8 + 1, np.int64)
    largest = np.int32(0)
    found = 0
    for start in range(0, x.size, CHUNK):
        top = load_magnitudes(x, residual, feedback, start, chunk)
        largest = top if top > largest else largest
        if found < 0:
            continue
        for i in range(x.size - start, CHUNK):
            chunk[i] = np.int32(-1)
        for i in range(CHUNK):
            flags[i] = np.uint8(1) if chunk[i] >= threshold else np.uint8(0)
        hit_words = 0
        for i in range(0, CHUNK, 8):
            hits[hit_words] = i
            hit_words += 1 if load_word(flags, i) != np.uint64(0) else 0
        for h in range(hit_words):
            if found + 8 > candidates.size:
                found = -1
                break
            for j in range(hits[h], hits[h] + 8):
                candidates[found] = start + j
                magnitudes[found] = chunk[j]
                found += np.int64(flags[j])
    return found, largest


@njit(nogil=True, cache=True)
def select(x, residual, feedback, indices):
    """Fill `indices` with those of the k largest magnitudes, in order; of equals the first win. False if not finite."""
    k = indices.size
    capacity = min(x.size, 4 * k + 16 * SAMPLE_STRIDE)
    candidates = np.empty(capacity + 8, np.int64)
    magnitudes = np.empty(capacity + 8, np.int32)
    threshold = guess_threshold(x, residual, feedback, k)
    found, largest = collect(x, residual, feedback, threshold, candidates, magnitudes)
    if largest >= NOT_FINITE:
        return False
    taken = 0
    if found >= k:
        limit, equals = rank_th_largest(magnitudes[:found], k)
        for j in range(found):
            if magnitudes[j] > limit or (magnitudes[j] == limit and equals > 0):
                if magnitudes[j] == limit:
                    equals -= 1
                indices[taken] = candidates[j]
                taken += 1
    else:
        limit, equals = rank_th_largest_of_all(x, residual, feedback, k)
        for i in range(x.size):
            magnitude = magnitude_at(x, residual, feedback, i)
            if magnitude > limit or (magnitude == limit and equals > 0):
                if magnitude == limit:
                    equals -= 1
                indices[taken] = i
                taken += 1
    return True


@njit(nogil=True, cache=True)
def add_into(residual, x):
    for i in range(x.size):
        residual[i] = x[i] + residual[i]


@njit(nogil=True, cache=True)
def pack_indices(indices, low_bits, lows, highs):
    """Elias–Fano: the low bits of each index as they are; for the rest, bit (index >> low_bits) + position is set."""
    mask = (1 << low_bits) - 1
    remainders = np.empty(indices.size, np.int64)
    for i in range(highs.size):
        highs[i] = np.uint8(0)
    for j in range(indices.size):
        remainders[j] = indices[j] & mask
        place = (indices[j] >> low_bits) + j
        highs[place >> 3] |= np.uint8(1 << (place & 7))
    if low_bits > 0:
        pack_sequence(remainders, low_bits, lows)


@njit(nogil=True, cache=True)
def unpack_indices(lows, highs, low_bits, numel, indices):
    """The inverse of `pack_indices`; false when these bytes are no such list."""
    if low_bits > 0:
        unpack_sequence(lows, low_bits, indices)
    else:
        for j in range(indices.size):
            indices[j] = 0
    found = 0
    for i in range(highs.size):
        byte = highs[i]
        for bit in range(8):
            if (byte >> bit) & 1:
                if found == indices.size:
                    return False
                indices[found] |= (8 * i + bit - found) << low_bits
                if indices[found] >= numel or (found > 0 and indices[found] <= indices[found - 1]):
                    return False
                found += 1
    return found == indices.size
