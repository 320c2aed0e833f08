"""Time of an all-to-all and its answer over gloo, by the number of chunks they are split into (as root).

    python benchmarks/comm/all_to_all.py --link 100mbit

Two workers can saturate a link with one message. With more workers flows share links: a flow that finishes early
leaves its links idle later.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

import laconic
from laconic.emulate import hosts_behind
from laconic.link import parse_link

WARM_UP = 3


def work(nbytes: int, rounds: int) -> dict[tuple[int, int], tuple[float, float]]:
    """Rerounds, by (chunks, channels), the median time of a round and its CPU time, both in ms."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    channels = [dist.new_group(backend="gloo") for _ in range(2)]
    results = {}
    for chunks in (1, 2, 4, 8, 16):
        buffers = torch.zeros(4, chunks, nbytes // chunks // size * size, dtype=torch.uint8)
        for used in (1, 2):
            times = []
            for round_number in range(WARM_UP + rounds):
                dist.barrier()
                if round_number == WARM_UP:
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
            results[chunks, used] = (statistics.median(times[WARM_UP:]), 1e3 * (time.process_time() - cpu) / rounds)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--nbytes", type=int, default=702528, help="bytes one way, of all ranks' chunks together")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    with hosts_behind(arguments.link, arguments.workers) as hosts:
        ranks = laconic.spawn(work, arguments.workers, arguments.nbytes, arguments.rounds, hosts=hosts)
    fraction = (arguments.workers - 1) / arguments.workers
    least_ms = 2 * fraction * arguments.nbytes * 8e3 / parse_link(arguments.link).bits_per_second
    print(f"{arguments.workers} workers, {arguments.link}, {arguments.nbytes} bytes each way: ", end="")
    print(f"at least {least_ms:.1f} ms\n")
    print("| chunks | one channel, ms | CPU ms per worker | answers on a second channel, ms | CPU ms per worker |")
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
