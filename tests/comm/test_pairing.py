"""Tests pairing over an in-memory store, in which others may act between a worker's read and write of the board."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic import topology
from laconic.comm.pairing import Board, Dropped, Need, Pairing, wakeup_key

GRAPHS = st.sampled_from(
    [
        *(topology.ring(2), topology.ring(5), topology.ring(8), topology.complete(5), topology.exponential(7)),
        *(topology.torus(2, 3), topology.from_edges([(0, 1), (0, 2), (0, 3), (3, 4)])),
    ]
)


class Memory:
    """A store in one process. `before_change` lets others act first, and so produces every interleaving."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.before_change: Callable[[], None] = lambda: None

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        meanwhile, self.before_change = self.before_change, lambda: None
        meanwhile()
        self.before_change = meanwhile
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value


class Crowd:
    """Workers that act as their background threads would, one random event after another."""

    def __init__(self, graph: topology.Topology, seed: int, slow: bool) -> None:
        self.graph, self.chance, self.store = graph, random.Random(seed), Memory()
        self.pairings = {rank: Pairing(self.store, graph, rank) for rank in graph.nodes}
        self.need = dict.fromkeys(graph.nodes, Need.ANSWER)
        self.surplus = dict.fromkeys(graph.nodes, 0)
        self.partner: dict[int, int] = {}  # the peer of a worker's exchange, as far as the worker knows
        self.made = dict.fromkeys(graph.nodes, 0)
        self.passed_over = dict.fromkeys(graph.nodes, 0)
        self.paces = {rank: 0.25 if slow and rank == 0 else 1.0 for rank in graph.nodes}
        self.store.before_change = self.interfere

    def interfere(self) -> None:
        if self.chance.random() < 0.3:
            self.pair(self.chance.choice(self.graph.nodes))

    def pair(self, rank: int) -> None:
        if rank in self.partner:
            return
        self.partner[rank] = -1  # it is at the board already: `interfere` leaves it alone
        peer = self.pairings[rank].pair(self.need[rank], self.surplus[rank], wakeup=0)
        del self.partner[rank]
        if peer is None:
            return
        assert peer in self.graph.neighbours(rank)
        assert self.partner.get(peer, rank) in (rank, -1), "nobody is in two exchanges"
        self.partner[rank] = peer

    def end(self, rank: int) -> None:
        """Ends the exchange at both ends, if both know of it."""
        peer = self.partner.get(rank, -1)
        if self.partner.get(peer) != rank:
            return
        for one in (rank, peer):
            del self.partner[one]
            self.made[one] += 1
            self.surplus[one] += self.need[one] == Need.ANSWER
            self.need[one] = Need.ANSWER
            self.passed_over[one] = 0
        for neighbour in {*self.graph.neighbours(rank), *self.graph.neighbours(peer)}:
            self.passed_over[neighbour] += self.need[neighbour] == Need.URGENT

    def event(self) -> None:
        rank = self.chance.choice(self.graph.nodes)
        kind = self.chance.random()
        if kind < 0.3 and self.chance.random() < self.paces[rank]:
            self.need[rank] = Need(min(self.need[rank] + 1, Need.URGENT))
        elif kind < 0.7:
            self.pair(rank)
        else:
            self.end(rank)
        self.check()

    def check(self) -> None:
        free = Board.parse(self.store.values[Pairing.KEY]).free
        for i, j in self.graph.edges:
            if i in free and j in free:
                assert free[i].need + free[j].need < Need.URGENT, "two free neighbours that could be paired"
        assert not free.keys() & {rank for rank, peer in self.partner.items() if peer >= 0}

    def finish(self) -> None:
        """Adds no new need: workers that were taken notice it, and all exchanges end."""
        self.store.before_change = lambda: None
        for _ in range(4 * self.graph.size):
            for rank in self.graph.nodes:
                self.pair(rank)
            for rank in self.graph.nodes:
                self.end(rank)


@given(graph=GRAPHS, seed=st.integers(0, 10**6), slow=st.booleans())
def test_pairs_are_symmetric_edges_and_exclusive_and_all_needs_end(
    graph: topology.Topology, seed: int, slow: bool
) -> None:
    crowd = Crowd(graph, seed, slow)
    for _ in range(150):
        crowd.event()
    crowd.finish()
    assert not crowd.partner, "no exchange is left open at one end only"
    board = Board.parse(crowd.store.values[Pairing.KEY])
    assert not board.taken
    assert not any(need == Need.URGENT for need in crowd.need.values()), "no urgent need stays unserved"
    seekers = {rank for rank, need in crowd.need.items() if need == Need.SEEK}
    assert not any(i in seekers and j in seekers for i, j in graph.edges)


@given(graph=GRAPHS, seed=st.integers(0, 10**6))
def test_nobody_starves(graph: topology.Topology, seed: int) -> None:
    """All are always in urgent need. No worker's neighbours exchange with others again and again before it."""
    crowd = Crowd(graph, seed, slow=False)
    for _ in range(120):
        for rank in crowd.chance.sample(graph.nodes, graph.size):
            crowd.need[rank] = Need.URGENT
            crowd.pair(rank)
            crowd.end(crowd.chance.choice(graph.nodes))
            crowd.check()
        # Each of at most `degree` neighbours may first exchange with each of its own, and be taken by it again.
        degree = max(len(graph.neighbours(rank)) for rank in graph.nodes)
        assert max(crowd.passed_over.values()) <= 4 * degree * degree + 4
    assert min(crowd.made.values()) >= 20


def test_a_worker_that_is_taken_is_woken_up_and_learns_by_whom() -> None:
    store = Memory()
    one, other = (Pairing(store, topology.ring(2), rank) for rank in range(2))
    assert one.pair(Need.ANSWER, 0, wakeup=7) is None
    assert other.pair(Need.SEEK, 0, wakeup=0) is None, "a worker that only answers is paired only with an urgent one"
    assert other.pair(Need.URGENT, 0, wakeup=0) == 0
    assert wakeup_key(0, 7) in store.values
    assert one.pair(Need.ANSWER, 0, wakeup=8) == 1
    assert one.pair(Need.ANSWER, 0, wakeup=8) is None


def test_the_smallest_surplus_first_and_then_the_longest_waiting() -> None:
    board = Board()
    for rank, (need, surplus) in enumerate([(Need.ANSWER, 2), (Need.ANSWER, 0), (Need.ANSWER, 0)]):
        assert board.pair(rank, (), need, surplus, 0) == (None, None)
    assert board.pair(3, (0, 1, 2), Need.URGENT, 0, 0)[0] == 1
    assert board.pair(4, (0, 1, 2), Need.URGENT, 0, 0)[0] == 2
    assert board.pair(5, (0, 1, 2), Need.URGENT, 0, 0)[0] == 0


def test_a_worker_that_withdraws_must_first_exchange_if_it_was_taken() -> None:
    store = Memory()
    one, other = (Pairing(store, topology.ring(2), rank) for rank in range(2))
    one.pair(Need.SEEK, 0, wakeup=0)
    assert other.pair(Need.SEEK, 0, wakeup=0) == 0
    assert one.withdraw() == 1
    assert one.withdraw() is None
    one.pair(Need.SEEK, 0, wakeup=0)
    assert one.withdraw() is None
    assert other.pair(Need.URGENT, 0, wakeup=0) is None


def test_dropping() -> None:
    store = Memory()
    pairings = [Pairing(store, topology.ring(6), rank) for rank in range(6)]
    pairings[2].pair(Need.ANSWER, 0, wakeup=0)
    pairings[1].drop(2, "no answer")
    assert pairings[4].read() == {2: "no answer"}
    assert pairings[3].pair(Need.URGENT, 0, wakeup=0) is None, "the dropped worker is no longer free"
    for act in (lambda: pairings[2].pair(Need.SEEK, 0, 0), pairings[2].withdraw, lambda: pairings[2].drop(1, "mad")):
        with pytest.raises(Dropped, match="rank 2 was dropped, the others go on without it: no answer"):
            act()
    pairings[4].drop(5, "no answer either")  # now {0, 1} and {3, 4} are left: the first part continues
    assert pairings[0].read().keys() == {2, 3, 4, 5}
    with pytest.raises(Dropped, match=r"the graph is disconnected, and the workers \[3, 4\] have no path to \[0, 1\]"):
        pairings[4].pair(Need.SEEK, 0, 0)
    pairings[0].drop(1, "gone too")
    assert pairings[0].pair(Need.URGENT, 0, 0) is None, "the last worker continues alone"


@given(
    free=st.dictionaries(st.integers(0, 99), st.tuples(*[st.integers(0, 9)] * 4)),
    taken=st.dictionaries(st.integers(0, 99), st.integers(0, 99)),
    dropped=st.dictionaries(st.integers(0, 99), st.text()),
)
def test_a_board_can_be_written_and_read(free: dict, taken: dict, dropped: dict) -> None:  # type: ignore[type-arg]
    from laconic.comm.pairing import Free

    board = Board(3, {rank: Free(*entry) for rank, entry in free.items()}, taken, dropped)
    assert Board.parse(str(board)) == board
