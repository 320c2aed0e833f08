"""What image classification tasks have in common: arrays of pixels in, accuracy out."""

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
from laconic.tasks.partition import deal, parse_partition
from laconic.tasks.task import Batch, Shard, Task, device_of, evaluating

EVALUATION_BATCH = 500


class Images(NamedTuple):
    """Pixels as stored, (n, height, width[, channels]) uint8, possibly memory-mapped, and labels, (n,)."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.integer]


class Split(NamedTuple):
    train: Images
    test: Images


def split(arrays: Arrays) -> Split:
    """From arrays named x_train, y_train, x_test and y_test."""
    train, test = (Images(arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test"))
    return Split(train, test)


@dataclass(frozen=True)
class Classification(Task):
    """A task over labelled images; pixels become normalised float32 only in the batch that needs them."""

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    scale: ClassVar[float] = 255.0

    @abstractmethod
    def images(self) -> Split:
        """Training and test images; called in every worker, so it must be quick and share memory."""

    def load(self, rank: int, size: int, seed: int) -> Shard:
        train = self.images().train
        samples = deal(parse_partition(self.partition), train.labels, rank, size, seed)
        return ImageShard(self, train, Order(samples, self.batch_size, seed, rank), seed, rank)

    def augmented(self, pixels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """The pixels of a training batch, changed at random in ways that keep their class; by default as they are."""
        return pixels

    def tensors(self, pixels: NDArray[np.uint8], labels: NDArray[np.integer]) -> Batch:
        """(batch, channels, height, width) float32 and (batch,) int64."""
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
        with evaluating(model):
            for start in range(0, len(test.labels), EVALUATION_BATCH):
                part = slice(start, start + EVALUATION_BATCH)
                x, y = (t.to(device_of(model)) for t in self.tensors(test.pixels[part], test.labels[part]))
                logits = model(x)
                total_loss += F.cross_entropy(logits, y, reduction="sum").item()
                correct += int((logits.argmax(dim=1) == y).sum())
        return {"loss": total_loss / len(test.labels), "accuracy": correct / len(test.labels)}


@dataclass(frozen=True)
class ImageShard:
    """The images of one worker."""

    task: Classification
    images: Images
    order: Order
    seed: int
    rank: int

    def batch(self, step: int) -> Batch:
        chosen = self.order(step)
        pixels = self.task.augmented(self.images.pixels[chosen], generator("augment", self.seed, self.rank, step))
        return self.task.tensors(pixels, self.images.labels[chosen])
