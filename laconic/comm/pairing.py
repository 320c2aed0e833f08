"""Pairs up free neighbours for gossip, without a master, so that every edge of the graph is used.

All workers share a *board*: one value in the job's store, which is only ever replaced as a whole, by compare-and-set.
`Board` is a pure state machine: no clock, no input or output. It lists the workers that are free and those in an
exchange. Each change pairs up all free neighbours that may be paired, the least recently used edge first:

- Two workers that both seek an exchange may be paired, and one in urgent need with any free neighbour. A worker that
  could be paired takes the neighbour that has waited longest for its turn, even if that one only answers.
- A free worker that seeks an exchange *refuses* a neighbour while it waits for another one that it has met less
  recently: one in an exchange that began before this worker became free. Without this rule, two workers that end an
  exchange would be free at the same moment, and take each other again and again: on a slow link the graph would fall
  into fixed pairs.
- A worker refuses nobody once it is no longer patient. Its caller measures the time, so that a slow or silent
  neighbour delays others only for a while.

It follows that:

- There is no deadlock: a worker refuses others only while a neighbour is in an exchange.
- Of all edges, the least recently used one is refused by neither end. Each end makes at most the exchange it is in, and
  waits at most for the other end's, before the two are paired. So every edge is used in a bounded number of exchanges,
  as long as workers are patient, and nobody starves.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol

from laconic.comm.comm import PeerError
from laconic.topology import Topology


class Dropped(PeerError):
    """The others continue without this worker."""


class Need(IntEnum):
    """How much a free worker wants an exchange. Two may be paired if their needs add up to URGENT."""

    ANSWER = 0  # it does not, but takes part if a neighbour needs one urgently
    SEEK = 1  # with a neighbour that seeks too
    URGENT = 2  # with any free neighbour


@dataclass
class Demand:
    """How much one worker wants exchanges, and for how long it refuses neighbours: as long as its last exchange took.

    Args:
        sought: how many exchanges are to be made in total; until then, it seeks neighbours that seek too.
        urgently: the same; until then, it also accepts neighbours that only answer.
    """

    sought: int = 0
    urgently: int = 0
    exchange_seconds: float = 0.0  # duration of the last exchange
    patient_until: float = math.inf  # since when it wants an exchange, plus that duration; infinite if it wants none

    def need(self, exchanges: int) -> Need:
        """Returns how much it wants another exchange after so many."""
        if exchanges < self.urgently:
            return Need.URGENT
        return Need.SEEK if exchanges < self.sought else Need.ANSWER

    def is_patient(self, need: Need, now: float) -> bool:
        """Returns whether this worker may refuse neighbours."""
        if need == Need.ANSWER:
            self.patient_until = math.inf
        elif self.patient_until == math.inf:
            self.patient_until = now + self.exchange_seconds
        return now < self.patient_until

    def end_exchange(self, seconds: float) -> None:
        """Notes how long an exchange took."""
        self.exchange_seconds, self.patient_until = seconds, math.inf


class KeyValueStore(Protocol):
    """The part of torch's Store that is used here. `compare_set` returns the value that is there afterwards."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...


@dataclass(frozen=True)
class Free:
    """A free worker."""

    need: int
    patient: bool  # whether it refuses neighbours while it waits for others
    since: int  # `Board.changes` when it became free
    wakeup: int  # number of its wake-up key


@dataclass(frozen=True)
class Busy:
    """A worker in an exchange, from the moment it is paired until it is back at the board."""

    partner: int
    since: int  # `Board.changes` when it was paired
    noticed: bool  # whether it knows of the exchange


@dataclass
class Board:
    """The state of all workers. Each rank is in at most one of the three dictionaries."""

    topology: Topology
    changes: int = 0
    free: dict[int, Free] = field(default_factory=dict)
    busy: dict[int, Busy] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)  # workers that were dropped, and why
    used: dict[tuple[int, int], int] = field(default_factory=dict)  # by edge: `changes` at its last exchange

    @classmethod
    def parse(cls, text: str, topology: Topology) -> Board:
        """Reads what `str` has written."""
        changes, free, busy, dropped, used = json.loads(text)
        return cls(
            topology,
            changes,
            {int(rank): Free(need, bool(patient), *rest) for rank, (need, patient, *rest) in free.items()},
            {int(rank): Busy(partner, since, bool(noticed)) for rank, (partner, since, noticed) in busy.items()},
            {int(rank): why for rank, why in dropped.items()},
            {edge: change for edge, change in zip(topology.edges, used, strict=True) if change},
        )

    def __str__(self) -> str:
        free = {rank: (f.need, int(f.patient), f.since, f.wakeup) for rank, f in self.free.items()}
        busy = {rank: (b.partner, b.since, int(b.noticed)) for rank, b in self.busy.items()}
        used = [self.used.get(edge, 0) for edge in self.topology.edges]
        return json.dumps([self.changes, free, busy, self.dropped, used], separators=(",", ":"))

    def join(self, rank: int, need: Need, patient: bool, wakeup: int) -> tuple[int | None, dict[int, Free]]:
        """Lists `rank`, which is in no exchange, as free, or updates its entry, and pairs up neighbours.

        Returns:
            The partner of `rank`, if it has one; and the other workers that were paired, which must be woken up.
        """
        if rank in self.busy:
            if not self.busy[rank].noticed:
                self.busy[rank] = replace(self.busy[rank], noticed=True)
                return self.busy[rank].partner, {}
            del self.busy[rank]  # its exchange is over
        self.changes += 1
        since = self.free[rank].since if rank in self.free else self.changes
        self.free[rank] = Free(need, patient, since, wakeup)
        paired = self._pair_up(rank)
        if rank not in paired:
            return None, paired
        del paired[rank]
        self.busy[rank] = replace(self.busy[rank], noticed=True)
        return self.busy[rank].partner, paired

    def leave(self, rank: int) -> tuple[int | None, dict[int, Free]]:
        """Takes `rank`, which is in no exchange, off the board, unless it was paired: that exchange must be made.

        Returns:
            As `join`.
        """
        if rank in self.busy and not self.busy[rank].noticed:
            self.busy[rank] = replace(self.busy[rank], noticed=True)
            return self.busy[rank].partner, {}
        self.free.pop(rank, None)
        self.busy.pop(rank, None)
        return None, self._pair_up(rank)  # others may have waited for this one

    def drop(self, rank: int, why: str) -> dict[int, Free]:
        """Drops `rank`, and all workers that are then disconnected from the largest part of the graph.

        Returns:
            The workers that were paired, which must be woken up.
        """
        if rank in self.dropped:
            return {}
        self.dropped[rank] = why
        left = [node for node in self.topology.nodes if node not in self.dropped]
        largest, *others = self.topology.components(left) or [()]
        for part in others:
            for node in part:
                self.dropped[node] = (
                    f"without rank {rank} ({why}) the graph is disconnected, and the workers {list(part)} "
                    f"have no path to {list(largest)}, which go on"
                )
        for node in self.dropped:
            self.free.pop(node, None)
            self.busy.pop(node, None)
        # A worker that was paired with a dropped one, and does not know it, returns to the board after its wake-up.
        lost = [node for node, busy in self.busy.items() if busy.partner in self.dropped and not busy.noticed]
        for node in lost:
            del self.busy[node]
        return self._pair_up()

    def _pair_up(self, changed: int | None = None) -> dict[int, Free]:
        """Pairs up all free neighbours that may be paired. Returns their former entries.

        Args:
            changed: the only worker whose entry has changed since all were paired up; None if there may be others. It
                makes a difference to its neighbours, which may have refused others because of it, and to theirs.
        """
        paired: dict[int, Free] = {}
        nodes = self.topology.nodes if changed is None else self._around(changed)
        while edges := self._possible_edges([node for node in nodes if node in self.free]):
            edge = min(edges, key=lambda e: (self.used.get(e, 0), sum(self.free[node].since for node in e), e))
            self.changes += 1
            self.used[edge] = self.changes
            for node, partner in (edge, edge[::-1]):
                paired[node] = self.free.pop(node)
                self.busy[node] = Busy(partner, self.changes, noticed=False)
        return paired

    def _around(self, rank: int) -> list[int]:
        """Returns the workers whose edges may become possible by a change of `rank`: up to three edges away."""
        found, frontier = {rank}, {rank}
        for _ in range(3):
            frontier = {k for node in frontier for k in self.topology.neighbours(node)} - found
            found |= frontier
        return sorted(found)

    def _possible_edges(self, nodes: list[int]) -> list[tuple[int, int]]:
        """Returns the edges along which free neighbours may be paired, of those that have an end in `nodes`."""
        seeking = [node for node in nodes if self.free[node].need >= Need.SEEK]  # two that only answer are not paired
        edges = {(min(i, j), max(i, j)) for i in seeking for j in self.topology.neighbours(i) if j in self.free}
        willing = [(i, j) for i, j in edges if not self._refuses(i, j) and not self._refuses(j, i)]
        needs = {(i, j): self.free[i].need + self.free[j].need for i, j in willing}
        could_be_paired = {node for edge in willing if needs[edge] >= Need.URGENT for node in edge}
        return [
            edge
            for edge in willing
            if needs[edge] >= Need.URGENT
            or any(node in could_be_paired and self.free[node].need >= Need.SEEK for node in edge)
        ]

    def _refuses(self, rank: int, other: int) -> bool:
        """Returns whether `rank`, which is free, waits for another neighbour whose turn is before that of `other`."""
        mine = self.free[rank]
        return (
            mine.need >= Need.SEEK
            and mine.patient
            and any(
                k in self.busy and self.busy[k].since < mine.since and self._used(rank, k) < self._used(rank, other)
                for k in self.topology.neighbours(rank)
            )
        )

    def _used(self, i: int, j: int) -> int:
        return self.used.get((min(i, j), max(i, j)), 0)


class Pairing:
    """One worker's access to the board. For one thread, since a store's client serves one caller at a time."""

    KEY = "gossip/board"

    def __init__(self, store: KeyValueStore, topology: Topology, rank: int) -> None:
        self.topology, self.rank = topology, rank
        self._store = store
        self._text = store.compare_set(self.KEY, "", str(Board(topology))).decode()

    def join(self, need: Need, patient: bool, wakeup: int) -> int | None:
        """Returns the rank of a partner. If there is none yet, lists this worker as free and returns None.

        A worker that pairs this one later sets the key `wakeup_key(rank, wakeup)`; then call this again.

        Args:
            need: how much this worker wants an exchange.
            patient: whether it may wait for a neighbour whose turn it is, while others are free.
            wakeup: number of this worker's next wake-up key.
        """
        while True:
            board = self._board()
            partner, paired = board.join(self.rank, need, patient, wakeup)
            if self._replace(board):
                self._wake_up(paired)
                return partner

    def leave(self) -> int | None:
        """Takes this worker off the board. Returns its partner if it has been paired: that exchange must be made."""
        while True:
            board = self._board()
            partner, paired = board.leave(self.rank)
            if self._replace(board):
                self._wake_up(paired)
                return partner

    def drop(self, rank: int, why: str) -> None:
        """Drops a worker.

        Raises:
            Dropped: this worker was dropped itself. Then it may drop no other, since it was away, not they.
        """
        while True:
            board = self._board() if rank != self.rank else Board.parse(self._text, self.topology)
            paired = board.drop(rank, why)
            if self._replace(board):
                self._wake_up(paired)
                return

    def read(self) -> dict[int, str]:
        """Reads the board. Returns the workers that were dropped, and why."""
        # A compare-and-set that cannot succeed is a read: no board has the text "read".
        self._text = self._store.compare_set(self.KEY, "read", "read").decode()
        return self.dropped

    @property
    def dropped(self) -> dict[int, str]:
        """The workers that were dropped, and why, as of the last access to the board."""
        return Board.parse(self._text, self.topology).dropped

    def _board(self) -> Board:
        board = Board.parse(self._text, self.topology)
        if self.rank in board.dropped:
            raise Dropped(f"rank {self.rank} was dropped, the others go on without it: {board.dropped[self.rank]}")
        return board

    def _replace(self, board: Board) -> bool:
        """Replaces the board in the store, unless another worker has. Keeps what the store holds afterwards."""
        desired = str(board)
        found = self._store.compare_set(self.KEY, self._text, desired).decode()
        replaced, self._text = found == desired, found
        return replaced

    def _wake_up(self, paired: dict[int, Free]) -> None:
        for rank, entry in paired.items():
            self._store.set(wakeup_key(rank, entry.wakeup), "")


def wakeup_key(rank: int, number: int) -> str:
    return f"gossip/wakeup/{rank}/{number}"
