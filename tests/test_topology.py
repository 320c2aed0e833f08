"""Graphs and their constants, against reference values (for rings of 32 and 64: those of the paper's authors)."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic import topology

REFERENCE = [  # graph, χ1, χ2, η, α̃
    (topology.complete(4), 0.75, 0.75, 0.66667, 0.5),
    (topology.complete(16), 0.9375, 0.9375, 0.53333, 0.5),
    (topology.complete(64), 0.98438, 0.98438, 0.50794, 0.5),
    (topology.ring(4), 1.0, 0.75, 0.57735, 0.57735),
    (topology.ring(8), 3.41421, 0.875, 0.28928, 0.98767),
    (topology.ring(16), 13.13707, 0.9375, 0.14247, 1.87169),
    (topology.ring(32), 52.04343, 0.96875, 0.07042, 3.66477),
    (topology.ring(64), 207.67253, 0.98438, 0.03497, 7.26238),
    (topology.exponential(8), 1.5, 0.96371, 0.41586, 0.62380),
    (topology.exponential(16), 2.0, 1.00966, 0.35186, 0.70372),
    (topology.exponential(32), 2.5, 1.02294, 0.31266, 0.78166),
    (topology.exponential(64), 3.0, 1.02408, 0.28526, 0.85578),
    (topology.torus(4, 4), 2.0, 0.9375, 0.36515, 0.73030),
    (topology.torus(8, 8), 6.82843, 0.98438, 0.19285, 1.31689),
]


@pytest.mark.parametrize(("graph", "chi_1", "chi_2", "eta", "alpha_tilde"), REFERENCE)
def test_constants(graph: topology.Topology, chi_1: float, chi_2: float, eta: float, alpha_tilde: float) -> None:
    constants = graph.constants(rate=1)
    assert constants.chi_1 == pytest.approx(chi_1, abs=6e-6)
    assert constants.chi_2 == pytest.approx(chi_2, abs=6e-6)
    assert constants.eta == pytest.approx(eta, abs=6e-6)
    assert constants.alpha_tilde == pytest.approx(alpha_tilde, abs=6e-6)


@given(n=st.integers(2, 12), rate=st.floats(0.05, 20), name=st.sampled_from(sorted(topology.TOPOLOGIES)))
def test_the_rate_only_scales_time(n: int, rate: float, name: str) -> None:
    graph = topology.named(name, n)
    one, other = graph.constants(1), graph.constants(rate)
    assert other.chi_1 == pytest.approx(one.chi_1 / rate)
    assert other.eta == pytest.approx(1 / (2 * math.sqrt(other.chi_1 * other.chi_2)))
    assert other.alpha_tilde == pytest.approx(0.5 * math.sqrt(other.chi_1 / other.chi_2))


@given(n=st.integers(1, 40), name=st.sampled_from(sorted(topology.TOPOLOGIES)))
def test_named_graphs_are_connected_and_have_n_nodes(n: int, name: str) -> None:
    graph = topology.named(name, n)
    assert graph.nodes == tuple(range(n))
    assert graph.components(graph.nodes) == [graph.nodes]
    for node in graph.nodes:
        assert all(node in graph.neighbours(other) for other in graph.neighbours(node))


def test_edges_and_neighbours() -> None:
    assert topology.ring(2).edges == ((0, 1),)
    assert topology.torus(2, 2).edges == ((0, 1), (0, 2), (1, 3), (2, 3))
    assert topology.named("torus", 12).neighbours(0) == (1, 3, 4, 8)
    assert topology.named("torus", 5).edges == topology.ring(5).edges
    assert topology.from_edges([(2, 0), (0, 1), (1, 0)]).edges == ((0, 1), (0, 2))
    assert topology.ring(3) == topology.ring(3)
    assert hash(topology.ring(3)) == hash(topology.ring(3))


def test_components_and_subgraph() -> None:
    ring = topology.ring(6)
    assert ring.components([0, 1, 3, 4, 5]) == [(0, 1, 3, 4, 5)]
    assert ring.components([0, 2, 3]) == [(2, 3), (0,)]
    path = ring.subgraph([0, 1, 3, 4, 5])
    assert path.edges == ((0, 1), (0, 5), (3, 4), (4, 5))
    assert path.constants(1).chi_1 > topology.ring(5).constants(1).chi_1
    assert topology.ring(4).subgraph([2]).neighbours(2) == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: topology.from_edges([(0, 1), (2, 3)]), "must be connected, but it has 2 components"),
        (lambda: topology.from_edges([(0, 1)], n=3), "must be connected"),
        (lambda: topology.from_edges([(1, 1)]), "two different nodes, not 1 and 1"),
        (lambda: topology.from_edges([(0, 5)], n=3), "not among"),
        (lambda: topology.ring(0), "nodes must be .*, not "),
        (lambda: topology.torus(0, 3), "rows must be a whole number from 1 to 65536, not 0"),
        (lambda: topology.named("rnig", 4), "did you mean ring"),
        (lambda: topology.ring(4).subgraph([0, 2]), "must be connected"),
        (lambda: topology.ring(4).constants(0), "rate must be a finite number above 0, not 0"),
        (lambda: topology.ring(4).constants(-1.0), "not -1.0"),
        (lambda: topology.ring(1).constants(), "at least 2 nodes, not 1"),
    ],
)
def test_mistakes(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
