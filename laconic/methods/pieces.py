"""Vectors cut into pieces that go round: which coordinates are next, and how long ago they were sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from laconic.comm import Pending
from laconic.comm.solo import Arrived


@dataclass(frozen=True)
class Layout:
    """A vector (d) as `owners` rows, each `row` long but the last ones; a piece is a range of columns of all rows.

    So each owner has the same coordinates whatever the pieces are.
    """

    d: int
    owners: int

    @property
    def row(self) -> int:
        return -(-self.d // self.owners)

    def parts(self, start: int, stop: int) -> list[slice]:
        """Columns start to stop of each row, as slices of the vector; empty where a row has ended."""
        ends = [min((owner + 1) * self.row, self.d) for owner in range(self.owners)]
        return [
            slice(min(owner * self.row + start, end), min(owner * self.row + stop, end))
            for owner, end in enumerate(ends)
        ]


@dataclass
class Span:
    """Columns whose turn has come, of each owner's row, and how long ago it last had."""

    step: int
    parts: list[slice]  # coordinates, by owner
    ages: list[tuple[int, int]]  # columns one after the other: how many, and the steps since they were last sent

    def by_age(self, vector: Tensor) -> Iterator[tuple[Tensor, int]]:
        """A vector over one of the parts, cut where the age changes."""
        first = 0
        for columns, age in self.ages:
            yield vector[first : first + columns], age
            first += columns

    def numel(self, owner: int) -> int:
        part = self.parts[owner]
        return int(part.stop - part.start)


class Course:
    """The way of a vector's columns: which are next, and when they were last sent."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._last = [[layout.row, 0]]  # columns in the order of their turns: how many, and the step they were sent in
        self._column = 0

    def next(self, columns: int, step: int) -> Span:
        """The next columns, up to the end of the row."""
        stop = min(self._column + columns, self._layout.row)
        ages, left = [], stop - self._column
        self._last.append([left, step])
        while left:
            number, last = self._last.pop(0)
            taken = min(number, left)
            ages.append((taken, step - last))
            left -= taken
            if taken < number:
                self._last.insert(0, [number - taken, last])
        parts = self._layout.parts(self._column, stop)
        self._column = stop % self._layout.row
        return Span(step, parts, ages)

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last, "column": self._column}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._last, self._column = saved["last"], saved["column"]


@dataclass
class Piece:
    """Coordinates of some vectors, on their way to becoming their mean."""

    spans: list[Span]  # of each vector
    due: int  # the step in which the message on its way is waited for
    sent: list[Tensor] = field(default_factory=list)  # this rank's share in the mean: a message for each owner
    messages: int = 0  # sent so far
    pending: Pending[Any] | None = None

    def wait(self) -> Any:
        assert self.pending is not None
        return self.pending.wait()

    def state_dict(self) -> dict[str, Any]:
        """With what the message on its way will bring: waits for it, but leaves the piece as it is."""
        spans = [[span.step, [[part.start, part.stop] for part in span.parts], span.ages] for span in self.spans]
        own = {"due": self.due, "sent": self.sent, "messages": self.messages}
        return {**own, "spans": spans, "received": self.wait()}

    @classmethod
    def from_state_dict(cls, saved: dict[str, Any]) -> Piece:
        spans = [Span(step, [slice(*part) for part in parts], ages) for step, parts, ages in saved["spans"]]
        return cls(spans, saved["due"], saved["sent"], saved["messages"], Arrived(saved["received"]))
