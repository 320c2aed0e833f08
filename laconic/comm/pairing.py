"""Pairs up free neighbours for gossip, without a master.

The free workers are listed on a *board*: one value in the job's store, which is only ever replaced as a whole, by
compare-and-set. A worker that wants an exchange takes a free neighbour off the board, and wakes it up. If there is
none, it lists itself and is woken up later. Two workers that both seek an exchange may be paired at once. A worker that
only answers is paired only with one whose need is urgent. It follows that:

- Two free neighbours never both seek, and a free worker in urgent need has no free neighbour at all. It waits only
  while all its neighbours are in an exchange, and a worker in an exchange waits only for its partner. So waits form no
  cycle, and a slow worker delays only its partner.
- A neighbour that becomes free takes the urgent one that has waited longest. So nobody starves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
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


class KeyValueStore(Protocol):
    """The part of torch's Store that is used here. `compare_set` returns the value that is there afterwards."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...


@dataclass(frozen=True)
class Free:
    """A free worker on the board."""

    need: int
    surplus: int  # exchanges made beyond those that it sought
    since: int  # `Board.listings` when it was listed with this need: the smallest has waited longest
    wakeup: int  # number of its wake-up key


@dataclass
class Board:
    """The content of the board. Each rank is in at most one of the three dictionaries."""

    listings: int = 0  # how often a worker was listed, with a new need
    free: dict[int, Free] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)  # workers taken off the board, and by whom, until they notice
    dropped: dict[int, str] = field(default_factory=dict)  # workers that were dropped, and why

    @classmethod
    def parse(cls, text: str) -> Board:
        """Reads what `str` has written."""
        listings, free, taken, dropped = json.loads(text)
        return cls(
            listings,
            {int(rank): Free(*entry) for rank, entry in free.items()},
            {int(rank): partner for rank, partner in taken.items()},
            {int(rank): why for rank, why in dropped.items()},
        )

    def __str__(self) -> str:
        free = {rank: (entry.need, entry.surplus, entry.since, entry.wakeup) for rank, entry in self.free.items()}
        return json.dumps([self.listings, free, self.taken, self.dropped])

    def pair(
        self, rank: int, neighbours: tuple[int, ...], need: Need, surplus: int, wakeup: int
    ) -> tuple[int | None, Free | None]:
        """Pairs `rank`, which is in no exchange, with a neighbour, or lists it as free.

        Returns:
            The partner, and its entry if it must be woken up; (None, None) if there is no partner yet.
        """
        if rank in self.taken:
            return self.taken.pop(rank), None
        before = self.free.pop(rank, None)
        fitting = {r: self.free[r] for r in neighbours if r in self.free and need + self.free[r].need >= Need.URGENT}
        if fitting:
            # First the greatest need, then the smallest surplus, then the longest wait.
            partner = min(fitting, key=lambda r: (-fitting[r].need, fitting[r].surplus, fitting[r].since))
            self.taken[partner] = rank
            return partner, self.free.pop(partner)
        if before is not None and before.need == need:
            since = before.since
        else:
            self.listings += 1
            since = self.listings
        self.free[rank] = Free(need, surplus, since, wakeup)
        return None, None

    def withdraw(self, rank: int) -> int | None:
        """Takes `rank` off the board. Returns its partner if it has been taken already: that exchange must be made."""
        self.free.pop(rank, None)
        return self.taken.pop(rank, None)

    def drop(self, rank: int, why: str, topology: Topology) -> None:
        """Drops `rank`, and all workers that are then disconnected from the largest part of the graph."""
        if rank in self.dropped:
            return
        self.dropped[rank] = why
        left = [node for node in topology.nodes if node not in self.dropped]
        largest, *others = topology.components(left) or [()]
        for part in others:
            for node in part:
                self.dropped[node] = (
                    f"without rank {rank} ({why}) the graph is disconnected, and the workers {list(part)} "
                    f"have no path to {list(largest)}, which go on"
                )
        for node in self.dropped:
            self.free.pop(node, None)
            self.taken.pop(node, None)
        self.taken = {node: partner for node, partner in self.taken.items() if partner not in self.dropped}


class Pairing:
    """One worker's access to the board. For one thread, since a store's client serves one caller at a time."""

    KEY = "gossip/board"

    def __init__(self, store: KeyValueStore, topology: Topology, rank: int) -> None:
        self.topology, self.rank = topology, rank
        self._store = store
        self._neighbours = topology.neighbours(rank)
        self._text = store.compare_set(self.KEY, "", str(Board())).decode()

    def pair(self, need: Need, surplus: int, wakeup: int) -> int | None:
        """Returns the rank of a partner. If there is none yet, lists this worker as free and returns None.

        A partner that takes this worker later sets the key `wakeup_key(rank, wakeup)`; then call this again.
        """
        while True:
            board = self._board()
            partner, taken = board.pair(self.rank, self._neighbours, need, surplus, wakeup)
            if self._replace(board):
                break
        if partner is not None and taken is not None:
            self._store.set(wakeup_key(partner, taken.wakeup), "")
        return partner

    def withdraw(self) -> int | None:
        """Takes this worker off the board. Returns its partner if it has been taken: that exchange must be made."""
        while True:
            board = self._board()
            partner = board.withdraw(self.rank)
            if self._replace(board):
                return partner

    def drop(self, rank: int, why: str) -> None:
        """Drops a worker.

        Raises:
            Dropped: this worker was dropped itself. Then it may drop no other, since it was away, not they.
        """
        while True:
            board = self._board() if rank != self.rank else Board.parse(self._text)
            board.drop(rank, why, self.topology)
            if self._replace(board):
                return

    def read(self) -> dict[int, str]:
        """Reads the board. Returns the workers that were dropped, and why."""
        # A compare-and-set that cannot succeed is a read: no board has the text "read".
        self._text = self._store.compare_set(self.KEY, "read", "read").decode()
        return self.dropped

    @property
    def dropped(self) -> dict[int, str]:
        """The workers that were dropped, and why, as of the last access to the board."""
        return Board.parse(self._text).dropped

    def _board(self) -> Board:
        board = Board.parse(self._text)
        if self.rank in board.dropped:
            raise Dropped(f"rank {self.rank} was dropped, the others go on without it: {board.dropped[self.rank]}")
        return board

    def _replace(self, board: Board) -> bool:
        """Replaces the board in the store, unless another worker has. Keeps what the store holds afterwards."""
        desired = str(board)
        found = self._store.compare_set(self.KEY, self._text, desired).decode()
        replaced, self._text = found == desired, found
        return replaced


def wakeup_key(rank: int, number: int) -> str:
    return f"gossip/wakeup/{rank}/{number}"
