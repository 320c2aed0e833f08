"""Graphs of who talks with whom, and the constants of a graph that set the momentum of gossip (arXiv 2306.08289)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from laconic.names import look_up


@dataclass(frozen=True)
class Constants:
    """What gossip at a given rate needs to know about its graph. Time is in units of one gradient step."""

    chi_1: float  # slowest mode: 1/λ₂ of the Laplacian L
    chi_2: float  # largest effective resistance of an edge, halved
    eta: float  # speed at which x and x̃ are mixed: 1 / (2√(χ1χ2))
    alpha_tilde: float  # the part of the gap that x̃ moves in an exchange, where x moves ½: ½√(χ1/χ2)


@dataclass(frozen=True)
class Topology:
    """An undirected, connected graph. `edges` are sorted pairs (i, j) with i < j; what is there twice meets twice as
    often."""

    name: str
    nodes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("a topology must have at least 1 node, not 0")
        for i, j in self.edges:
            if i == j:
                raise ValueError(f"an edge must join two different nodes, not {i} and {j}")
            if i not in self.nodes or j not in self.nodes:
                raise ValueError(f"edges must join nodes of the graph, and of ({i}, {j}) one is not among {self.nodes}")
        if list(self.edges) != sorted((min(edge), max(edge)) for edge in self.edges):
            raise ValueError(f"edges must be sorted pairs (i, j) with i < j, not {self.edges}")
        parts = self.parts(self.nodes)
        if len(parts) > 1:
            raise ValueError(f"the graph must be connected, and it has {len(parts)} parts: {parts}")

    @property
    def size(self) -> int:
        return len(self.nodes)

    def neighbours(self, node: int) -> tuple[int, ...]:
        return tuple(sorted({i + j - node for i, j in self.edges if node in (i, j)}))

    def parts(self, nodes: Collection[int]) -> list[tuple[int, ...]]:
        """The connected parts of what these nodes are among themselves: the largest first, then by lowest node."""
        left, parts = set(nodes), []
        while left:
            part, fringe = set(), [min(left)]
            while fringe:
                node = fringe.pop()
                if node in left:
                    left.discard(node)
                    part.add(node)
                    fringe.extend(self.neighbours(node))
            parts.append(tuple(sorted(part)))
        return sorted(parts, key=lambda part: (-len(part), part))

    def among(self, nodes: Collection[int]) -> Topology:
        """The same graph with these nodes only; it must hold together."""
        edges = tuple((i, j) for i, j in self.edges if i in nodes and j in nodes)
        return Topology(self.name, tuple(sorted(nodes)), edges)

    def constants(self, rate: float = 1.0) -> Constants:
        """When each worker starts half of its `rate` exchanges a step, each with a neighbour drawn evenly."""
        if not rate > 0 or not math.isfinite(rate):
            raise ValueError(f"rate must be more than 0 exchanges a step, not {rate!r}")
        if self.size < 2:
            raise ValueError(f"the constants need at least 2 nodes, not {self.size}")
        chi_1, chi_2 = _chi(self.nodes, self.edges)  # of rate 1: both are inversely proportional to the rate
        return Constants(
            chi_1 / rate,
            chi_2 / rate,
            eta=rate / (2 * math.sqrt(chi_1 * chi_2)),
            alpha_tilde=math.sqrt(chi_1 / chi_2) / 2,
        )


@lru_cache(maxsize=64)
def _chi(nodes: tuple[int, ...], edges: tuple[tuple[int, int], ...]) -> tuple[float, float]:
    index = {node: k for k, node in enumerate(nodes)}
    pairs = np.array([(index[i], index[j]) for i, j in edges])
    degree = np.bincount(pairs.ravel(), minlength=len(nodes))
    laplacian = np.zeros((len(nodes), len(nodes)))
    for i, j in pairs:
        # Each end starts half of its exchanges. Where all degrees are the same this is I − W with W_ij = 1/degree.
        edge_rate = (1 / degree[i] + 1 / degree[j]) / 2
        laplacian[[i, j], [i, j]] += edge_rate
        laplacian[[i, j], [j, i]] -= edge_rate
    chi_1 = 1 / np.linalg.eigvalsh(laplacian)[1]
    inverse = np.linalg.pinv(laplacian, hermitian=True)
    i, j = pairs.T
    chi_2 = (inverse[i, i] + inverse[j, j] - 2 * inverse[i, j]).max() / 2
    return float(chi_1), float(chi_2)


def from_edges(edges: Iterable[tuple[int, int]], n: int | None = None) -> Topology:
    """The graph of these edges over the nodes 0 to n − 1 (by default, up to the highest that has an edge)."""
    pairs = _once(edges)
    if n is None:
        n = 1 + max((j for _, j in pairs), default=0)
    return Topology("from_edges", tuple(range(n)), pairs)


def ring(n: int) -> Topology:
    _require_a_node(n)
    return Topology("ring", tuple(range(n)), _once((i, (i + 1) % n) for i in range(n) if n > 1))


def complete(n: int) -> Topology:
    _require_a_node(n)
    return Topology("complete", tuple(range(n)), _once((i, j) for j in range(n) for i in range(j)))


def exponential(n: int) -> Topology:
    """Neighbours at distances ±1, ±2, ±4, …; one that is reached in two ways, as the opposite node is, counts twice."""
    _require_a_node(n)
    pairs = [(i, (i + (1 << k)) % n) for i in range(n) for k in range((n - 1).bit_length())]
    return Topology("exponential", tuple(range(n)), tuple(sorted((min(pair), max(pair)) for pair in pairs)))


def torus(rows: int, cols: int) -> Topology:
    """A grid whose borders are joined. With one row it is a ring; with two, the ways up and down are one edge."""
    if rows < 1 or cols < 1:
        raise ValueError(f"a torus must have at least 1 row and 1 column, not {rows} and {cols}")
    grid = np.arange(rows * cols).reshape(rows, cols)
    down = zip(grid.flat, np.roll(grid, -1, axis=0).flat, strict=True)
    right = zip(grid.flat, np.roll(grid, -1, axis=1).flat, strict=True)
    pairs = _once((int(i), int(j)) for i, j in [*down, *right] if i != j)
    return Topology("torus", tuple(range(rows * cols)), pairs)


def squarest_torus(n: int) -> Topology:
    """The torus of n nodes whose sides differ least; for a prime n that is a ring."""
    rows = next(rows for rows in range(math.isqrt(n), 0, -1) if n % rows == 0)
    return torus(rows, n // rows)


TOPOLOGIES = {"ring": ring, "exponential": exponential, "complete": complete, "torus": squarest_torus}


def named(name: str, n: int) -> Topology:
    """The topology of this name for n workers; an unknown name raises with the near misses."""
    return look_up("topology", name, TOPOLOGIES)(n)


def _once(edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted({(min(edge), max(edge)) for edge in edges}))


def _require_a_node(n: int) -> None:
    if n < 1:
        raise ValueError(f"a topology must have at least 1 node, not {n}")
