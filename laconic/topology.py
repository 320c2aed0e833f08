"""Communication graphs for gossip, and the constants χ1, χ2, η and α̃ of a graph (arXiv 2306.08289).

Example:
    >>> from laconic import topology
    >>> graph = topology.ring(4)
    >>> graph.edges
    ((0, 1), (0, 3), (1, 2), (2, 3))
    >>> graph.neighbours(0)
    (1, 3)
    >>> constants = graph.constants(rate=1.0)
    >>> round(constants.chi_1, 3), round(constants.chi_2, 3)
    (1.0, 0.75)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from laconic.names import look_up
from laconic.rules import check_count, check_number, check_text

MOST_NODES = 2**16


@dataclass(frozen=True)
class Constants:
    """The constants of a graph at a given rate of exchanges, with time in units of one gradient step.

    With the Laplacian L = Σ over edges of λ_ij (e_i − e_j)(e_i − e_j)ᵀ, where λ_ij is the edge's rate of exchanges:

        χ1 = 1/λ₂(L)        χ2 = max over edges of ½ (e_i − e_j)ᵀ L⁺ (e_i − e_j)
        η = 1/(2√(χ1 χ2))        α̃ = ½ √(χ1/χ2)
    """

    chi_1: float  # the time in which the slowest mode of plain gossip decays
    chi_2: float  # half of the largest effective resistance of an edge
    eta: float  # the speed at which x and x̃ are mixed
    alpha_tilde: float  # the fraction of x_i − x_j by which x̃ moves in an exchange, where x moves by ½


@dataclass(frozen=True)
class Topology:
    """An undirected, connected graph of workers.

    Args:
        name: shown to the user.
        nodes: the ranks.
        edges: sorted pairs (i, j) with i < j. An edge that is listed twice is used twice as often.

    Raises:
        ValueError: the graph has no nodes or is not connected, or the edges are not as described.

    Example:
        >>> from laconic.topology import Topology
        >>> Topology("path", nodes=(0, 1, 2), edges=((0, 1), (1, 2))).neighbours(1)
        (0, 2)
    """

    name: str
    nodes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        check_text("name", self.name, "ring")
        if not isinstance(self.nodes, tuple) or not self.nodes:
            raise ValueError(f"nodes must be a tuple of at least 1 node, not {self.nodes!r}")
        for node in self.nodes:
            check_count("a node", node, least=0)
        if len(set(self.nodes)) < len(self.nodes):
            raise ValueError(f"nodes must all be different, not {self.nodes!r}")
        if not isinstance(self.edges, tuple) or not all(isinstance(e, tuple) and len(e) == 2 for e in self.edges):
            raise ValueError(f"edges must be a tuple of pairs of nodes, not {self.edges!r}")
        for i, j in self.edges:
            if i == j:
                raise ValueError(f"an edge must join two different nodes, not {i} and {j}")
            if i not in self.nodes or j not in self.nodes:
                raise ValueError(f"edges must join nodes of the graph, but edge ({i}, {j}) is not among {self.nodes}")
        if list(self.edges) != sorted((min(edge), max(edge)) for edge in self.edges):
            raise ValueError(f"edges must be sorted pairs (i, j) with i < j, not {self.edges}")
        components = self.components(self.nodes)
        if len(components) > 1:
            raise ValueError(f"the graph must be connected, but it has {len(components)} components: {components}")

    @property
    def size(self) -> int:
        """The number of nodes."""
        return len(self.nodes)

    def neighbours(self, node: int) -> tuple[int, ...]:
        """Returns the nodes that share an edge with `node`, sorted."""
        return self._neighbours.get(node, ())

    @cached_property
    def _neighbours(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, set[int]] = {node: set() for node in self.nodes}
        for i, j in self.edges:
            found[i].add(j)
            found[j].add(i)
        return {node: tuple(sorted(others)) for node, others in found.items()}

    @cached_property
    def _chi(self) -> tuple[float, float]:
        return _chi(self.nodes, self.edges)

    def components(self, nodes: Collection[int]) -> list[tuple[int, ...]]:
        """Returns the connected components of the subgraph of `nodes`, the largest first, then by lowest node."""
        remaining, components = set(nodes), []
        while remaining:
            component, frontier = set(), [min(remaining)]
            while frontier:
                node = frontier.pop()
                if node in remaining:
                    remaining.discard(node)
                    component.add(node)
                    frontier.extend(self.neighbours(node))
            components.append(tuple(sorted(component)))
        return sorted(components, key=lambda component: (-len(component), component))

    def subgraph(self, nodes: Collection[int]) -> Topology:
        """Returns the graph of these nodes and the edges between them, which must be connected."""
        edges = tuple((i, j) for i, j in self.edges if i in nodes and j in nodes)
        return Topology(self.name, tuple(sorted(nodes)), edges)

    def constants(self, rate: float = 1.0) -> Constants:
        """Returns χ1, χ2, η and α̃ of this graph.

        They assume that each worker starts half of its exchanges, each with a neighbour drawn uniformly, so that
        λ_ij = rate · ½ (1/deg i + 1/deg j).

        Args:
            rate: exchanges per gradient step and worker.

        Example:
            >>> from laconic import topology
            >>> round(topology.ring(64).constants(rate=1.0).alpha_tilde, 3)
            7.262
        """
        check_number("rate", rate, above=0)
        if self.size < 2:
            raise ValueError(f"the constants need at least 2 nodes, not {self.size}")
        chi_1, chi_2 = self._chi  # at rate 1; both are inversely proportional to the rate
        return Constants(
            chi_1 / rate,
            chi_2 / rate,
            eta=rate / (2 * math.sqrt(chi_1 * chi_2)),
            alpha_tilde=math.sqrt(chi_1 / chi_2) / 2,
        )


@lru_cache(maxsize=64)
def _chi(nodes: tuple[int, ...], edges: tuple[tuple[int, int], ...]) -> tuple[float, float]:
    """Returns χ1 and χ2 at rate 1."""
    index = {node: k for k, node in enumerate(nodes)}
    pairs = np.array([(index[i], index[j]) for i, j in edges])
    degree = np.bincount(pairs.ravel(), minlength=len(nodes))
    laplacian = np.zeros((len(nodes), len(nodes)))
    for i, j in pairs:
        edge_rate = (1 / degree[i] + 1 / degree[j]) / 2  # each end starts half of its exchanges
        laplacian[[i, j], [i, j]] += edge_rate
        laplacian[[i, j], [j, i]] -= edge_rate
    chi_1 = 1 / np.linalg.eigvalsh(laplacian)[1]
    inverse = np.linalg.pinv(laplacian, hermitian=True)
    i, j = pairs.T
    chi_2 = (inverse[i, i] + inverse[j, j] - 2 * inverse[i, j]).max() / 2
    return float(chi_1), float(chi_2)


def from_edges(edges: Iterable[tuple[int, int]], n: int | None = None) -> Topology:
    """Returns the graph with these edges over the nodes 0 to n − 1.

    Args:
        edges: pairs of nodes in any order; duplicates are dropped.
        n: the number of nodes. Default: up to the highest node that has an edge.

    Example:
        >>> from laconic import topology
        >>> topology.from_edges([(1, 0), (1, 2)]).edges
        ((0, 1), (1, 2))
    """
    pairs = list(edges) if isinstance(edges, Iterable) else None
    if pairs is None or not all(isinstance(e, tuple | list) and [type(i) for i in e] == [int, int] for e in pairs):
        raise ValueError(f"edges must be pairs of nodes, such as [(0, 1), (1, 2)], not {edges!r}")
    if n is None:
        n = 1 + max((max(pair) for pair in pairs), default=0)
    _check_node_count(n)
    return Topology("from_edges", tuple(range(n)), _sorted_unique(pairs))


def ring(n: int) -> Topology:
    """Returns the graph in which node i is joined to i ± 1 modulo n."""
    _check_node_count(n)
    return Topology("ring", tuple(range(n)), _sorted_unique((i, (i + 1) % n) for i in range(n) if n > 1))


def complete(n: int) -> Topology:
    """Returns the graph in which all pairs of nodes are joined."""
    _check_node_count(n)
    return Topology("complete", tuple(range(n)), _sorted_unique((i, j) for j in range(n) for i in range(j)))


def exponential(n: int) -> Topology:
    """Returns the graph in which nodes at distances ±1, ±2, ±4, … modulo n are joined.

    A neighbour at two of these distances, such as the opposite node, has two edges.
    """
    _check_node_count(n)
    pairs = [(i, (i + (1 << k)) % n) for i in range(n) for k in range((n - 1).bit_length())]
    return Topology("exponential", tuple(range(n)), tuple(sorted((min(pair), max(pair)) for pair in pairs)))


def torus(rows: int, cols: int) -> Topology:
    """Returns a grid whose opposite borders are joined, numbered row by row.

    With one row it is a ring. With two rows the edges up and down coincide and count once.
    """
    _check_node_count(rows, "rows")
    _check_node_count(cols, "cols")
    grid = np.arange(rows * cols).reshape(rows, cols)
    down = zip(grid.flat, np.roll(grid, -1, axis=0).flat, strict=True)
    right = zip(grid.flat, np.roll(grid, -1, axis=1).flat, strict=True)
    pairs = _sorted_unique((int(i), int(j)) for i, j in [*down, *right] if i != j)
    return Topology("torus", tuple(range(rows * cols)), pairs)


def squarest_torus(n: int) -> Topology:
    """Returns the torus of n nodes whose numbers of rows and columns differ least; for a prime n it is a ring."""
    _check_node_count(n)
    rows = next(rows for rows in range(math.isqrt(n), 0, -1) if n % rows == 0)
    return torus(rows, n // rows)


TOPOLOGIES = {"ring": ring, "exponential": exponential, "complete": complete, "torus": squarest_torus}


def named(name: str, n: int) -> Topology:
    """Returns the topology of this name for n workers.

    Raises:
        ValueError: no topology has this name; the message suggests similar names.

    Example:
        >>> from laconic import topology
        >>> topology.named("torus", 6) == topology.torus(2, 3)
        True
    """
    build = look_up("topology", name, TOPOLOGIES)
    _check_node_count(n)
    return _built(build, n)


@lru_cache(maxsize=64)  # simulated workers share their process, and a large graph takes a while to build
def _built(build: Callable[[int], Topology], n: int) -> Topology:
    return build(n)


def _sorted_unique(edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted({(min(edge), max(edge)) for edge in edges}))


def _check_node_count(n: int, name: str = "the number of nodes") -> None:
    check_count(name, n, most=MOST_NODES)
