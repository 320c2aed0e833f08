"""A vector cut into pieces that go round: where they are, and what is on its way."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from laconic.comm import Pending
from laconic.comm.solo import Arrived

GRAIN = 2048  # entries; blocks of codes are as long, and where they begin vectors are loaded from memory best


def in_grains(length: int) -> int:
    """Rounded up, where that adds little."""
    return -(-length // GRAIN) * GRAIN if length >= 16 * GRAIN else length


def foreground_block(step: int, d: int, ratio: int) -> slice:
    """⌈d/ratio⌉ coordinates that follow one another, or the rest of them at the end; the same on all workers.

    Each coordinate has its turn once in any ⌈d/length⌉ ≤ ratio steps, and blocks that follow one another in time are
    far apart, so that none is only near where the background has just been.
    """
    length = -(-d // ratio)
    blocks = -(-d // length)
    stride = max(1, round(0.618 * blocks))
    while math.gcd(stride, blocks) > 1:
        stride += 1
    start = step * stride % blocks * length
    return slice(start, min(start + length, d))


@dataclass(frozen=True)
class Layout:
    """A vector (d) as `owners` rows, each `row` long but the last ones; a piece is a range of columns of all rows.

    So each owner has the same coordinates whatever the pieces are.
    """

    d: int
    owners: int

    @property
    def row(self) -> int:
        return min(in_grains(-(-self.d // self.owners)), self.d)

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
    sent: list[Tensor] = field(default_factory=list)  # this rank's share in the mean: a message for each part
    kept: dict[int, Tensor] = field(default_factory=dict)  # by a part's start: what its codes are to be read with
    messages: int = 0  # sent so far
    pending: Pending[Any] | None = None

    def share(self, part: slice) -> float:
        """That one of its parts has in it."""
        lengths = [int(one.stop - one.start) for one in (part, *self.parts)]
        return lengths[0] / sum(lengths[1:])

    def overlaps(self, other: Piece) -> bool:
        pairs = itertools.product(self.parts, other.parts)
        return any(max(one.start, two.start) < min(one.stop, two.stop) for one, two in pairs)

    def wait(self) -> Any:
        assert self.pending is not None
        return self.pending.wait()

    def state_dict(self) -> dict[str, Any]:
        """With what the message on its way will bring: waits for it, but leaves the piece as it is."""
        return {
            "parts": [[part.start, part.stop] for part in self.parts],
            "step": self.step,
            "due": self.due,
            "sent": self.sent,
            "kept": self.kept,
            "messages": self.messages,
            "received": self.wait(),
        }

    @classmethod
    def from_state_dict(cls, saved: dict[str, Any]) -> Piece:
        parts = [slice(start, stop) for start, stop in saved["parts"]]
        rest = {name: saved[name] for name in ("step", "due", "sent", "kept", "messages")}
        return cls(parts, **rest, pending=Arrived(saved["received"]))
