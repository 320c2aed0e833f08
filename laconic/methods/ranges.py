"""A number for every coordinate of a vector, where neighbours mostly have the same."""

from __future__ import annotations

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
        for stop, number in self.entries:
            if start < min(stop, wanted.stop):
                yield slice(start, min(stop, wanted.stop)), number
                start = stop

    def raise_to(self, wanted: slice, least: int) -> None:
        """Give those of these coordinates that have a smaller number this one."""
        entries: list[list[int]] = []
        start = 0
        for stop, number in self.entries:
            raised = max(number, least)
            for end, own in ((min(stop, wanted.start), number), (min(stop, wanted.stop), raised), (stop, number)):
                if end > start:
                    if entries and entries[-1][1] == own:
                        entries[-1][0] = end
                    else:
                        entries.append([end, own])
                    start = end
        self.entries = entries
