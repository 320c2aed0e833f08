"""The task `digits`: scikit-learn's 1797 handwritten digits of 8 × 8 pixels. It needs no download."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from torch import nn

from laconic.extras import MissingExtra
from laconic.rules import check_choice, check_count
from laconic.tasks.classification import Classification, Images, Split
from laconic.tasks.vision import cnn, mlp

MODELS = ("cnn", "mlp", "middle", "wide")
IMAGES = 1797


@dataclass(frozen=True)
class Digits(Classification):
    """Classifies small digits; the fastest task with real data.

    Args:
        model: "cnn" (0.02 M parameters), "mlp" (0.03 M), "middle", an MLP with 0.3 M parameters, or "wide", an MLP with
            1.13 M: large enough that a slow network dominates the step time.
        train_images: How many images all workers train on together; all others are held out. By default four of five
            images are trained on. With few, accuracy is limited by the number of images that a model has learned from.

    Example:
        >>> task = Digits(model="mlp", batch_size=8)
        >>> x, y = task.load(rank=0, size=4, seed=0).batch(0)
        >>> x.shape, y.shape
        (torch.Size([8, 1, 8, 8]), torch.Size([8]))
    """

    name: ClassVar[str] = "digits"
    mean: ClassVar[tuple[float, ...]] = (0.3052,)
    std: ClassVar[tuple[float, ...]] = (0.3763,)
    scale: ClassVar[float] = 16.0

    model: Literal["cnn", "mlp", "middle", "wide"] = "cnn"
    batch_size: int = 32
    lr: float = 2e-3
    steps: int = 200
    train_images: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model", self.model, MODELS)
        if self.train_images is not None:
            check_count("train_images", self.train_images, most=IMAGES - 1)

    def build_model(self) -> nn.Module:
        match self.model:
            case "cnn":
                return cnn(channels=1, side=8, widths=(16, 32), hidden=128)
            case "mlp":
                return mlp(64, 128, 128, 10)
            case "middle":
                return mlp(64, 512, 512, 10)
            case "wide":
                return mlp(64, 1024, 1024, 10)

    def images(self) -> Split:
        return _digits(self.train_images)


@cache
def _digits(train_images: int | None) -> Split:
    # Importing scikit-learn would take every worker seconds, so only its data file is read.
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise MissingExtra("the task digits needs the data file of scikit-learn: pip install 'laconic[tasks]'")
    rows = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.uint8)
    pixels, labels = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)
    if train_images is None:
        # Every fifth image is held out. Cutting at one place would give the test set writers that training never sees.
        train = np.arange(IMAGES) % 5 != 0
    else:
        train = np.zeros(IMAGES, dtype=bool)
        train[np.linspace(0, IMAGES - 1, train_images).round().astype(np.int64)] = True
    return Split(Images(pixels[train], labels[train]), Images(pixels[~train], labels[~train]))
