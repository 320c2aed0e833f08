"""The base class of image classification tasks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from laconic.tasks.data.dataset import Arrays
from laconic.tasks.order import Order, generator
from laconic.tasks.partition import parse_partition, shard_indices
from laconic.tasks.task import Batch, Shard, Task, device_of, evaluation_mode

EVALUATION_BATCH = 500


class Images(NamedTuple):
    """Pixels as stored, (n, height, width[, channels]) uint8 and possibly memory-mapped, and labels (n,)."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.integer]


class Split(NamedTuple):
    """The training set and the test set."""

    train: Images
    test: Images


def split_arrays(arrays: Arrays) -> Split:
    """Returns the split stored in arrays named x_train, y_train, x_test and y_test."""
    train, test = (Images(arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test"))
    return Split(train, test)


@dataclass(frozen=True)
class Classification(Task):
    """Classifies images. The metric is accuracy.

    Pixels are converted to normalised float32 batch by batch, so that workers share the stored uint8 array.
    """

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    scale: ClassVar[float] = 255.0

    @abstractmethod
    def images(self) -> Split:
        """Returns training and test images. Every worker calls it, so it must be fast and share memory."""

    def load(self, rank: int, size: int, seed: int) -> Shard:
        train = self.images().train
        samples = shard_indices(parse_partition(self.partition), train.labels, rank, size, seed)
        return ImageShard(self, train, Order(samples, self.batch_size, seed, rank), seed, rank)

    def augmented(self, pixels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Returns the pixels of a training batch after data augmentation; by default unchanged."""
        return pixels

    def tensors(self, pixels: NDArray[np.uint8], labels: NDArray[np.integer]) -> Batch:
        """Returns normalised pixels, (batch, channels, height, width) float32, and labels, (batch,) int64."""
        x = pixels.astype(np.float32)
        if x.ndim == 3:
            x = x[..., None]
        x -= np.asarray(self.mean, np.float32) * self.scale
        x /= np.asarray(self.std, np.float32) * self.scale
        return torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels.astype(np.int64))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = (tensor.to(device_of(model)) for tensor in batch)
        return F.cross_entropy(model(x), y)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        test = self.images().test
        total_loss = 0.0
        correct = 0
        with evaluation_mode(model):
            for start in range(0, len(test.labels), EVALUATION_BATCH):
                part = slice(start, start + EVALUATION_BATCH)
                x, y = (t.to(device_of(model)) for t in self.tensors(test.pixels[part], test.labels[part]))
                logits = model(x)
                total_loss += F.cross_entropy(logits, y, reduction="sum").item()
                correct += int((logits.argmax(dim=1) == y).sum())
        return {"loss": total_loss / len(test.labels), "accuracy": correct / len(test.labels)}


@dataclass(frozen=True)
class ImageShard:
    """One worker's images."""

    task: Classification
    images: Images
    order: Order
    seed: int
    rank: int

    def batch(self, step: int) -> Batch:
        chosen = self.order(step)
        pixels = self.task.augmented(self.images.pixels[chosen], generator("augment", self.seed, self.rank, step))
        return self.task.tensors(pixels, self.images.labels[chosen])
