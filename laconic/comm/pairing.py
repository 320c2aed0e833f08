"""Who exchanges with whom: workers that are free pair up on a board in the job's store.

The board is one value that is only ever changed as a whole, by compare-and-set; there is no master. A worker that comes
to it takes a free neighbour, or writes itself down as free and is called later. Two that seek an exchange suit each
other at once; one that only answers suits one whose need is urgent. So:

- of two free neighbours never both seek, and an urgent one has no free neighbour at all: it is unserved only while all
  its neighbours are in an exchange, and who is in an exchange waits for nobody but its partner. No cycle of waiting,
  and a slow worker delays only its partner;
- a neighbour that becomes free takes the urgent one that has waited longest: nobody starves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from laconic.comm.comm import PeerError
from laconic.topology import Topology


class Dropped(PeerError):
    """The others go on without this worker."""


class Need(IntEnum):
    """What a worker wants of the board."""

    ANSWER = 0  # nothing, but it answers
    SEEK = 1  # an exchange with a neighbour that seeks too
    URGENT = 2  # an exchange with whichever neighbour is free


class KeyValueStore(Protocol):
    """What of torch's Store is used here. `compare_set` returns the value that is there afterwards."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...


@dataclass(frozen=True)
class Free:
    """A free worker: its need, exchanges made beyond its own rate, the ticket it got when its need became so, and the
    number of the bell that wakes it."""

    need: int
    surplus: int
    since: int
    bell: int


@dataclass
class Board:
    tickets: int = 0
    free: dict[int, Free] = field(default_factory=dict)
    called: dict[int, int] = field(default_factory=dict)  # who was taken while free, and by whom, until it knows
    gone: dict[int, str] = field(default_factory=dict)  # who was dropped, and why

    @classmethod
    def parse(cls, text: str) -> Board:
        tickets, free, called, gone = json.loads(text)
        return cls(
            tickets,
            {int(rank): Free(*entry) for rank, entry in free.items()},
            {int(rank): caller for rank, caller in called.items()},
            {int(rank): why for rank, why in gone.items()},
        )

    def __str__(self) -> str:
        free = {rank: (entry.need, entry.surplus, entry.since, entry.bell) for rank, entry in self.free.items()}
        return json.dumps([self.tickets, free, self.called, self.gone])

    def come(
        self, rank: int, neighbours: tuple[int, ...], need: Need, surplus: int, bell: int
    ) -> tuple[int | None, Free | None]:
        """`rank` is in no exchange. The partner it has now, and the partner's entry if it was free until now."""
        if rank in self.called:
            return self.called.pop(rank), None
        before = self.free.pop(rank, None)
        suits = {r: self.free[r] for r in neighbours if r in self.free and need + self.free[r].need >= Need.URGENT}
        if suits:
            # The neediest, of them who has the smallest surplus, of them who has waited longest.
            partner = min(suits, key=lambda r: (-suits[r].need, suits[r].surplus, suits[r].since))
            self.called[partner] = rank
            return partner, self.free.pop(partner)
        if before is not None and before.need == need:
            since = before.since
        else:
            self.tickets += 1
            since = self.tickets
        self.free[rank] = Free(need, surplus, since, bell)
        return None, None

    def withdraw(self, rank: int) -> int | None:
        """`rank` wants no exchange for now. If it has been called already: by whom; it must answer first."""
        self.free.pop(rank, None)
        return self.called.pop(rank, None)

    def drop(self, rank: int, why: str, topology: Topology) -> None:
        """Go on without `rank`, and without those that have no way to the largest part of the graph left."""
        if rank in self.gone:
            return
        self.gone[rank] = why
        left = [node for node in topology.nodes if node not in self.gone]
        largest, *others = topology.components(left) or [()]
        for part in others:
            for node in part:
                self.gone[node] = (
                    f"without rank {rank} ({why}) the graph falls apart, and the workers {list(part)} "
                    f"have no way to {list(largest)}, which go on"
                )
        for node in self.gone:
            self.free.pop(node, None)
            self.called.pop(node, None)
        self.called = {node: caller for node, caller in self.called.items() if caller not in self.gone}


class Pairing:
    """One worker's hand on the board. For one thread: a store's client serves one caller at a time."""

    KEY = "gossip/board"

    def __init__(self, store: KeyValueStore, topology: Topology, rank: int) -> None:
        self.topology, self.rank = topology, rank
        self._store = store
        self._neighbours = topology.neighbours(rank)
        self._text = str(Board())
        self._text = store.compare_set(self.KEY, "", self._text).decode()

    def come(self, need: Need, surplus: int, bell: int) -> int | None:
        """Look for a partner: its rank, or None. Then this worker is free, and its bell rings when it is called."""
        while True:
            board = self._board()
            partner, taken = board.come(self.rank, self._neighbours, need, surplus, bell)
            if self._replace(board):
                break
        if partner is not None and taken is not None:
            self._store.set(bell_key(partner, taken.bell), "")
        return partner

    def withdraw(self) -> int | None:
        while True:
            board = self._board()
            caller = board.withdraw(self.rank)
            if self._replace(board):
                return caller

    def drop(self, rank: int, why: str) -> None:
        """Who was dropped itself may drop nobody else: it has been away, not they."""
        while True:
            board = self._board() if rank != self.rank else Board.parse(self._text)
            board.drop(rank, why, self.topology)
            if self._replace(board):
                return

    def look(self) -> dict[int, str]:
        """Who is gone by now, and why."""
        # A compare-and-set that cannot succeed is a read: no board is the word "look".
        self._text = self._store.compare_set(self.KEY, "look", "look").decode()
        return Board.parse(self._text).gone

    def _board(self) -> Board:
        board = Board.parse(self._text)
        if self.rank in board.gone:
            raise Dropped(f"rank {self.rank} was dropped, the others go on without it: {board.gone[self.rank]}")
        return board

    def _replace(self, board: Board) -> bool:
        """Put the new board up, unless another one is there by now: then look at that."""
        desired = str(board)
        found = self._store.compare_set(self.KEY, self._text, desired).decode()
        # An unchanged board counts as put up: it is what the store holds.
        replaced, self._text = found == desired, found
        return replaced

    @property
    def gone(self) -> dict[int, str]:
        """As of the last look at the board."""
        return Board.parse(self._text).gone


def bell_key(rank: int, bell: int) -> str:
    return f"gossip/bell/{rank}/{bell}"
