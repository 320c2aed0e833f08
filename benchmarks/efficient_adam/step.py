"""Seconds and bytes of a step of Efficient-Adam on emulated links, compared with DDP and computing alone (as root).

python benchmarks/efficient_adam/step.py time --link 100mbit
python benchmarks/efficient_adam/step.py time --link 1gbit
python benchmarks/efficient_adam/step.py workers --link 100mbit
python benchmarks/efficient_adam/step.py delay --link 100mbit+25ms

The methods take turns, several times, in the same processes, so that all of them see the same machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Adam, Optimizer

import laconic
from laconic.bench.run import PRELOAD
from laconic.bench.strategies import parse_contender
from laconic.emulate import hosts_behind
from laconic.link import parse_link
from laconic.tasks.fashion import Fashion
from laconic.tasks.task import Shard

WARM_UP = 3  # steps that open connections and fill caches
SIGN = "efficient_adam+up=sign+down=sign"


class FusedFashion(Fashion):
    """The task with torch's fused Adam: the same results to rounding, in a seventh of the time on a CPU."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=self.lr, fused=True)


@dataclass
class Turn:
    """One worker's steps with one method, in one turn."""

    seconds: list[float]
    payload_nbytes: float  # a step
    card_nbytes: float  # a step, as counted by the network interface (NIC)
    cpu_seconds: float  # a step, of all threads


def take_turn(way: str, task: Fashion, shard: Shard, steps: int) -> Turn:
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    seconds = []
    with parse_contender(way).strategy.join(model, optimizer) as session:
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                payload, card, cpu = sum(session.read().payload_nbytes.values()), card_nbytes(), time.process_time()
            start = time.perf_counter()
            task.loss(session.module, shard.batch(step)).backward()  # type: ignore[no-untyped-call]
            session.optimizer.step()
            session.optimizer.zero_grad()
            if step >= WARM_UP:
                seconds.append(time.perf_counter() - start)
        payload, card = sum(session.read().payload_nbytes.values()) - payload, card_nbytes() - card
        return Turn(seconds, payload / steps, card / steps, (time.process_time() - cpu) / steps)


def card_nbytes() -> int:
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(f"{interface}:"))


def work(ways: list[str], fused: bool, steps: int, rounds: int) -> dict[str, list[Turn]]:
    task = FusedFashion() if fused else Fashion()
    shard = task.load(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 0)
    turns: dict[str, list[Turn]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            # DDP needs a second a step at 100 Mbit/s
            turns[way].append(take_turn(way, task, shard, max(3, steps // 3) if way.startswith("ddp") else steps))
    return turns


@dataclass
class Result:
    """Over all workers and turns."""

    milliseconds: float  # of a step: the median over turns of the slowest worker's mean
    lowest: float  # the same of single turns
    highest: float
    payload_nbytes: float  # a step, of the busiest worker
    card_nbytes: float  # a step, mean over workers
    cpu_milliseconds: float


def measure(workers: int, link: str, ways: list[str], fused: bool, steps: int, rounds: int) -> dict[str, Result]:
    with hosts_behind(link, workers) as hosts:
        ranks = laconic.spawn(work, workers, ways, fused, steps, rounds, hosts=hosts, preload=PRELOAD)
    results = {}
    for way in ways:
        by_turn = list(zip(*(rank[way] for rank in ranks), strict=True))
        # The slowest worker counts: workers that do not wait for each other leave their cores to the slower ones.
        means = [1e3 * max(statistics.fmean(turn.seconds) for turn in turns) for turns in by_turn]
        last = by_turn[-1]
        results[way] = Result(
            statistics.median(means),
            min(means),
            max(means),
            max(turn.payload_nbytes for turn in last),
            statistics.fmean(turn.card_nbytes for turn in last),
            statistics.fmean(1e3 * turn.cpu_seconds for turns in by_turn for turn in turns),
        )
    return results


def print_table(results: dict[str, Result], link: str) -> None:
    """Prints the table. The floor is computing alone plus the payload of the busiest worker at the rate of the link."""
    rate = parse_link(link).bits_per_second / 8e3  # bytes a millisecond
    print("| method | ms a step: median | of turns | CPU ms a worker | payload, kB | NIC, kB | floor, ms | × |")
    print("|---|---|---|---|---|---|---|---|")
    for way, r in results.items():
        floor = results["none"].milliseconds + r.payload_nbytes / rate
        print(
            f"| {way} | {r.milliseconds:.1f} | {r.lowest:.1f} – {r.highest:.1f} | {r.cpu_milliseconds:.1f} | "
            f"{r.payload_nbytes / 1e3:.1f} | {r.card_nbytes / 1e3:.1f} | {floor:.1f} | {r.milliseconds / floor:.2f} |"
        )


def compare_time(workers: int, link: str, steps: int, rounds: int) -> None:
    ways = ["none", "efficient_adam", SIGN, f"{SIGN}+chunk=1048576", "ddp", "ddp_fp16"]
    for fused in (False, True):
        results = measure(workers, link, ways, fused, steps, rounds)
        print(f"\n{workers} workers, {link}, {'fused' if fused else 'default'} Adam\n")
        print_table(results, link)
        ddp = results["ddp"]
        for way in ways[1:4]:
            r = results[way]
            print(
                f"{way}: DDP takes {ddp.milliseconds / r.milliseconds:.1f} × the time and sends "
                f"{ddp.card_nbytes / r.card_nbytes:.1f} × the bytes; its fp16 hook takes "
                f"{results['ddp_fp16'].milliseconds / r.milliseconds:.1f} × the time",
                flush=True,
            )


def compare_workers(link: str, steps: int, rounds: int) -> None:
    for workers in (2, 4, 8):
        ways = ["none", "efficient_adam", "efficient_adam+server=0"]
        results = measure(workers, link, ways, False, steps, rounds)
        print(f"\n{workers} workers, {link}\n")
        print_table(results, link)
        over = results["efficient_adam"].milliseconds - results["none"].milliseconds
        print(f"sharded, more than computing alone: {over:.1f} ms", flush=True)


def compare_delays(workers: int, link: str, steps: int, rounds: int) -> None:
    ways = ["none", *(f"efficient_adam+delay={delay}" for delay in (0, 1, 2))]
    print(f"\n{workers} workers, {link}\n")
    print_table(measure(workers, link, ways, False, steps, rounds), link)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["time", "workers", "delay"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.figure == "time":
        compare_time(given.workers, given.link, given.steps, given.rounds)
    elif given.figure == "workers":
        compare_workers(given.link, given.steps, given.rounds)
    else:
        compare_delays(given.workers, given.link, given.steps, given.rounds)


if __name__ == "__main__":
    main()
