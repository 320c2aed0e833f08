"""Compares simulated with emulated seconds of a step: real processes on emulated links (as root, or by namespaces).

python benchmarks/simulate/validate.py emulate --workers 2 4 8 --links 10mbit 100mbit 1gbit 10mbit+25ms …
python benchmarks/simulate/validate.py table

`emulate` appends to validate.jsonl; `table` simulates the same settings and prints both. Computing is a pause of 20 ms,
so that two cores can be eight workers. All methods take turns in the same processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import laconic
from laconic.bench.run import PRELOAD
from laconic.bench.strategies import parse_contender
from laconic.emulate import hosts_behind
from laconic.link import parse_link

RECORD = Path(__file__).parent / "validate.jsonl"
METHODS = {  # and the method that stands for each in a simulation
    "allreduce": "allreduce",
    "ddp": "allreduce",
    "local_sgd+period=2": "local_sgd+period=2",
    "adpsgd+initial_period=2+low=0+high=inf": "adpsgd+initial_period=2+low=0+high=inf",
    "qsgd": "qsgd",
    "efficient_adam": "efficient_adam",
}
# These send while workers compute, so they are compared with one worker on each core only.
BACKGROUND = ("divisible+period=4+background=uniform:4", "diloco+period=4+delay=2+compressor=uniform:4", "a2cid2")
PAUSE = 0.02
# Steps that are left out, and steps that count. With a delay, TCP and the ranks' order take longer to settle.
NEAR, FAR = (2, 6), (6, 18)


def numel(link: str) -> int:
    """Returns the length of a vector whose all-reduce takes 0.1 to 0.3 s on this link."""
    return {10: 50_000, 100: 500_000, 1000: 2_500_000}[round(parse_link(link).bits_per_second / 1e6)]


class Vector(nn.Module):
    """A model whose gradient costs nothing, and differs between ranks."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(numel))

    def forward(self) -> torch.Tensor:
        return self.x.sum() * (1 + int(os.environ["RANK"]))


def methods_of(workers: int) -> dict[str, str]:
    return METHODS | ({name: name for name in BACKGROUND} if workers <= (os.cpu_count() or 1) else {})


def steps_of(method: str, link: str) -> tuple[int, int]:
    return FAR if method in BACKGROUND or parse_link(link).delay_seconds else NEAR


def take_turn(method: str, link: str, pause: float) -> tuple[float, float, float]:
    """Returns the seconds of a step, how many of them it waits, and the seconds of the method's overhead."""
    warm_up, counted = steps_of(method, link)
    model = Vector(numel(link))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with parse_contender(method).strategy.join(model, optimizer) as session:
        clock = time.monotonic if session.worker is None else session.worker.comm.now

        def read() -> tuple[float, float, float]:
            reading = session.read()
            waited = reading.waiting_seconds or 0.0
            return clock(), waited, (reading.method_seconds or 0.0) - waited

        for step in range(warm_up + counted):
            if step == warm_up:
                before = read()
            session.module().backward()
            if pause:
                time.sleep(pause)
            session.optimizer.step()
            session.optimizer.zero_grad()
        step_seconds, waited, own = ((now - then) / counted for now, then in zip(read(), before, strict=True))
        return step_seconds, waited, own


def work(methods: list[str], link: str, turns: int) -> dict[str, list[tuple[float, float, float]]]:
    torch.set_num_threads(1)
    taken = [{method: take_turn(method, link, PAUSE) for method in methods} for _ in range(turns)]
    return {method: [turn[method] for turn in taken] for method in methods}


def emulate(workers: int, link: str, turns: int) -> None:
    """Measures all methods on an emulated network, and appends the medians over the turns to the record."""
    with hosts_behind(link, workers) as hosts:
        ranks = laconic.spawn(work, workers, list(methods_of(workers)), link, turns, hosts=hosts, preload=PRELOAD)
    with RECORD.open("a") as file:
        for method in methods_of(workers):
            means = [
                [statistics.fmean(rank[method][turn][i] for rank in ranks) for i in range(3)] for turn in range(turns)
            ]
            step, waited, own = (round(statistics.median(mean[i] for mean in means), 5) for i in range(3))
            steps = [round(mean[0], 5) for mean in means]
            line = {"method": method, "workers": workers, "link": link, "step": step, "waited": waited, "own": own}
            file.write(json.dumps(line | {"turns": steps}) + "\n")


def simulate(method: str, workers: int, link: str, compute: float) -> float:
    """Returns the simulated seconds of a step."""
    results = laconic.simulate(take_turn, workers, methods_of(workers)[method], link, 0.0, link=link, compute=compute)
    return float(results[0][0])


def table() -> None:
    """Prints emulated milliseconds, and by how much the simulated ones differ. Short waits are in brackets.

    A simulated step computes as long as an emulated one: the pause, and what was measured of the method's overhead.
    """
    lines = [json.loads(text) for text in RECORD.read_text().splitlines()]
    names = (*METHODS, *BACKGROUND)
    print("| link | workers | " + " | ".join(method.split("+")[0] for method in names) + " |")
    print("|---" * (2 + len(names)) + "|")
    waiting, background = [], []  # differences
    for link, workers in sorted({(line["link"], line["workers"]) for line in lines}):
        cells = dict.fromkeys(names, "")
        for line in lines:
            if (line["link"], line["workers"]) != (link, workers):
                continue
            difference = simulate(line["method"], workers, link, PAUSE + line["own"]) / line["step"] - 1
            waits = 2 * (line["waited"] or line["step"] - PAUSE) >= line["step"]
            cell = f"{1e3 * line['step']:.0f} {100 * difference:+.0f} %"
            cells[line["method"]] = cell if waits else f"({cell})"
            if line["method"] in BACKGROUND:
                background.append(abs(difference))
            elif waits:
                waiting.append(abs(difference))
        print(f"| {link} | {workers} | " + " | ".join(cells.values()) + " |", flush=True)
    for what, found in (
        ("steps that wait at least half of the time", waiting),
        ("steps in the background", background),
    ):
        print(f"within 10 %: {sum(difference <= 0.1 for difference in found)} of {len(found)} {what}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["emulate", "table"])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--links", nargs="+", default=["100mbit"])
    options = parser.parse_args()
    if options.what == "table":
        table()
        return
    for link in options.links:
        for workers in options.workers:
            emulate(workers, link, options.turns)


if __name__ == "__main__":
    main()
