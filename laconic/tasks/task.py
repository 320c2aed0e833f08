"""A task: what is trained in comparisons, that is a model, its data, its loss and how to judge the result."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from laconic.tasks.partition import parse_partition

Batch = tuple[Tensor, ...]
OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("cosine", "constant")


class Shard(Protocol):
    """One worker's data, with random access: the batch of a step is the same whenever it is asked for."""

    def batch(self, step: int) -> Batch:
        """The tensors of one training step, on the CPU."""


@dataclass(frozen=True)
class Task(ABC):
    """Settings are ordinary fields; a task holds no state, so one instance serves any number of runs."""

    name: ClassVar[str]
    metric: ClassVar[str]
    """The key of `evaluate`'s result that targets and reports go by."""
    higher_is_better: ClassVar[bool]
    dataset: ClassVar[str | None] = None
    """What `laconic data NAME` fetches for it; None when nothing is needed."""
    partitions: ClassVar[tuple[str, ...]] = ("iid", "contiguous", "classes", "dirichlet")

    batch_size: int = 64
    lr: float = 1e-3
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    weight_decay: float = 0.0
    schedule: Literal["cosine", "constant"] = "cosine"
    steps: int = 400
    partition: str = "iid"

    def __post_init__(self) -> None:
        for field in ("batch_size", "steps"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field} must be a whole number of at least 1, not {value!r}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr must be a number above 0, not {self.lr!r}")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ValueError(f"weight_decay must be a number of at least 0, not {self.weight_decay!r}")
        require("optimizer", self.optimizer, OPTIMIZERS)
        require("schedule", self.schedule, SCHEDULES)
        parse_partition(self.partition)
        if self.partition.partition(":")[0] not in self.partitions:
            raise ValueError(f"{self.name}: partition must be {' or '.join(self.partitions)}, not {self.partition!r}")

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A new model, initialised from torch's global generator: seed it first, alike on all workers."""

    @abstractmethod
    def load(self, rank: int, size: int, seed: int) -> Shard:
        """The data of worker `rank` out of `size`."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean training loss of a batch, a scalar; calls the model only through `model(...)`, so wrappers work."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """`loss` and the metric of the bare model on held-out data; leaves no trace in the model or in random state."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        match self.optimizer:
            case "adam":
                return Adam(parameters, lr=self.lr, weight_decay=self.weight_decay)
            case "adamw":
                return AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay)
            case "sgd":
                return SGD(parameters, lr=self.lr, momentum=0.9, nesterov=True, weight_decay=self.weight_decay)

    def build_schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """Linear warm-up over the first twentieth (at most 100 steps), then a cosine to a twentieth of the rate."""
        if self.schedule == "constant":
            return None
        warmup = min(100, steps // 20)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            progress = min(1.0, (step - warmup) / max(1, steps - warmup))
            return 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2

        return LambdaLR(optimizer, factor)


def require(field: str, value: str, choices: tuple[str, ...]) -> None:
    """ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{field} must be one of {', '.join(choices)}, not {value!r}")


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each module is in its own mode again (some may be frozen)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        # Not inference_mode: its tensors could never enter autograd again if the model keeps one.
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
