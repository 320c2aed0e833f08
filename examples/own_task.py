"""Compares two methods on one's own task, with real processes on this machine.

python examples/own_task.py
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from laconic.bench.run import Plan, run
from laconic.bench.strategies import parse_contender
from laconic.tasks.task import Task


@dataclass(frozen=True)
class Sine(Task):
    """Fits a sine wave."""

    name: ClassVar[str] = "sine"
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    width: int = 32  # a setting

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def load(self, rank: int, size: int, seed: int) -> "Angles":
        return Angles(self.batch_size, seed=1000 * seed + rank)  # each worker reads its own samples

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        (angle,) = batch
        return nn.functional.mse_loss(model(angle), angle.sin())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            return {"loss": self.loss(model, (torch.linspace(-3, 3, 200).unsqueeze(1),)).item()}


@dataclass(frozen=True)
class Angles:
    batch_size: int
    seed: int

    def batch(self, step: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1_000_003 * step + self.seed)
        return (torch.rand(self.batch_size, 1, generator=generator) * 6 - 3,)


if __name__ == "__main__":
    plan = Plan(Sine(lr=1e-2), workers=2, steps=60, link="none")  # link="100mbit" emulates a network
    for method in ("local_sgd+period=4", "allreduce"):
        record = run(parse_contender(method), plan)
        print(f"{method}: {record.status}, loss {record.points[-1].values['loss']:.4f}")
