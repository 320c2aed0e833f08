"""A number for every coordinate of a vector, where neighbours mostly have the same."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator


def seen_from(part: slice, other: slice) -> slice:
    """A range of a vector, as a range of another part of it that holds it."""
    return slice(part.start - other.start, part.stop - other.start)


class Ranges:
    """`entries`: [where it ends, its number], for ranges that follow one another from 0 on."""

    def __init__(self, entries: Iterable[list[int]]) -> None:
        self.entries = list(entries)

    def within(self, wanted: slice) -> Iterator[tuple[slice, int]]:
        """These coordinates, cut where the number changes."""
        start = wanted.start
        for stop, number in self.entries[self._first_behind(start) :]:
            if start >= wanted.stop:
                return
            end = min(stop, wanted.stop)
            yield slice(start, end), number
            start = end

    def raise_to(self, wanted: slice, least: int) -> None:
        """Give those of these coordinates that have a smaller number this one."""
        if wanted.start >= wanted.stop:
            return
        first, last = self._first_behind(wanted.start), self._first_behind(wanted.stop - 1)
        before, after = self.entries[first][1], self.entries[last]
        raised = [[part.stop, max(number, least)] for part, number in self.within(wanted)]
        changed = [[wanted.start, before], *raised, list(after)]
        begin, end = max(first - 1, 0), last + 2  # with their neighbours, which may have the same number now
        joined: list[list[int]] = []
        start = self.entries[begin - 1][0] if begin else 0
        for stop, number in (*self.entries[begin:first], *changed, *self.entries[last + 1 : end]):
            if stop > start:
                if joined and joined[-1][1] == number:
                    joined[-1][0] = stop
                else:
                    joined.append([stop, number])
                start = stop
        self.entries[begin:end] = joined

    def _first_behind(self, place: int) -> int:
        """The number of the first range that ends behind it."""
        return bisect.bisect_right(self.entries, place, key=_end)


def _end(entry: list[int]) -> int:
    return entry[0]
