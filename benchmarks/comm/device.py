"""What a step costs a device: kernels, waits of the host, copies and memory, counted on the tests' fake device.

    python benchmarks/comm/device.py

The figures are counts, not times. The foreground is the tests' strict group, which stands for NCCL.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from dataclasses import dataclass

import torch
from torch import nn

import laconic
from laconic.compress import Uniform
from tests import fake_device, strict_group
from tests.helpers import rank

WIDTHS = [256, 512, 512, 10]
BEFORE, STEPS = 40, 24  # steps that are not counted: measurements of the pace, first checks; and steps that are
METHODS: dict[str, laconic.Method] = {
    "AllReduce": laconic.AllReduce(),
    "QSGD": laconic.QSGD(),
    "LocalSGD": laconic.LocalSGD(period=4),
    "LocalSGD, 4 bits": laconic.LocalSGD(period=4, compressor=Uniform(4)),
    "ADPSGD": laconic.ADPSGD(),
    "DiLoCo": laconic.DiLoCo(period=4),
    "DiLoCo, streaming, 4 bits": laconic.DiLoCo(period=4, fragments=2, delay=1, compressor=Uniform(4)),
    "EfficientAdam": laconic.EfficientAdam(),
    "A2CiD2": laconic.A2CiD2(),
    "Divisible": laconic.Divisible(period=4),
    "Divisible, measured period": laconic.Divisible(),
    "Divisible, two hops": laconic.Divisible(period=4, hops=2),
    "Divisible, corrected": laconic.Divisible(period=4, corrected=True),
}


@dataclass
class Cost:
    """Per step; `nbytes`: of device memory after the last step, per parameter."""

    kernels: float
    synchronisations: float
    most_synchronisations: int  # in any step
    copies: float
    nbytes: float


def count(method: laconic.Method | None) -> Cost:
    """Trains on this rank; without a method, the plain optimizer."""
    torch.manual_seed(0)
    layers = [layer for pair in itertools.pairwise(WIDTHS) for layer in (nn.Linear(*pair), nn.ReLU())]
    gc.collect()
    before = fake_device.allocated()
    model = nn.Sequential(*layers[:-1]).to("fake:1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    x = torch.randn(32, WIDTHS[0]).to("fake:1")
    y = (torch.randint(WIDTHS[-1], (32,)) + rank()).remainder(WIDTHS[-1]).to("fake:1")
    numel = sum(p.numel() for p in model.parameters())
    costs: list[fake_device.Counts] = []

    def train() -> Cost:
        for step in range(BEFORE + STEPS):
            start = fake_device.counts()
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if step >= BEFORE:
                costs.append(fake_device.counts() - start)
        gc.collect()
        return Cost(
            sum(cost.kernels for cost in costs) / STEPS,
            sum(cost.synchronisations for cost in costs) / STEPS,
            max(cost.synchronisations for cost in costs),
            sum(cost.to_host + cost.to_device for cost in costs) / STEPS,
            (fake_device.allocated() - before) / numel,
        )

    if method is None:
        return train()
    with laconic.Worker(model, optimizer, method):
        return train()


def run(staged: bool, names: list[str]) -> dict[str, Cost]:
    (fake_device.load if staged else strict_group.register)()
    return {"": count(None)} | {name: count(METHODS[name]) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--staged", action="store_true", help="the foreground too goes through host memory")
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    args = parser.parse_args()
    fake_device.load()
    costs = laconic.spawn(run, args.workers, args.staged, args.methods)[0]
    plain = costs.pop("")
    print(f"plain training: {plain.kernels:.0f} kernels, {plain.synchronisations:.0f} synchronisations a step")
    print("| method | kernels | synchronisations | most in a step | copies | bytes per parameter |")
    print("|---|---|---|---|---|---|")
    for name, cost in costs.items():
        print(
            f"| {name} | {cost.kernels - plain.kernels:.0f} | {cost.synchronisations:.1f} | "
            f"{cost.most_synchronisations} | {cost.copies:.1f} | {cost.nbytes - plain.nbytes:.1f} |"
        )


if __name__ == "__main__":
    main()
