"""The task `shakespeare`: next-character prediction on 1.1 M characters of Shakespeare; the loss is in nats."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from laconic.rules import check_count, check_flag, check_number
from laconic.tasks.data import text
from laconic.tasks.order import Order
from laconic.tasks.partition import parse_partition, shard_indices
from laconic.tasks.task import Batch, Shard, Task, device_of, evaluation_mode
from laconic.tasks.transformer import CharacterModel

ALPHABET_SIZE = 65
CONTEXT = 64
EVALUATION_WINDOWS = 256


@dataclass(frozen=True)
class Shakespeare(Task):
    """Trains a character-level GPT: 4 layers, width 128, context 64, 0.81 M parameters (809,984).

    A sample is a window of 64 characters; windows do not overlap. With the partition `contiguous`, each worker reads
    its own consecutive part of the plays. `evaluate` uses 256 windows, evenly spaced over the last tenth of the text.

    Args:
        betas: Adam's and AdamW's decay rates; must keep its default with SGD.
        clip: Maximum norm of the gradient, or None for no clipping. The loop clips between `backward()` and
            `optimizer.step()`. So DDP clips the mean gradient, and methods of laconic clip each local gradient.
        accumulate: Micro-batches per step, each of `batch_size` samples; the step uses the mean of their gradients.
        decay_matrices_only: Apply weight decay only to parameters with at least two dimensions, as GPT recipes do:
            not to biases and LayerNorm gains.

    Example:
        >>> recipe = Shakespeare(betas=(0.9, 0.95), clip=1.0, accumulate=4, decay_matrices_only=True)
        >>> [group["weight_decay"] for group in recipe.build_optimizer(recipe.build_model()).param_groups]
        [0.1, 0.0]
    """

    name: ClassVar[str] = "shakespeare"
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    dataset: ClassVar[str | None] = "shakespeare"
    partitions: ClassVar[tuple[str, ...]] = ("iid", "contiguous")

    batch_size: int = 16
    lr: float = 3e-3
    optimizer: Literal["adam", "adamw", "sgd"] = "adamw"
    weight_decay: float = 0.1
    steps: int = 500
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = None
    accumulate: int = 1
    decay_matrices_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise ValueError(f"betas must be two numbers, not {self.betas!r}")
        for beta in self.betas:
            check_number("each of betas", beta, least=0)
        if not all(beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers from 0 up to, not including, 1, not {self.betas!r}")
        if self.optimizer == "sgd" and tuple(self.betas) != (0.9, 0.999):
            raise ValueError(f"betas are for adam and adamw: remove betas={self.betas!r}, or choose another optimizer")
        if self.clip is not None:
            check_number("clip", self.clip, above=0)
        check_count("accumulate", self.accumulate)
        check_flag("decay_matrices_only", self.decay_matrices_only)

    def build_model(self) -> nn.Module:
        return CharacterModel(ALPHABET_SIZE, width=128, layers=4, heads=4)

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        options: dict[str, Any] = {} if self.optimizer == "sgd" else {"betas": tuple(self.betas)}
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.decay_matrices_only:
            return [{"params": parameters, **options}]
        return [
            {"params": [p for p in parameters if p.dim() >= 2], **options},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, **options},
        ]

    def load(self, rank: int, size: int, seed: int) -> Shard:
        characters = text.SHAKESPEARE.arrays()["train"]
        no_labels = np.zeros((len(characters) - 1) // CONTEXT, np.int64)  # one entry per window
        samples = shard_indices(parse_partition(self.partition), no_labels, rank, size, seed)
        return Windows(characters, Order(samples, self.batch_size, seed, rank))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = (tensor.to(device_of(model)) for tensor in batch)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def backward(self, model: nn.Module, shard: Shard, step: int) -> Tensor:
        no_sync = model.no_sync if isinstance(model, DistributedDataParallel) else contextlib.nullcontext
        total = torch.zeros(())
        for micro in range(self.accumulate):
            # DDP would all-reduce in every backward pass; only that of the last micro-batch needs it.
            with contextlib.nullcontext() if micro == self.accumulate - 1 else no_sync():
                loss = self.loss(model, shard.batch(step * self.accumulate + micro)) / self.accumulate
                loss.backward()  # type: ignore[no-untyped-call]
            total = total.to(loss.device) + loss.detach()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        return total

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        characters = text.SHAKESPEARE.arrays()["test"]
        count = (len(characters) - 1) // CONTEXT
        chosen = np.unique(np.linspace(0, count - 1, min(count, EVALUATION_WINDOWS)).astype(np.int64))
        total = 0.0
        with evaluation_mode(model):
            for part in np.array_split(chosen, -(-len(chosen) // 32)):
                total += len(part) * self.loss(model, read_windows(characters, part)).item()
        return {"loss": total / len(chosen)}


def read_windows(characters: NDArray[np.uint8], windows: NDArray[np.int64]) -> Batch:
    """Returns inputs and targets (the inputs shifted by one character), each (batch, context) int64."""
    chosen = np.asarray(characters[windows[:, None] * CONTEXT + np.arange(CONTEXT + 1)], dtype=np.int64)
    joined = torch.from_numpy(chosen)
    return joined[:, :-1].contiguous(), joined[:, 1:].contiguous()


@dataclass(frozen=True)
class Windows:
    """One worker's windows of the text."""

    characters: NDArray[np.uint8]
    order: Order

    def batch(self, step: int) -> Batch:
        return read_windows(self.characters, self.order(step))
