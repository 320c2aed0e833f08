"""The task `fashion`: Fashion-MNIST (Xiao et al. 2017), 70,000 images of clothes, 28 × 28 pixels, ten classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from laconic.rules import check_choice
from laconic.tasks.classification import Classification, Split, split_arrays
from laconic.tasks.data import images
from laconic.tasks.vision import cnn, mlp

MODELS = ("mlp", "cnn")


@dataclass(frozen=True)
class Fashion(Classification):
    """Classifies images of clothes.

    Args:
        model: "mlp" (784-1024-1024-10, 1.86 M parameters) or "cnn" (two convolutions, 0.42 M parameters).
    """

    name: ClassVar[str] = "fashion"
    dataset: ClassVar[str | None] = "fashion"
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)

    model: Literal["mlp", "cnn"] = "mlp"
    batch_size: int = 64
    lr: float = 1e-3
    steps: int = 400

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model", self.model, MODELS)

    def build_model(self) -> nn.Module:
        match self.model:
            case "mlp":
                return mlp(784, 1024, 1024, 10)
            case "cnn":
                return cnn(channels=1, side=28, widths=(32, 64), hidden=128)

    def images(self) -> Split:
        return split_arrays(images.FASHION.arrays())
