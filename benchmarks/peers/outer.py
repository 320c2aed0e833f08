"""Does an outer step help ADPSGD and A2CiD2, as it helps periodic averaging in DiLoCo? Simulated.

LACONIC_DATA=… python benchmarks/peers/outer.py --only ADPSGD   (some minutes; prints rows of the table of peers.md)
LACONIC_DATA=… python benchmarks/peers/outer.py --only A2CiD2
LACONIC_DATA=… python benchmarks/peers/outer.py --only DiLoCo   (the outer step at a constant period)

After each round of ADPSGD, with θ the model after the last one, Δ = θ − x̄ and u ← μu + Δ, all workers go on from
θ ← θ − ν(Δ + μu). With A2CiD2 each worker does that by itself every 8 steps, with its own x instead of x̄. It counts as
a part of its local step, so gossip works as before.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from laconic.bench.run import Plan, run
from laconic.bench.strategies import Contender, MethodStrategy
from laconic.method import Method, Replica
from laconic.methods import ADPSGD, A2CiD2, DiLoCo
from laconic.tasks import Fashion

TARGET, COMPUTE = 0.85, 0.03  # seconds of a step
# ν and μ. The first one is the method without an outer step; the last one only makes longer steps, in the limit as long
# as those of the one before it.
RATES = [(1.0, 0.0), (0.7, 0.9), (0.7, 0.5), (1.4, 0.0)]


class Outer:
    """The outer step of one worker."""

    def __init__(self, worker: Replica, lr: float, momentum: float) -> None:
        self.theta, self.velocity = worker.x.clone(), torch.zeros_like(worker.x)
        self.lr, self.momentum = lr, momentum

    def take(self, worker: Replica) -> None:
        difference = self.theta - worker.x
        self.velocity.mul_(self.momentum).add_(difference)
        self.theta.sub_(difference.add_(self.velocity, alpha=self.momentum), alpha=self.lr)
        worker.x.copy_(self.theta)


@dataclass
class OuterADPSGD(ADPSGD):
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def setup(self, worker: Replica) -> None:
        super().setup(worker)
        self._outer = Outer(worker, self.outer_lr, self.outer_momentum)

    def after_step(self, worker: Replica) -> None:
        rounds = self.rounds
        super().after_step(worker)
        if self.rounds > rounds:
            self._outer.take(worker)


@dataclass
class OuterA2CiD2(A2CiD2):
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    every: int = 8

    def setup(self, worker: Replica) -> None:
        super().setup(worker)
        self._outer = Outer(worker, self.outer_lr, self.outer_momentum)

    def after_step(self, worker: Replica) -> None:
        if worker.step % self.every == 0:
            self._outer.take(worker)
        super().after_step(worker)


def methods() -> list[tuple[str, Method]]:
    found: list[tuple[str, Method]] = []
    for lr, momentum in RATES:
        is_plain = (lr, momentum) == RATES[0]
        what = "none" if is_plain else f"ν = {lr:g}, μ = {momentum:g}"
        for period in (8, 32):
            method = ADPSGD(period) if is_plain else OuterADPSGD(period, outer_lr=lr, outer_momentum=momentum)
            found.append((f"ADPSGD({period}) | {what}", method))
        gossip = A2CiD2() if is_plain else OuterA2CiD2(outer_lr=lr, outer_momentum=momentum)
        found.append((f"A2CiD2() | {what}", gossip))
    found += [(f"DiLoCo({period}) | its defaults", DiLoCo(period)) for period in (8, 16, 32, 48)]
    return sorted(found, key=lambda entry: entry[0].partition(" | ")[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--only", default="", help="methods whose name begins so")
    options = parser.parse_args()
    print("| method | outer step | steps to 85 % | final % | kB a step |", flush=True)
    print("|---|---|---|---|---|")
    for name, method in methods():
        if not name.startswith(options.only):
            continue
        steps, finals, nbytes = [], [], []
        for seed in range(options.seeds):
            plan = Plan(Fashion(), 4, 300, seed, options.link, evaluations=30, simulated=COMPUTE)
            record = run(Contender(name, name, MethodStrategy(method)), plan)
            reached = record.reached(TARGET)
            steps.append("–" if reached is None else str(reached.step))
            finals.append(f"{100 * (record.final() or 0):.1f}")
            nbytes.append(f"{sum(record.payload_nbytes_per_step.values()) / 1e3:.0f}")
        print(f"| {name} | {', '.join(steps)} | {', '.join(finals)} | {', '.join(nbytes)} |", flush=True)


if __name__ == "__main__":
    main()
