"""Orders a model's entries for `EfficientAdam`: quantized parameters first, then exact ones, cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from laconic.comm.coded_mean import CodedMean, Part, split


@dataclass(frozen=True)
class Chunk:
    """Entries that are averaged by one message to the server and one back."""

    mean: CodedMean
    u: Tensor  # buffer for the local step, then for the mean; shared by all chunks
    views: list[tuple[Tensor, Tensor, Tensor]]  # the same entries in x, in x before the step, and in u


def segments(numels: Sequence[int], exact_below: int) -> tuple[list[slice], list[slice]]:
    """Returns the runs of neighbouring parameters in x with at least `exact_below` entries, and those with fewer.

    >>> segments([100, 5, 200, 300, 7], exact_below=10)
    ([slice(0, 100, None), slice(105, 605, None)], [slice(100, 105, None), slice(605, 612, None)])
    """
    large: list[slice] = []
    small: list[slice] = []
    start = 0
    for numel in numels:
        runs = small if numel < exact_below else large
        first = runs.pop().start if runs and runs[-1].stop == start else start
        start += numel
        runs.append(slice(first, start))
    return large, small


def places(packed: Sequence[slice], start: int, stop: int) -> Iterator[tuple[slice, slice]]:
    """Yields where the entries `start` to `stop` of the packed order are: a slice of x, and one of the packed order."""
    end = 0
    for segment in packed:
        begin, end = end, end + segment.stop - segment.start
        first, last = max(start, begin), min(stop, end)
        if first < last:
            shift = segment.start - begin
            yield slice(first + shift, last + shift), slice(first, last)


def cut(start: int, stop: int, owners: Sequence[int], chunk: int, unit: int) -> list[list[Part]]:
    """Cuts the entries `start` to `stop` into chunks of about `chunk` entries, each with one part per owner."""
    count = -(-(stop - start) // chunk)
    n = len(owners)
    parts = split(start, stop, list(owners) * count, unit) if count else []
    chunks = [parts[i * n : (i + 1) * n] for i in range(count)]
    return [parts for parts in chunks if parts[-1].stop > parts[0].start]
