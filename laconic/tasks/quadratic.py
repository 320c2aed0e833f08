"""The task `quadratic`: synthetic least squares with a known optimum and a known condition number."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from laconic.rules import check_count, check_number
from laconic.tasks.order import generator
from laconic.tasks.task import Batch, Shard, Task, device_of, evaluation_mode


class Problem(NamedTuple):
    """Minimises E ½(a·w − b)² over w, with a ~ N(0, diag(curvature)) and b = a·optimum + noise."""

    curvature: NDArray[np.float32]
    optimum: NDArray[np.float32]


@lru_cache(maxsize=8)
def problem(dimension: int, condition: float) -> Problem:
    """Returns a problem whose curvatures are log-spaced from 1 to 1 / condition and whose optimum has norm 1."""
    curvature = np.geomspace(1.0, 1.0 / condition, dimension).astype(np.float32)
    optimum = generator("quadratic", dimension).standard_normal(dimension)
    return Problem(curvature, (optimum / np.linalg.norm(optimum)).astype(np.float32))


@dataclass(frozen=True)
class Quadratic(Task):
    """Fits a linear model to noisy samples of one problem. Every step draws new samples; none is repeated.

    `evaluate` computes exact expectations: `excess_loss` is the expected loss minus its minimum ½ noise², and
    `distance` is ‖w − optimum‖.

    Args:
        dimension: The number of weights.
        condition: The condition number: the largest curvature over the smallest.
        noise: The standard deviation of the noise in b.

    Example:
        >>> task = Quadratic(dimension=8)
        >>> round(task.evaluate(task.build_model())["distance"], 6)  # training starts at the origin
        1.0
    """

    name: ClassVar[str] = "quadratic"
    metric: ClassVar[str] = "excess_loss"
    higher_is_better: ClassVar[bool] = False
    partitions: ClassVar[tuple[str, ...]] = ("iid",)

    dimension: int = 256
    condition: float = 10.0
    noise: float = 0.1
    batch_size: int = 64
    lr: float = 0.02
    optimizer: Literal["adam", "adamw", "sgd"] = "sgd"
    steps: int = 300

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("dimension", self.dimension)
        check_number("condition", self.condition, least=1)
        check_number("noise", self.noise, least=0)

    def build_model(self) -> nn.Module:
        """Returns a model with zero weights, at distance 1 from the optimum, for every seed."""
        model = nn.Linear(self.dimension, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def load(self, rank: int, size: int, seed: int) -> Shard:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be at least 0 and below size = {size}, not {rank}")
        return NoisyRows(self, rank, seed)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        a, b = (tensor.to(device_of(model)) for tensor in batch)
        return 0.5 * F.mse_loss(model(a).squeeze(1), b)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        curvature, optimum = problem(self.dimension, self.condition)
        with evaluation_mode(model):
            basis = torch.eye(self.dimension, device=device_of(model))
            error = model(basis).squeeze(1).cpu().double().numpy() - optimum
        excess = 0.5 * float(curvature @ error**2)
        return {
            "loss": excess + 0.5 * self.noise**2,
            "excess_loss": excess,
            "distance": float(np.linalg.norm(error)),
        }


@dataclass(frozen=True)
class NoisyRows:
    """Draws rows a, (batch, dimension), and targets b, (batch,), for each step."""

    task: Quadratic
    rank: int
    seed: int

    def batch(self, step: int) -> Batch:
        curvature, optimum = problem(self.task.dimension, self.task.condition)
        rng = generator("rows", self.seed, self.rank, step)
        a = rng.standard_normal((self.task.batch_size, self.task.dimension), dtype=np.float32) * np.sqrt(curvature)
        b = a @ optimum + self.task.noise * rng.standard_normal(self.task.batch_size, dtype=np.float32)
        return torch.from_numpy(a), torch.from_numpy(b.astype(np.float32))
