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

from laconic.tasks.order import Indices, Order
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
        return ImageShard(self, train, Order(samples, self.batch_size, seed, rank))

    def tensors(self, images: Images, samples: Indices | slice) -> Batch:
        """(batch, channels, height, width) float32 and (batch,) int64."""
        pixels = np.asarray(images.pixels[samples], dtype=np.float32)
        if pixels.ndim == 3:
            pixels = pixels[..., None]
        pixels /= self.scale
        pixels -= np.asarray(self.mean, dtype=np.float32)
        pixels /= np.asarray(self.std, dtype=np.float32)
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
        return x, torch.from_numpy(np.asarray(images.labels[samples], dtype=np.int64))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = (tensor.to(device_of(model)) for tensor in batch)
        return F.cross_entropy(model(x), y)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        test = self.images().test
        total_loss = 0.0
        correct = 0
        with evaluating(model):
            for start in range(0, len(test.labels), EVALUATION_BATCH):
                x, y = (t.to(device_of(model)) for t in self.tensors(test, slice(start, start + EVALUATION_BATCH)))
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

    def batch(self, step: int) -> Batch:
        return self.task.tensors(self.images, self.order(step))
