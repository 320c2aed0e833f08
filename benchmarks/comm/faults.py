"""Kills, stops or cuts off one rank at a random moment, and counts what the others say and how soon.

    python benchmarks/comm/faults.py --rounds 100
    python benchmarks/comm/faults.py --rounds 10 --fault stop --timeout 6
    python benchmarks/comm/faults.py --rounds 10 --fault cut --timeout 6      (emulated hosts: needs root or namespaces)

In each round the ranks train with another method, with `consensus()` and `save()` between the steps, and the store is
held by the launcher or by rank 0. A round is right if every survivor raises an error that accuses the victim and nobody
else. Rounds are seeded: `--seed 17 --rounds 1` repeats round 17.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import laconic
from laconic.emulate import Network, parse_links
from laconic.launch import STORE_PORT, Host, _environment, open_store

METHODS = ["AllReduce", "LocalSGD", "QSGD", "EfficientAdam", "Divisible"]
PLACES = ["steps", "consensus", "save", "all"]
ACCUSED = re.compile(
    r"(?:no sign of life from|waited [\d.]+ s for|no connection to|did not answer[^:;(]*:) ranks? ([\d, ]*\d)"
    r"|rank (\d+) died|held by rank (\d+),"
)
GRACE = 60.0  # seconds beyond the time-out after which a survivor counts as hanging


@dataclass
class Round:
    """One fault, and what the survivors reported."""

    seed: int
    fault: str
    method: str
    place: str
    store: str
    victim: int
    errors: dict[int, tuple[float, str]]  # by survivor: seconds until the error, and its text

    def verdicts(self, ranks: int) -> list[str]:
        """Returns "right", "wrong", "unnamed" or "hang" for each survivor."""
        result = []
        for rank in range(ranks):
            if rank == self.victim:
                continue
            if rank not in self.errors:
                result.append("hang")
                continue
            accused = accused_in(self.errors[rank][1])
            result.append("right" if accused == {self.victim} else "wrong" if accused else "unnamed")
        return result


def accused_in(text: str) -> set[int]:
    """Returns the ranks that an error accuses.

    >>> sorted(accused_in("mean at step 3 failed, no sign of life from ranks 1, 2"))
    [1, 2]
    """
    found = (next(filter(None, groups)) for groups in ACCUSED.findall(text))
    return {int(rank) for numbers in found for rank in numbers.split(",")}


def work(
    pipe: Connection, host: Host | None, environment: dict[str, str], method: str, place: str, timeout: float, path: str
) -> None:
    """Trains until something fails, and sends the error."""
    if host is not None:
        host.enter()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chance = random.Random(environment["RANK"])
    model = nn.Sequential(nn.Linear(30, 400), nn.Tanh(), nn.Linear(400, 60))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        with laconic.Worker(model, optimizer, getattr(laconic, method)(), timeout=timeout) as worker:
            pipe.send("started")
            for step in range(10**6):
                model(torch.randn(8, 30)).square().mean().backward()
                time.sleep(chance.random() * 0.02)
                optimizer.step()
                optimizer.zero_grad()
                if place in ("consensus", "all") and step % 4 == 3:
                    with worker.consensus():
                        time.sleep(chance.random() * 0.2)
                if place in ("save", "all") and step % 10 == 9:
                    worker.save(path)
    except Exception as error:  # noqa: BLE001
        pipe.send((time.monotonic(), f"{type(error).__name__}: {error}"))


def cut(host: Host) -> None:
    """Takes the host's network interface down."""
    host.enter()
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        netlink.link("set", index=netlink.link_lookup(ifname=host.interface)[0], state="down")


def play(seed: int, ranks: int, fault: str, timeout: float) -> Round:
    chance = random.Random(seed)
    method, place = chance.choice(METHODS), chance.choice(PLACES)
    victim, pause = chance.randrange(ranks), chance.uniform(0.2, 3.0)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "laconic", "laconic.preload"])
    with ExitStack() as stack:
        hosts: Sequence[Host] | None = None
        if fault == "cut":
            hosts = stack.enter_context(Network(parse_links("100mbit", ranks))).hosts
        holder = "rank 0" if hosts is not None else chance.choice(["rank 0", "launcher"])
        store = open_store("127.0.0.1", 0) if hosts is None else None
        address, port = ("127.0.0.1", store.port) if store is not None else (hosts[0].address, STORE_PORT)
        interfaces = ["lo"] * ranks if hosts is None else [host.interface for host in hosts]
        environments = [_environment(rank, ranks, 1, address, port, interfaces[rank]) for rank in range(ranks)]
        if holder == "rank 0":
            store = None  # frees the port
            for environment in environments:
                environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        path = stack.enter_context(tempfile.TemporaryDirectory())
        processes: list[Any] = []
        pipes = []
        for rank, environment in enumerate(environments):
            ours, theirs = context.Pipe()
            host = hosts[rank] if hosts is not None else None
            process = context.Process(target=work, args=(theirs, host, environment, method, place, timeout, path))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            for pipe in pipes:
                assert pipe.poll(120), "the job does not start"
                assert pipe.recv() == "started"
            time.sleep(pause)
            at = time.monotonic()
            if fault == "cut":
                assert hosts is not None
                cutter = context.Process(target=cut, args=(hosts[victim],))
                cutter.start()
                cutter.join()
                at = time.monotonic()
            else:
                os.kill(processes[victim].pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            errors = {}
            for rank, pipe in enumerate(pipes):
                left = max(0.0, at + timeout + GRACE - time.monotonic())
                if (rank != victim or fault == "cut") and pipe.poll(left):
                    when, text = pipe.recv()
                    errors[rank] = (when - at, text)
            for rank, process in enumerate(processes):
                if rank in errors:  # it must be able to end
                    process.join(20)
                    assert not process.is_alive(), f"rank {rank} has raised, but its process does not end"
        finally:
            for process in processes:
                process.kill()
                process.join()
    return Round(seed, fault, method, place, holder, victim, errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--fault", choices=["kill", "stop", "cut"], default="kill")
    parser.add_argument("--timeout", type=float, default=20.0)
    parser.add_argument("--log", type=Path, help="appends every round's errors to this file")
    args = parser.parse_args()
    counts: dict[str, int] = dict.fromkeys(["right", "wrong", "unnamed", "hang"], 0)
    seconds = []
    for seed in range(args.seed, args.seed + args.rounds):
        round_ = play(seed, args.ranks, args.fault, args.timeout)
        verdicts = round_.verdicts(args.ranks)
        for verdict in verdicts:
            counts[verdict] += 1
        seconds += [when for rank, (when, _) in round_.errors.items() if rank != round_.victim]
        if args.log is not None:
            with args.log.open("a") as log:
                log.write(f"{round_}\n{verdicts}\n")
        if set(verdicts) != {"right"}:
            print(round_, verdicts, flush=True)
    seconds.sort()
    print(f"{args.rounds} rounds with {args.fault}, {args.ranks} ranks, timeout {args.timeout:g} s: {counts}")
    if seconds:
        p99 = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
        print(
            f"seconds until the error: median {statistics.median(seconds):.2f}, 99th percentile {p99:.2f}, "
            f"largest {seconds[-1]:.2f}"
        )


if __name__ == "__main__":
    main()
