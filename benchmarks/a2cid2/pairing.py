"""The pairing rule in virtual time: how often workers exchange, and how evenly the edges of the graph are used.

python benchmarks/a2cid2/pairing.py [--exchanges 1000]

Every worker always seeks an exchange, which takes 1 to 1.1 units of time; with "slow link" four times as long if rank 0
takes part. So a rate of 1/1.05 is the most that is possible. The rule is the one of `laconic.comm.pairing.Board`.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import Counter

from laconic import topology
from laconic.comm.pairing import Board, Need

GRAPHS = {
    "ring of 4": topology.ring(4),
    "ring of 5": topology.ring(5),
    "ring of 16": topology.ring(16),
    "torus of 16": topology.torus(4, 4),
    "exponential, 16": topology.exponential(16),
    "complete, 16": topology.complete(16),
    "exponential, 64": topology.exponential(64),
    "star of 6": topology.from_edges([(0, leaf) for leaf in range(1, 6)]),
    "chain of 6": topology.from_edges([(node, node + 1) for node in range(5)]),
}


def simulate(graph: topology.Topology, exchanges: int, patience: float, slow_link: bool) -> tuple[float, Counter[int]]:
    """Returns the duration, and how often each edge was used.

    Args:
        graph: who may exchange with whom.
        exchanges: how many are made.
        patience: how long a worker refuses neighbours, as a multiple of the duration of its last exchange.
        slow_link: whether exchanges of rank 0 take four times as long.
    """
    rng, board, now = random.Random(0), Board(graph), 0.0
    used: Counter[int] = Counter()
    duration = dict.fromkeys(graph.nodes, 0.0)  # of a worker's last exchange
    events: list[tuple[float, float, int, bool]] = [(0.0, rng.random(), rank, True) for rank in graph.nodes]
    while used.total() < exchanges:
        now, _, rank, patient = heapq.heappop(events)
        if not patient and rank not in board.free:
            continue  # it was paired while it was still patient
        before = set(board.busy)
        board.join(rank, Need.URGENT, patient and patience > 0, 0)
        if rank in board.free and patient:
            heapq.heappush(events, (now + patience * duration[rank], rng.random(), rank, False))
        for one in sorted(set(board.busy) - before | ({rank} & set(board.busy))):
            other = board.busy[one].partner
            if one < other:
                took = (4 if slow_link and 0 in (one, other) else 1) * (1 + 0.1 * rng.random())
                used[graph.edges.index((one, other))] += 1
                for end in (one, other):
                    if not board.busy[end].noticed:
                        board.join(end, Need.URGENT, True, 0)
                    duration[end] = took
                    heapq.heappush(events, (now + took, rng.random(), end, True))
    return now, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=1000)
    arguments = parser.parse_args()
    print(
        "| graph | slow link | patience | exchanges per worker and unit of time | smallest share of an edge | largest |"
    )
    print("|---|---|---|---|---|---|")
    for name, graph in GRAPHS.items():
        for slow_link in (False, True):
            for patience in (0.0, 1.0, 1e9):
                seconds, used = simulate(graph, arguments.exchanges, patience, slow_link)
                edges = set(graph.edges)
                shares = [used[graph.edges.index(edge)] / arguments.exchanges * len(edges) for edge in edges]
                rate = 2 * arguments.exchanges / graph.size / seconds
                label = {0.0: "none", 1.0: "one exchange", 1e9: "unlimited"}[patience]
                print(
                    f"| {name} | {'yes' if slow_link else 'no'} | {label} | {rate:.2f} "
                    f"| {min(shares):.2f} | {max(shares):.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
