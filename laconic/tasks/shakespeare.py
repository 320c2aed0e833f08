"""`shakespeare`: the next character of 1.1 M of them, loss in nats a character."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from laconic.tasks.data import text
from laconic.tasks.order import Order
from laconic.tasks.partition import deal, parse_partition
from laconic.tasks.task import Batch, Shard, Task, device_of, evaluating
from laconic.tasks.transformer import CharacterModel

ALPHABET = 65
CONTEXT = 64
EVALUATION_WINDOWS = 256


@dataclass(frozen=True)
class Shakespeare(Task):
    """A GPT of 4 layers, width 128 and context 64, 0.83 M parameters.

    A sample is a window of 64 characters; windows do not overlap. `contiguous` gives each worker a stretch of the
    plays. `evaluate` takes 256 windows spread evenly over the last tenth of the text.
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

    def build_model(self) -> nn.Module:
        return CharacterModel(ALPHABET, width=128, layers=4, heads=4)

    def load(self, rank: int, size: int, seed: int) -> Shard:
        characters = text.SHAKESPEARE.arrays()["train"]
        windows = np.zeros((len(characters) - 1) // CONTEXT, np.int64)
        samples = deal(parse_partition(self.partition), windows, rank, size, seed)
        return Windows(characters, Order(samples, self.batch_size, seed, rank))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = (tensor.to(device_of(model)) for tensor in batch)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        characters = text.SHAKESPEARE.arrays()["test"]
        count = (len(characters) - 1) // CONTEXT
        chosen = np.unique(np.linspace(0, count - 1, min(count, EVALUATION_WINDOWS)).astype(np.int64))
        total = 0.0
        with evaluating(model):
            for part in np.array_split(chosen, -(-len(chosen) // 32)):
                total += len(part) * self.loss(model, windows_of(characters, part)).item()
        return {"loss": total / len(chosen)}


def windows_of(characters: NDArray[np.uint8], windows: NDArray[np.int64]) -> Batch:
    """Characters and, one place on, those to be predicted, each (batch, context) int64."""
    chosen = np.asarray(characters[windows[:, None] * CONTEXT + np.arange(CONTEXT + 1)], dtype=np.int64)
    joined = torch.from_numpy(chosen)
    return joined[:, :-1].contiguous(), joined[:, 1:].contiguous()


@dataclass(frozen=True)
class Windows:
    """One worker's windows of the text."""

    characters: NDArray[np.uint8]
    order: Order

    def batch(self, step: int) -> Batch:
        return windows_of(self.characters, self.order(step))
