"""Tests pairing over an in-memory store, in which others may act between a worker's read and write of the board."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic import topology
from laconic.comm.pairing import Board, Busy, Dropped, Free, Need, Pairing, wakeup_key

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

    def __init__(self, graph: topology.Topology, seed: int, slow: bool = False) -> None:
        self.graph, self.chance, self.store = graph, random.Random(seed), Memory()
        self.pairings = {rank: Pairing(self.store, graph, rank) for rank in graph.nodes}
        self.need = dict.fromkeys(graph.nodes, Need.ANSWER)
        self.patient = dict.fromkeys(graph.nodes, True)
        self.partner: dict[int, int] = {}  # the peer of a worker's exchange, as far as the worker knows
        self.made: Counter[int] = Counter()
        self.used: Counter[tuple[int, int]] = Counter()
        self.unused: Counter[tuple[int, int]] = Counter()  # by edge: exchanges of its ends since it was used
        self.most_unused = 0
        self.passed_over = dict.fromkeys(graph.nodes, 0)
        self.paces = {rank: 0.25 if slow and rank == 0 else 1.0 for rank in graph.nodes}
        self.store.before_change = self.interfere

    def interfere(self) -> None:
        if self.chance.random() < 0.3:
            self.join(self.chance.choice(self.alive))

    @property
    def board(self) -> Board:
        return Board.parse(self.store.values[Pairing.KEY], self.graph)

    @property
    def alive(self) -> list[int]:
        return [rank for rank in self.graph.nodes if rank not in self.board.dropped]

    def join(self, rank: int) -> None:
        if rank in self.partner:
            return
        self.partner[rank] = -1  # it is at the board already: `interfere` leaves it alone
        peer = self.pairings[rank].join(self.need[rank], self.patient[rank], wakeup=0)
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
        for edge in set(self.graph.edges):
            self.unused[edge] += (rank in edge) + (peer in edge)
        self.used[min(rank, peer), max(rank, peer)] += 1
        self.most_unused = max(self.most_unused, *self.unused.values())
        self.unused[min(rank, peer), max(rank, peer)] = 0
        for one in (rank, peer):
            del self.partner[one]
            self.made[one] += 1
            self.need[one] = Need.ANSWER
            self.patient[one] = True
            self.passed_over[one] = 0
        for neighbour in {*self.graph.neighbours(rank), *self.graph.neighbours(peer)}:
            self.passed_over[neighbour] += self.need[neighbour] == Need.URGENT

    def drop(self, rank: int) -> None:
        """Drops a worker in any state. Its partner notices, and is free again."""
        other = next(other for other in self.alive if other != rank)
        self.pairings[other].drop(rank, "no answer")
        self.partner = {
            one: peer for one, peer in self.partner.items() if one in self.alive and (peer in self.alive or peer == -1)
        }

    def event(self) -> None:
        rank = self.chance.choice(self.alive)
        kind = self.chance.random()
        if kind < 0.3 and self.chance.random() < self.paces[rank]:
            self.need[rank] = Need(min(self.need[rank] + 1, Need.URGENT))
        elif kind < 0.35:
            self.patient[rank] = False
        elif kind < 0.7:
            self.join(rank)
        else:
            self.end(rank)
        self.check()

    def check(self) -> None:
        board = self.board
        assert not board.free.keys() & {rank for rank, peer in self.partner.items() if peer >= 0}
        assert not board.free.keys() & board.busy.keys()
        for i, j in self.graph.edges:
            if i in board.free and j in board.free and board.free[i].need + board.free[j].need >= Need.URGENT:
                awaited = [k for rank in (i, j) for k in self.graph.neighbours(rank) if k in board.busy]
                assert awaited, "two free neighbours that could be paired, and wait for nobody"

    def finish(self) -> None:
        """Adds no new need: workers that were paired notice it, and all exchanges end."""
        self.store.before_change = lambda: None
        for _ in range(4 * self.graph.size):
            for rank in self.alive:
                self.join(rank)
            for rank in self.alive:
                self.end(rank)


def check_finished(crowd: Crowd) -> None:
    crowd.finish()
    assert not crowd.partner, "no exchange is left open at one end only"
    board = crowd.board
    assert not board.busy
    edges = [edge for edge in crowd.graph.edges if board.dropped.keys().isdisjoint(edge)]
    if edges:
        assert not any(crowd.need[rank] == Need.URGENT for rank in crowd.alive), "no urgent need stays unserved"
    seekers = {rank for rank, need in crowd.need.items() if need == Need.SEEK}
    assert not any(i in seekers and j in seekers for i, j in edges)


@given(graph=GRAPHS, seed=st.integers(0, 10**6), slow=st.booleans())
def test_pairs_are_symmetric_edges_and_exclusive_and_all_needs_end(
    graph: topology.Topology, seed: int, slow: bool
) -> None:
    crowd = Crowd(graph, seed, slow)
    for _ in range(150):
        crowd.event()
    check_finished(crowd)


@given(graph=GRAPHS, seed=st.integers(0, 10**6), drops=st.integers(1, 3))
def test_dropped_workers_block_nobody(graph: topology.Topology, seed: int, drops: int) -> None:
    crowd = Crowd(graph, seed)
    for _ in range(drops):
        for _ in range(50):
            crowd.event()
        if len(crowd.alive) > 1:
            crowd.drop(crowd.chance.choice(crowd.alive))
            crowd.check()
    for _ in range(50):
        crowd.event()
    check_finished(crowd)


@given(graph=GRAPHS, seed=st.integers(0, 10**6), slow=st.booleans())
def test_nobody_starves_and_every_edge_is_used(graph: topology.Topology, seed: int, slow: bool) -> None:
    """All are always in urgent need, and patient. Exchanges end in any order, those of a slow worker less often."""
    crowd = Crowd(graph, seed, slow)
    for _ in range(120):
        for rank in crowd.chance.sample(graph.nodes, graph.size):
            crowd.need[rank] = Need.URGENT
            crowd.join(rank)
            ending = crowd.chance.choice(graph.nodes)
            if crowd.chance.random() < crowd.paces[ending] * crowd.paces.get(crowd.partner.get(ending, -1), 1.0):
                crowd.end(ending)
            crowd.check()
    degree = max(len(graph.neighbours(rank)) for rank in graph.nodes)
    # Each of at most `degree` neighbours may first exchange with each of its own.
    assert max(crowd.passed_over.values()) <= 4 * degree * degree + 4
    assert min(crowd.made[rank] for rank in graph.nodes) >= 10
    assert crowd.most_unused <= 6 * degree + 4, "exchanges of both ends of an edge between two uses of it"


def edges_in_lockstep(graph: topology.Topology, patient: bool, exchanges: int) -> list[tuple[int, int]]:
    """Returns the edges used if all exchanges take equally long: that which began first ends first, at both ends."""
    board, edges = Board(graph), []
    for rank in graph.nodes:
        board.join(rank, Need.URGENT, patient, 0)
    for _ in range(exchanges):
        for rank, busy in list(board.busy.items()):
            if not busy.noticed:
                board.join(rank, Need.URGENT, patient, 0)
        first = min(board.busy, key=lambda rank: (board.busy[rank].since, rank))
        ends = (first, board.busy[first].partner)
        edges.append(ends)
        for rank in ends:
            board.join(rank, Need.URGENT, patient, 0)
    return edges


class Thorough(Board):
    """A board that looks at all edges after each change, and not only at those around it."""

    def _around(self, rank: int) -> list[int]:
        return list(self.topology.nodes)


@given(
    graph=st.one_of(GRAPHS, st.sampled_from([topology.ring(16), topology.torus(5, 5), topology.exponential(32)])),
    seed=st.integers(0, 10**6),
)
def test_looking_around_a_change_finds_all_pairs(graph: topology.Topology, seed: int) -> None:
    chance, near, thorough = random.Random(seed), Board(graph), Thorough(graph)
    for _ in range(120):
        rank = chance.choice(graph.nodes)
        if chance.random() < 0.1:
            assert near.leave(rank) == thorough.leave(rank)
        else:
            need, patient = Need(chance.randrange(3)), chance.random() < 0.7
            assert near.join(rank, need, patient, 0) == thorough.join(rank, need, patient, 0)
        assert str(near) == str(thorough)


def test_a_graph_in_lockstep_does_not_fall_into_fixed_pairs() -> None:
    graph = topology.ring(4)
    assert len(set(edges_in_lockstep(graph, patient=False, exchanges=40))) == 2, "two isolated pairs"
    assert set(Counter(edges_in_lockstep(graph, patient=True, exchanges=40)).values()) == {10}


def test_a_worker_that_is_paired_is_woken_up_and_learns_with_whom() -> None:
    store = Memory()
    one, other = (Pairing(store, topology.ring(2), rank) for rank in range(2))
    assert one.join(Need.ANSWER, True, wakeup=7) is None
    assert other.join(Need.SEEK, True, wakeup=0) is None, "a worker that only answers is paired with an urgent one only"
    assert other.join(Need.URGENT, True, wakeup=0) == 0
    assert wakeup_key(0, 7) in store.values
    assert wakeup_key(1, 0) not in store.values, "it knows already"
    assert one.join(Need.ANSWER, True, wakeup=8) == 1
    assert one.join(Need.ANSWER, True, wakeup=8) is None


def test_the_neighbour_met_least_recently_comes_first_even_if_it_only_answers() -> None:
    board = Board(topology.complete(3))
    assert board.join(0, Need.SEEK, True, 0)[0] is None
    assert board.join(1, Need.SEEK, True, 0)[0] == 0
    assert board.join(0, Need.ANSWER, True, 0)[0] == 1
    assert board.join(2, Need.ANSWER, True, 0)[0] is None
    assert board.join(0, Need.SEEK, True, 0)[0] is None, "rank 2 only answers, and rank 1 is not free"
    partner, paired = board.join(1, Need.SEEK, True, 0)
    assert (partner, set(paired)) == (None, {0, 2}), "ranks 0 and 1 seek, but have just met"


def test_a_worker_waits_for_the_neighbour_whose_turn_it_is_until_its_patience_ends() -> None:
    def busy_ring() -> Board:
        """Returns a ring of 4 with the exchanges (0, 1) and (2, 3), of which the first has ended at rank 0."""
        board = Board(topology.ring(4))
        for rank in (0, 1, 2, 3, 0, 2):
            board.join(rank, Need.URGENT, True, 0)
        assert {rank: busy.partner for rank, busy in board.busy.items()} == {0: 1, 1: 0, 2: 3, 3: 2}
        assert board.join(0, Need.URGENT, True, 0) == (None, {})
        return board

    board = busy_ring()
    assert board.join(1, Need.URGENT, True, 0)[0] is None, "rank 0 waits for rank 3, and rank 1 for rank 2"
    assert board.join(3, Need.URGENT, True, 0)[0] == 0
    assert board.join(2, Need.URGENT, True, 0)[0] == 1

    board = busy_ring()
    assert board.join(1, Need.URGENT, False, 0)[0] is None, "rank 0 is still patient"
    assert board.join(0, Need.URGENT, False, 0)[0] == 1

    board = busy_ring()
    board.join(1, Need.URGENT, True, 0)
    assert board.leave(3) == (None, {}), "rank 1 still waits for rank 2"
    assert set(board.leave(2)[1]) == {0, 1}, "both wait for nobody any more, are paired, and must be woken up"

    board = busy_ring()
    board.join(1, Need.URGENT, True, 0)
    board.drop(3, "no answer")
    assert set(board.drop(2, "no answer")) == {0, 1}


def test_a_worker_that_leaves_must_first_exchange_if_it_was_paired() -> None:
    store = Memory()
    one, other = (Pairing(store, topology.ring(2), rank) for rank in range(2))
    one.join(Need.SEEK, True, wakeup=0)
    assert other.join(Need.SEEK, True, wakeup=0) == 0
    assert one.leave() == 1
    assert one.leave() is None
    one.join(Need.SEEK, True, wakeup=0)
    assert one.leave() is None
    assert other.join(Need.URGENT, True, wakeup=0) is None


def test_dropping() -> None:
    store = Memory()
    pairings = [Pairing(store, topology.ring(6), rank) for rank in range(6)]
    pairings[2].join(Need.ANSWER, True, wakeup=0)
    pairings[1].drop(2, "no answer")
    assert pairings[4].read() == {2: "no answer"}
    assert pairings[3].join(Need.URGENT, True, wakeup=0) is None, "the dropped worker is no longer free"
    for act in (
        lambda: pairings[2].join(Need.SEEK, True, 0),
        pairings[2].leave,
        lambda: pairings[2].drop(1, "mad"),
    ):
        with pytest.raises(Dropped, match="rank 2 was dropped, the others go on without it: no answer"):
            act()
    pairings[4].drop(5, "no answer either")  # now {0, 1} and {3, 4} are left: the first part continues
    assert pairings[0].read().keys() == {2, 3, 4, 5}
    with pytest.raises(Dropped, match=r"the graph is disconnected, and the workers \[3, 4\] have no path to \[0, 1\]"):
        pairings[4].join(Need.SEEK, True, 0)
    pairings[0].drop(1, "gone too")
    assert pairings[0].join(Need.URGENT, True, 0) is None, "the last worker continues alone"


@given(
    graph=GRAPHS,
    free=st.dictionaries(st.integers(0, 99), st.builds(Free, st.integers(0, 2), st.booleans(), *[st.integers(0)] * 2)),
    busy=st.dictionaries(st.integers(0, 99), st.builds(Busy, st.integers(0), st.integers(0), st.booleans())),
    dropped=st.dictionaries(st.integers(0, 99), st.text()),
    used=st.integers(1),
)
def test_a_board_can_be_written_and_read(
    graph: topology.Topology, free: dict[int, Free], busy: dict[int, Busy], dropped: dict[int, str], used: int
) -> None:
    board = Board(graph, 3, free, busy, dropped, {graph.edges[-1]: used})
    assert Board.parse(str(board), graph) == board
