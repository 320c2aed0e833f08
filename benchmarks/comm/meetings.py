"""How long the start of a worker, `consensus()` and a meeting of all ranks take on links with a delay (as root).

python benchmarks/comm/meetings.py --link 100mbit+25ms --workers 4 8
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import laconic
from laconic.bench.run import PRELOAD
from laconic.emulate import hosts_behind


def work(numel: int) -> tuple[float, list[float], list[float]]:
    """Returns the seconds of the start, of three calls of `consensus()`, and of two meetings."""
    start = time.perf_counter()
    model = nn.Linear(numel, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with laconic.Worker(model, optimizer, laconic.Divisible(period=4)) as worker:
        starting, consensus, meetings = time.perf_counter() - start, [], []
        for _ in range(3):
            model(torch.ones(1, numel)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            start = time.perf_counter()
            with worker.consensus():
                consensus.append(time.perf_counter() - start)
        for _ in range(2):
            start = time.perf_counter()
            worker.comm.meet("a meeting")
            meetings.append(time.perf_counter() - start)
    return starting, consensus, meetings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit+25ms")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--numel", type=int, default=1_860_000)
    options = parser.parse_args()
    print("| workers | start | consensus() | meeting |")
    print("|---|---|---|---|")
    for workers in options.workers:
        with hosts_behind(options.link, workers) as hosts:
            starting, consensus, meetings = laconic.spawn(work, workers, options.numel, hosts=hosts, preload=PRELOAD)[1]
        texts = [", ".join(f"{seconds:.2f}" for seconds in each) for each in (consensus, meetings)]
        print(f"| {workers} | {starting:.1f} | {texts[0]} | {texts[1]} |", flush=True)


if __name__ == "__main__":
    main()
