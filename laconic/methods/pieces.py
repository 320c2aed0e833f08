"""A vector cut into pieces that go round: where they are, and since when they have not been sent."""

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
class Piece:
    """The same coordinates of some vectors, on their way to becoming their mean."""

    parts: list[slice]  # the coordinates, by owner
    step: int  # in which it was sent
    due: int  # the step in which the message on its way is waited for
    ages: list[tuple[int, int]]  # columns one after the other: how many, and the steps since they were last sent
    sent: list[Tensor] = field(default_factory=list)  # this rank's share in the mean: a message for each part
    messages: int = 0  # sent so far
    pending: Pending[Any] | None = None

    def by_age(self, vector: Tensor) -> Iterator[tuple[Tensor, int]]:
        """A vector over one of the parts, cut where the age changes."""
        first = 0
        for columns, age in self.ages:
            yield vector[first : first + columns], age
            first += columns

    def wait(self) -> Any:
        assert self.pending is not None
        return self.pending.wait()

    def state_dict(self) -> dict[str, Any]:
        """With what the message on its way will bring: waits for it, but leaves the piece as it is."""
        return {
            "parts": [[part.start, part.stop] for part in self.parts],
            "step": self.step,
            "due": self.due,
            "ages": self.ages,
            "sent": self.sent,
            "messages": self.messages,
            "received": self.wait(),
        }

    @classmethod
    def from_state_dict(cls, saved: dict[str, Any]) -> Piece:
        parts = [slice(start, stop) for start, stop in saved["parts"]]
        rest = {name: saved[name] for name in ("step", "due", "ages", "sent", "messages")}
        return cls(parts, **rest, pending=Arrived(saved["received"]))


class Turns:
    """When columns were last sent, in the order in which their turn comes."""

    def __init__(self, columns: int) -> None:
        self.last = [[columns, 0]]  # how many, and the step

    def next(self, columns: int, step: int) -> list[tuple[int, int]]:
        """The ages of the next columns, which are sent in this step."""
        ages, left = [], columns
        while left:
            number, last = self.last.pop(0)
            taken = min(number, left)
            ages.append((taken, step - last))
            left -= taken
            if taken < number:
                self.last.insert(0, [number - taken, last])
        self.last.append([columns, step])
        return ages
