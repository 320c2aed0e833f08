"""Gossip between steps, without a background: deterministic and synchronous, for tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from laconic.comm import Comm, Dialogue
from laconic.topology import Topology


def draw_matchings(graph: Topology, backlog: float, generator: torch.Generator) -> tuple[list[tuple[int, int]], float]:
    """Draws random maximal matchings of the graph until there are enough exchanges.

    Args:
        graph: of the workers.
        backlog: how many exchanges per worker are to be made.
        generator: in the same state on all ranks.

    Returns:
        The pairs that exchange, in this order, the same on all ranks; and the backlog that is left, at most 0.
    """
    pairs: list[tuple[int, int]] = []
    while backlog > 0:
        matched: set[int] = set()
        for index in torch.randperm(len(graph.edges), generator=generator).tolist():
            pair = graph.edges[index]
            if matched.isdisjoint(pair):
                matched.update(pair)
                pairs.append(pair)
        backlog -= len(matched) / graph.size
    return pairs, backlog


def run_dialogue(comm: Comm, talk: Callable[[int], Dialogue], peer: int, device: torch.device) -> None:
    """Runs a dialogue with a peer in the foreground, message by message. `device`: of the foreground's tensors."""
    dialogue = talk(peer)
    sent = next(dialogue)
    while True:
        received = comm.exchange(sent.to(device), peer).to(sent.device)
        try:
            sent = dialogue.send(received)
        except StopIteration:
            return
