"""The task `cifar10`: CIFAR-10 (Krizhevsky 2009), 60,000 colour photographs of 32 × 32 pixels in ten classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from laconic.rules import check_choice, check_flag
from laconic.tasks.classification import Classification, Split, split_arrays
from laconic.tasks.data import images
from laconic.tasks.vision import resnet

MODELS = ("resnet8", "resnet20")
PADDING = 4


@dataclass(frozen=True)
class Cifar10(Classification):
    """Trains a ResNet with BatchNorm.

    Args:
        model: "resnet20" (0.27 M parameters) or, for slow machines, "resnet8" (0.08 M).
        subset: Use only the first 800 training and 200 test images of each class.
        augment: Shift and mirror training images at random.
    """

    name: ClassVar[str] = "cifar10"
    dataset: ClassVar[str | None] = "cifar10"
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)

    model: Literal["resnet8", "resnet20"] = "resnet20"
    subset: bool = False
    augment: bool = True
    batch_size: int = 64
    lr: float = 0.1
    optimizer: Literal["adam", "adamw", "sgd"] = "sgd"
    weight_decay: float = 5e-4
    steps: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model", self.model, MODELS)
        check_flag("subset", self.subset)
        check_flag("augment", self.augment)

    def build_model(self) -> nn.Module:
        return resnet(blocks=1 if self.model == "resnet8" else 3, width=16)

    def images(self) -> Split:
        return split_arrays((images.CIFAR10_SUBSET if self.subset else images.CIFAR10).arrays())

    def augmented(self, pixels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Returns each image shifted by up to 4 pixels (filled with black), and half of the images mirrored."""
        if not self.augment:
            return pixels
        n, height, width, channels = pixels.shape
        padded = np.zeros((n, height + 2 * PADDING, width + 2 * PADDING, channels), np.uint8)
        padded[:, PADDING:-PADDING, PADDING:-PADDING] = pixels
        rows = rng.integers(0, 2 * PADDING + 1, (n, 1, 1)) + np.arange(height)[:, None]
        columns = np.arange(width)
        mirrored = np.where(rng.random((n, 1, 1)) < 0.5, columns[::-1], columns)
        columns = rng.integers(0, 2 * PADDING + 1, (n, 1, 1)) + mirrored
        shifted: NDArray[np.uint8] = padded[np.arange(n)[:, None, None], rows, columns]
        return shifted
