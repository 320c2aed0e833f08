"""How long gloo takes for an all-to-all and its answer, by the number of chunks they are cut in (as root).

python benchmarks/all_to_all.py --link 100mbit

Two workers can fill a link with one message. With more, flows share links: one that gets ahead leaves links idle later.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

import laconic
from laconic.emulate import hosts_behind
from laconic.emulate.links import parse_link

WARM_UP = 3


def work(nbytes: int, turns: int) -> dict[tuple[int, int], tuple[float, float]]:
    """By chunks and channels: median milliseconds of a turn, and CPU milliseconds."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    channels = [dist.new_group(backend="gloo") for _ in range(2)]
    results = {}
    for chunks in (1, 2, 4, 8, 16):
        buffers = torch.zeros(4, chunks, nbytes // chunks // size * size, dtype=torch.uint8)
        for used in (1, 2):
            times = []
            for turn in range(WARM_UP + turns):
                dist.barrier()
                if turn == WARM_UP:
                    cpu = time.process_time()
                start = time.perf_counter()
                up = [
                    dist.all_to_all_single(received, sent, group=channels[0], async_op=True)
                    for sent, received in zip(buffers[0], buffers[1], strict=True)
                ]
                down = []
                for message, sent, received in zip(up, buffers[2], buffers[3], strict=True):
                    message.wait()
                    down.append(dist.all_to_all_single(received, sent, group=channels[used - 1], async_op=True))
                for message in down:
                    message.wait()
                times.append(1e3 * (time.perf_counter() - start))
            results[chunks, used] = (statistics.median(times[WARM_UP:]), 1e3 * (time.process_time() - cpu) / turns)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--nbytes", type=int, default=702528, help="one way, of all ranks' shares together")
    parser.add_argument("--turns", type=int, default=12)
    given = parser.parse_args()
    with hosts_behind(given.link, given.workers) as hosts:
        ranks = laconic.spawn(work, given.workers, given.nbytes, given.turns, hosts=hosts)
    share = (given.workers - 1) / given.workers
    least = 2 * share * given.nbytes * 8e3 / parse_link(given.link).bits_per_second
    print(f"{given.workers} workers, {given.link}, {given.nbytes} bytes there and back: at least {least:.1f} ms\n")
    print("| chunks | one channel, ms | CPU ms a worker | answers on a second channel, ms | CPU ms |")
    print("|---|---|---|---|---|")
    for chunks in sorted({chunks for chunks, _ in ranks[0]}):
        cells = [
            f"{max(rank[chunks, used][0] for rank in ranks):.1f} | "
            f"{statistics.fmean(rank[chunks, used][1] for rank in ranks):.1f}"
            for used in (1, 2)
        ]
        print(f"| {chunks} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
