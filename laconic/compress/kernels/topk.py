"""Kernels of `TopK`: selecting the k largest magnitudes without sorting, and Elias–Fano coding of indices.

Magnitudes are compared as int32 bits, which order like the floats. `feedback`: whether `residual` is added to x.
"""

# mypy: ignore-errors
# numba compiles its own dialect of Python, which mypy would check as Python.

import numpy as np

from laconic.compress.jit import helper, kernel
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
# The sample that guesses the threshold: one cache line (16 entries) out of every 64.
SAMPLE_RUN = 16
SAMPLE_STRIDE = 1024
RADIX_BITS = 11


@helper
def magnitude_at(x, residual, feedback, i):
    value = x[i] + residual[i] if feedback else x[i]
    return and32(bits_of(value), MAGNITUDE)


@helper
def load_magnitudes(x, residual, feedback, start, magnitudes):
    """Writes the magnitudes of one chunk to `magnitudes` and returns the largest."""
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


@helper
def find_bin(histogram, rank):
    """Returns the bin that holds the rank-th largest entry, and the rank of the entry within that bin."""
    bin_index = histogram.size - 1
    while histogram[bin_index] < rank:
        rank -= histogram[bin_index]
        bin_index -= 1
    return bin_index, rank


@helper
def rank_th_largest(values, rank):
    """Returns the rank-th largest value, and its rank among values equal to it.

    Radix selection over 31 bits in three rounds, highest bits first.
    """
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
        bin_index, rank = find_bin(histogram, rank)
        prefix |= bin_index << shift
    return np.int32(prefix), rank


@helper
def rank_th_largest_of_all(x, residual, feedback, rank):
    """Does the same for all magnitudes of x (+ residual), in three more passes, if the sampled threshold was wrong."""
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
        bin_index, rank = find_bin(histogram, rank)
        prefix |= bin_index << shift
    return np.int32(prefix), rank


@helper
def guess_threshold(x, residual, feedback, k):
    """Returns a magnitude that somewhat more than k entries should reach, estimated from a sample."""
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


@helper
def collect(x, residual, feedback, threshold, candidates, magnitudes):
    """Collects the indices and magnitudes of entries that reach `threshold`, in order.

    The buffers have eight places to spare. Returns the number of entries, or −1 if they do not fit, and the largest
    magnitude. Only the overflow check branches on the data: a mispredicted branch per hit would dominate the time.
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


@kernel
def select(x, residual, feedback, indices):
    """Fills `indices` with the sorted indices of the k largest magnitudes; among equals the first are taken.

    Returns False if an entry is not finite.
    """
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


@kernel
def add_into(residual, x):
    """residual += x."""
    for i in range(x.size):
        residual[i] = x[i] + residual[i]


@kernel
def pack_indices(indices, low_bits, lows, bitmap):
    """Elias–Fano codes sorted indices: their low bits, and bit (index >> low_bits) + position set in a bitmap."""
    mask = (1 << low_bits) - 1
    remainders = np.empty(indices.size, np.int64)
    for i in range(bitmap.size):
        bitmap[i] = np.uint8(0)
    for j in range(indices.size):
        remainders[j] = indices[j] & mask
        position = (indices[j] >> low_bits) + j
        bitmap[position >> 3] |= np.uint8(1 << (position & 7))
    if low_bits > 0:
        pack_sequence(remainders, low_bits, lows)


@kernel
def unpack_indices(lows, bitmap, low_bits, numel, indices):
    """Inverts `pack_indices`. Returns False if the bytes are not a valid list of ascending indices below `numel`."""
    if low_bits > 0:
        unpack_sequence(lows, low_bits, indices)
    else:
        for j in range(indices.size):
            indices[j] = 0
    found = 0
    for i in range(bitmap.size):
        byte = bitmap[i]
        for bit in range(8):
            if (byte >> bit) & 1:
                if found == indices.size:
                    return False
                indices[found] |= (8 * i + bit - found) << low_bits
                if indices[found] >= numel or (found > 0 and indices[found] <= indices[found - 1]):
                    return False
                found += 1
    return found == indices.size
