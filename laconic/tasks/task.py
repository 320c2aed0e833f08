"""The interface of a task: a model, its data, its loss, its optimizer and its evaluation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from laconic.rules import check_choice, check_count, check_number, check_text
from laconic.tasks.partition import parse_partition

Batch = tuple[Tensor, ...]
OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("cosine", "constant")

MOST_RATE = 1e6  # of lr and weight_decay; larger ones are typing errors


class Shard(Protocol):
    """One worker's training data, with random access by step."""

    def batch(self, step: int) -> Batch:
        """Returns the tensors of one training step, on the CPU. The same step always gives the same batch."""


@dataclass(frozen=True)
class Task(ABC):
    """Defines what is trained. Settings are dataclass fields; a task has no state, so one instance serves many runs.

    Args:
        batch_size: Samples per worker and step.
        lr: The peak learning rate.
        optimizer: "adam", "adamw", or "sgd" (Nesterov momentum 0.9).
        weight_decay: As the optimizer defines it.
        schedule: "cosine" (with linear warm-up) or "constant".
        steps: The default length of a training run.
        partition: How samples are divided among workers: "iid", "contiguous", "classes:2" (classes per worker) or
            "dirichlet:0.3"; see docs/tasks.md.

    Example:
        >>> from laconic.tasks import Quadratic
        >>> task = Quadratic(dimension=4)
        >>> shard = task.load(rank=0, size=2, seed=0)
        >>> model = task.build_model()
        >>> task.loss(model, shard.batch(0)).shape
        torch.Size([])
        >>> sorted(task.evaluate(model))
        ['distance', 'excess_loss', 'loss']
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    """The key of `evaluate`'s result that targets and reports use."""
    higher_is_better: ClassVar[bool]
    dataset: ClassVar[str | None] = None
    """The NAME in `laconic data NAME` that downloads the data; None if the task needs no download."""
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
            check_count(field, getattr(self, field))
        check_number("lr", self.lr, above=0, most=MOST_RATE)
        check_number("weight_decay", self.weight_decay, least=0, most=MOST_RATE)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_text("partition", self.partition, "iid")
        parse_partition(self.partition)
        if self.partition.partition(":")[0] not in self.partitions:
            raise ValueError(f"{self.name}: partition must be {' or '.join(self.partitions)}, not {self.partition!r}")

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Returns a new model, initialised from torch's global generator. Seed it identically on all workers first."""

    @abstractmethod
    def load(self, rank: int, size: int, seed: int) -> Shard:
        """Returns the training data of worker `rank` out of `size`."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean training loss of a batch, a scalar.

        Calls the model only through `model(...)`, so that wrappers such as DistributedDataParallel work.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns `loss` and the metric on held-out data. Changes neither the model nor any random state.

        Args:
            model: The bare model, not a DistributedDataParallel wrapper.
        """

    def backward(self, model: nn.Module, shard: Shard, step: int) -> Tensor:
        """Computes the gradients of one training step and returns its loss, detached from the graph.

        Tasks override this to accumulate gradients over several batches or to clip them.
        """
        loss = self.loss(model, shard.batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Returns the optimizer's parameter groups; by default one group of all trained parameters."""
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Returns the optimizer that `optimizer`, `lr` and `weight_decay` describe."""
        groups = self.parameter_groups(model)
        match self.optimizer:
            case "adam":
                return Adam(groups, lr=self.lr, weight_decay=self.weight_decay)
            case "adamw":
                return AdamW(groups, lr=self.lr, weight_decay=self.weight_decay)
            case "sgd":
                return SGD(groups, lr=self.lr, momentum=0.9, nesterov=True, weight_decay=self.weight_decay)

    def build_schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """Returns the learning-rate schedule of a run of `steps` steps, or None for a constant rate.

        The rate rises linearly over the first 5 % of the steps (at most 100), then falls by a cosine to 5 % of `lr`.
        """
        if self.schedule == "constant":
            return None
        warmup = min(100, steps // 20)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            progress = min(1.0, (step - warmup) / max(1, steps - warmup))
            return 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2

        return LambdaLR(optimizer, factor)


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the model's first parameter."""
    return next(model.parameters()).device


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switches to evaluation mode without gradients, and restores the mode of every module afterwards.

    Modules are restored one by one because some may be frozen, that is in evaluation mode during training.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        # Not inference_mode: a tensor that the model caches there could never be used by autograd again.
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
