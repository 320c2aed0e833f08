"""Computes means bit for bit as real processes do: a sum's rounding depends on the order of its terms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_NBYTES = 1 << 25  # of all workers' entries that are summed at a time
GLOO_SEGMENT_NBYTES = 1 << 20  # the longest message of gloo's ring


def direct_mean(vectors: Sequence[Tensor]) -> Tensor:
    """Returns the mean of contiguous vectors as direct messages compute it: each rank averages a share of the entries.

    >>> direct_mean([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])])
    tensor([2., 2., 2.])
    """
    n, mean = len(vectors), torch.empty_like(vectors[0])
    shares = [share.numel() for share in torch.tensor_split(mean, n)]
    shares_at_a_time = max(1, BLOCK_NBYTES // (n * mean.element_size() * max(1, shares[0])))
    start = 0
    for first in range(0, n, shares_at_a_time):
        group = shares[first : first + shares_at_a_time]
        rows = torch.stack([vector[start : start + sum(group)] for vector in vectors])
        means = [share.contiguous().mean(0) for share in torch.split(rows, group, dim=1)]
        # torch adds columns in an order that depends on how many there are, so a share must be averaged by itself.
        torch.cat(means, out=mean[start : start + sum(group)])
        start += sum(group)
    return mean


def ring_mean(vectors: Sequence[Tensor]) -> Tensor:
    """Returns the mean of contiguous vectors as gloo's ring all-reduce computes it.

    gloo cuts a vector into one chunk for each rank. The sum of chunk c starts at rank c − 1, goes down the ring, and
    ends at rank c.

    >>> ring_mean([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])])
    tensor([2., 2., 2.])
    """
    n, numel, size = len(vectors), vectors[0].numel(), vectors[0].element_size()
    chunk = _ring_chunk(numel, size, n)
    mean = vectors[0].new_empty(n, chunk)
    width = max(1, BLOCK_NBYTES // (n * n * size))
    for start in range(0, chunk, width):
        stop = min(chunk, start + width)
        mean[:, start:stop] = _sum_diagonals(torch.stack([_chunks(v, n, chunk, start, stop) for v in vectors]))
    return mean.view(-1)[:numel].div_(n)


def _ring_chunk(numel: int, size: int, n: int) -> int:
    """Returns how many entries gloo puts in a chunk: whole segments, at least 2 for each rank."""
    nbytes = numel * size
    segments_per_rank = _ceil(max(_ceil(nbytes, GLOO_SEGMENT_NBYTES), 2 * n), n)
    return max(1, segments_per_rank * _ceil(_ceil(nbytes, segments_per_rank * n), size))


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _chunks(vector: Tensor, n: int, chunk: int, start: int, stop: int) -> Tensor:
    """Returns the entries `start` to `stop` of each chunk (n, stop − start); the last chunks may be short or empty."""
    whole, rest = divmod(vector.numel(), chunk)
    if whole == n:
        return vector.view(n, chunk)[:, start:stop]
    chunks = vector.new_zeros(n, stop - start)
    chunks[:whole] = vector[: whole * chunk].view(whole, chunk)[:, start:stop]
    if rest > start:
        chunks[whole, : rest - start] = vector[whole * chunk + start : whole * chunk + min(rest, stop)]
    return chunks


def _sum_diagonals(chunks: Tensor) -> Tensor:
    """Sums (rank, chunk, entries) over the ranks, for chunk c in the order c − 1, c − 2, …, c + 1, c modulo n."""
    n, _, width = chunks.shape
    total = chunks.new_empty(n, width)
    for shift in range(1, n + 1):  # chunk c of rank c − shift, for all c at once: a diagonal of the matrix
        for rows, offset in ((slice(shift, n), shift), (slice(0, shift), (n - shift) * n)):
            out = total[rows]
            terms = chunks.as_strided(out.shape, ((n + 1) * width, 1), offset * width)
            if shift == 1:
                out.copy_(terms)
            else:
                out.add_(terms)
    return total
