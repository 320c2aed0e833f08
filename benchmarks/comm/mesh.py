"""Milliseconds per step of Divisible with laconic's own TCP mesh and with gloo alone, on emulated links (as root).

    python benchmarks/comm/mesh.py --link 100mbit
    python benchmarks/comm/mesh.py --link 1gbit

One worker per core. Both transports take turns in the same processes, so that they see the same machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

import laconic
from laconic.bench.run import PRELOAD
from laconic.bench.strategies import parse_contender
from laconic.comm import distributed
from laconic.emulate import hosts_behind
from laconic.tasks.fashion import Fashion
from laconic.tasks.task import Shard

CONTENDERS = ["divisible", "divisible+period=4+background=uniform:4"]
TRANSPORTS = ["mesh", "gloo"]
WARM_UP = 15  # steps in which connections are opened and the period is chosen


def take_turn(contender: str, transport: str, task: Fashion, shard: Shard, steps: int) -> float:
    """Returns this worker's mean milliseconds per step."""
    distributed.HAS_EPOLL = transport == "mesh"
    torch.manual_seed(0)
    model = task.build_model()
    with parse_contender(contender).strategy.join(model, task.build_optimizer(model)) as session:
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                start = time.perf_counter()
            task.loss(session.module, shard.batch(step)).backward()  # type: ignore[no-untyped-call]
            session.optimizer.step()
            session.optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - start) / steps


def work(steps: int, rounds: int) -> dict[tuple[str, str], list[float]]:
    torch.set_num_threads(1)
    task = Fashion()
    shard = task.load(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 0)
    found: dict[tuple[str, str], list[float]] = {(c, t): [] for c in CONTENDERS for t in TRANSPORTS}
    for number in range(rounds):
        for contender in CONTENDERS:
            for transport in TRANSPORTS if number % 2 else reversed(TRANSPORTS):
                found[contender, transport].append(take_turn(contender, transport, task, shard, steps))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    with hosts_behind(given.link, given.workers) as hosts:
        ranks = laconic.spawn(work, given.workers, given.steps, given.rounds, hosts=hosts, preload=PRELOAD)
    print(f"{given.workers} workers, {given.link}\n")
    print("| method | mesh, ms per step | gloo, ms per step | gain |")
    print("|---|---|---|---|")
    for contender in CONTENDERS:
        # The slower worker of each turn counts.
        turns = [[max(of) for of in zip(*(rank[contender, t] for rank in ranks), strict=True)] for t in TRANSPORTS]
        mesh, gloo = (statistics.median(of) for of in turns)
        cells = " | ".join(f"{statistics.median(of):.1f} ({min(of):.1f} – {max(of):.1f})" for of in turns)
        print(f"| `{contender}` | {cells} | {100 * (1 - mesh / gloo):.1f} % |", flush=True)


if __name__ == "__main__":
    main()
