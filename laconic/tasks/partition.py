"""How the samples are dealt to the workers: every sample to exactly one, and none goes without."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laconic.tasks.order import Indices, generator

Labels = NDArray[np.integer]


class Partition(ABC):
    """A rule that deals samples; `by_class` rules need a label per sample."""

    by_class = False

    @abstractmethod
    def deal(self, labels: Labels, size: int, rng: np.random.Generator) -> list[Indices]:
        """The samples of each of the `size` workers; `labels` has one entry a sample."""


@dataclass(frozen=True)
class Iid(Partition):
    """Shuffle, then cut into equal parts."""

    def deal(self, labels: Labels, size: int, rng: np.random.Generator) -> list[Indices]:
        return np.array_split(rng.permutation(len(labels)), size)


@dataclass(frozen=True)
class Contiguous(Partition):
    """Equal stretches in the order of the file: for text, each worker reads another part of the book."""

    def deal(self, labels: Labels, size: int, rng: np.random.Generator) -> list[Indices]:
        return np.array_split(np.arange(len(labels)), size)


@dataclass(frozen=True)
class Classes(Partition):
    """McMahan et al. 2017: sort by class, cut into size × pieces equal pieces, deal `pieces` of them to each worker.

    A piece that straddles a boundary holds two classes, so `classes:2` means *about* two: with fewer workers than
    classes nothing else uses every sample.
    """

    pieces: int
    by_class = True

    def deal(self, labels: Labels, size: int, rng: np.random.Generator) -> list[Indices]:
        if len(labels) < size * self.pieces:
            needed = size * self.pieces
            raise ValueError(f"classes:{self.pieces} over {size} workers needs {needed} samples, not {len(labels)}")
        shuffled = rng.permutation(len(labels))
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        pieces = np.array_split(by_label, size * self.pieces)
        hands = rng.permutation(len(pieces)).reshape(size, self.pieces)
        return [np.concatenate([pieces[i] for i in hand]) for hand in hands]


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Hsu et al. 2019: each class is divided among the workers in proportions drawn from Dirichlet(concentration).

    No worker gets less than a tenth of an equal share (and at least one sample): one that would takes what it lacks
    from whoever then has most.
    """

    concentration: float
    by_class = True

    def deal(self, labels: Labels, size: int, rng: np.random.Generator) -> list[Indices]:
        hands: list[list[Indices]] = [[] for _ in range(size)]
        for label in np.unique(labels):
            of_class = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(size, self.concentration))
            cuts = np.rint(np.cumsum(shares)[:-1] * len(of_class)).astype(np.int64)
            for hand, part in zip(hands, np.split(of_class, cuts), strict=True):
                hand.append(part)
        dealt = [rng.permutation(np.concatenate(hand)) for hand in hands]
        floor = max(1, len(labels) // (10 * size))
        for worker in range(size):
            while (lacking := floor - len(dealt[worker])) > 0:
                richest = max(range(size), key=lambda other: len(dealt[other]))
                given = min(lacking, len(dealt[richest]) - floor)
                dealt[worker] = np.concatenate([dealt[worker], dealt[richest][:given]])
                dealt[richest] = dealt[richest][given:]
        return dealt


FORMS = "iid, contiguous, classes:K (such as classes:2) or dirichlet:A (such as dirichlet:0.3)"


def parse_partition(text: str) -> Partition:
    """`iid`, `contiguous`, `classes:2` or `dirichlet:0.3`; ValueError for anything else."""
    kind, colon, value = text.partition(":")
    if text == "iid":
        return Iid()
    if text == "contiguous":
        return Contiguous()
    if kind == "classes" and colon:
        if not (value.isascii() and value.isdigit() and int(value) >= 1):
            raise ValueError(f"classes:K needs a whole number of at least 1, not {text!r}")
        return Classes(int(value))
    if kind == "dirichlet" and colon:
        try:
            concentration = float(value)
        except ValueError:
            concentration = math.nan
        if not (concentration > 0 and math.isfinite(concentration)):
            raise ValueError(f"dirichlet:A needs a number above 0, not {text!r}")
        return Dirichlet(concentration)
    raise ValueError(f"partition must be {FORMS}, not {text!r}")


def deal(partition: Partition, labels: Labels, rank: int, size: int, seed: int) -> Indices:
    """The samples of worker `rank` out of `size`; all workers with one seed agree on who holds what."""
    if not 0 <= rank < size:
        raise ValueError(f"rank must be at least 0 and below size = {size}, not {rank}")
    if len(labels) < size:
        raise ValueError(f"{size} workers need at least {size} samples, not {len(labels)}")
    return partition.deal(labels, size, generator("partition", seed))[rank]
