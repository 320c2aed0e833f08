"""Measures step time and bytes of 2 nodes with 2 ranks each, against the same 4 ranks as workers of their own.

    laconic data fashion
    python benchmarks/nodes/nodes.py

Two emulated hosts with two processes each: fast loopback inside, `--link` between. Every rank trains the task `fashion`
with its own batch. Seconds are the mean over the steps after the first `--warmup`, on rank 0. Bytes are those that a
host has sent over its link in these steps, as whole frames, by the kernel's counter.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

import laconic
from laconic.compress import Uniform
from laconic.emulate import Network, parse_links
from laconic.tasks import Fashion

METHODS = {
    "AllReduce()": laconic.AllReduce(),
    "LocalSGD(8)": laconic.LocalSGD(8),
    "Divisible()": laconic.Divisible(),
    "Divisible(period=4, background=Uniform(4))": laconic.Divisible(period=4, background=Uniform(4)),
    "A2CiD2()": laconic.A2CiD2(),
}


def sent_nbytes() -> int:
    """Returns what this host has sent over its link: the column after the eight of received frames."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:"))


def train(method: laconic.Method, in_nodes: bool, warmup: int, steps: int) -> dict[str, Any]:
    task, rank, size = Fashion(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    shard = task.load(rank, size, seed=0)
    with laconic.Worker(model, optimizer, method, timeout=120, nodes="auto" if in_nodes else None) as worker:
        for step in range(warmup + steps):
            if step == warmup:
                worker.metrics()
                start, nbytes = time.monotonic(), sent_nbytes()
            optimizer.zero_grad()
            task.backward(model, shard, step)
            optimizer.step()
        seconds, nbytes = (time.monotonic() - start) / steps, sent_nbytes() - nbytes
        metrics = worker.metrics()
        with worker.consensus():
            loss = task.loss(model, shard.batch(warmup + steps)).item()
    return {
        "seconds": seconds,
        "nbytes": nbytes / steps,
        "waited": metrics["waited_share"],
        "period": metrics["period"],
        "bits": metrics["bits"],
        "loss": loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--warmup", type=int, default=12)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    options = parser.parse_args()
    print(
        "| method | 4 ranks as | s a step | waiting | MB a step and host | period | bits | loss |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name in options.methods:
        for in_nodes in (False, True):
            with Network(parse_links(options.link, 2)) as network:
                arguments = (METHODS[name], in_nodes, options.warmup, options.steps)
                ranks = laconic.spawn(train, 4, *arguments, nodes=2, hosts=network.hosts)
            first = ranks[0]
            nbytes = max(one["nbytes"] for one in ranks)
            loss = sum(one["loss"] for one in ranks) / len(ranks)
            print(
                f"| `{name}` | {'2 nodes' if in_nodes else '4 workers'} | {first['seconds']:.3f} | "
                f"{first['waited']:.0%} | {nbytes / 1e6:.2f} | {first['period']:.1f} | "
                f"{first['bits']:.1f} | {loss:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
