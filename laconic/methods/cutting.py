"""The parameters cut for a server that works in chunks: chunks for the wire, pieces of whole blocks for the servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """What one server handles of one chunk. It is coded by itself: its code does not depend on who serves it."""

    start: int  # in the packed order
    stop: int
    server: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Run:
    """Neighbours in the packed order that are neighbours in x too."""

    packed: int
    x: int
    numel: int


def pack(numels: Sequence[int], exact_below: int) -> tuple[list[Run], int]:
    """The packed order: parameters of at least `exact_below` entries, then the small ones. Where these begin, too."""
    offsets = [0, *accumulate(numels)][:-1]
    parameters = list(zip(offsets, numels, strict=True))
    large = [(x, n) for x, n in parameters if n >= exact_below]
    small = [(x, n) for x, n in parameters if n < exact_below]
    runs: list[Run] = []
    packed = 0
    for x, n in large + small:
        last = runs[-1] if runs else None
        if last is not None and last.x + last.numel == x:
            runs[-1] = Run(last.packed, last.x, last.numel + n)
        else:
            runs.append(Run(packed, x, n))
        packed += n
    return runs, sum(n for _, n in large)


def cut(start: int, stop: int, unit: int, chunk: int, servers: Sequence[int]) -> list[list[Piece]]:
    """Chunks of about `chunk` entries, each with a piece for every server: whole units, alike to within one unit."""
    numel = stop - start
    if numel == 0:
        return []
    chunks = -(-numel // chunk)
    units = -(-numel // unit)
    pieces = chunks * len(servers)
    bounds = [start + min(numel, unit * (i * units // pieces)) for i in range(pieces + 1)]
    cuts = [Piece(bounds[i], bounds[i + 1], servers[i % len(servers)]) for i in range(pieces)]
    grouped = [cuts[i : i + len(servers)] for i in range(0, pieces, len(servers))]
    return [whole for group in grouped if (whole := [piece for piece in group if piece.numel])]


def views(runs: Sequence[Run], x: Tensor, pieces: Sequence[Piece]) -> list[tuple[Tensor, slice]]:
    """The parts of x that make up these neighbouring pieces, and their places in the packed order."""
    found = []
    for run in runs:
        start, stop = max(pieces[0].start, run.packed), min(pieces[-1].stop, run.packed + run.numel)
        if start < stop:
            shift = run.x - run.packed
            found.append((x[start + shift : stop + shift], slice(start, stop)))
    return found
