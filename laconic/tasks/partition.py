"""Divides samples among workers. Every sample goes to exactly one worker, and every worker gets samples."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laconic.tasks.order import Indices, generator

Labels = NDArray[np.integer]


class Partition(ABC):
    """A rule that divides samples among workers."""

    @abstractmethod
    def split(self, labels: Labels, size: int, rng: np.random.Generator) -> list[Indices]:
        """Returns the sample indices of each of the `size` workers. `labels` has one entry per sample."""


@dataclass(frozen=True)
class Iid(Partition):
    """Shuffles, then cuts into equal parts."""

    def split(self, labels: Labels, size: int, rng: np.random.Generator) -> list[Indices]:
        return np.array_split(rng.permutation(len(labels)), size)


@dataclass(frozen=True)
class Contiguous(Partition):
    """Cuts into equal parts in file order. For text, each worker reads a different part of the book."""

    def split(self, labels: Labels, size: int, rng: np.random.Generator) -> list[Indices]:
        return np.array_split(np.arange(len(labels)), size)


@dataclass(frozen=True)
class Classes(Partition):
    """Sorts by class, cuts into size × shards_per_worker equal shards, and gives each worker `shards_per_worker`.

    A shard that crosses a class boundary holds two classes, so `classes:2` means *about* two classes per worker.

    References:
        McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data.
    """

    shards_per_worker: int

    def split(self, labels: Labels, size: int, rng: np.random.Generator) -> list[Indices]:
        count = self.shards_per_worker
        if len(labels) < size * count:
            raise ValueError(f"classes:{count} over {size} workers needs {size * count} samples, not {len(labels)}")
        shuffled = rng.permutation(len(labels))
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        shards = np.array_split(by_label, size * count)
        chosen = rng.permutation(len(shards)).reshape(size, count)
        return [np.concatenate([shards[i] for i in row]) for row in chosen]


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Divides each class among the workers in proportions drawn from Dirichlet(concentration).

    Every worker gets at least a tenth of an equal share, and at least one sample: missing samples are moved from the
    worker that has most.

    References:
        Hsu et al. 2019, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification.
    """

    concentration: float

    def split(self, labels: Labels, size: int, rng: np.random.Generator) -> list[Indices]:
        parts: list[list[Indices]] = [[] for _ in range(size)]
        for label in np.unique(labels):
            of_class = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(size, self.concentration))
            cuts = np.rint(np.cumsum(shares)[:-1] * len(of_class)).astype(np.int64)
            for shard, part in zip(parts, np.split(of_class, cuts), strict=True):
                shard.append(part)
        shards = [rng.permutation(np.concatenate(shard)) for shard in parts]
        floor = max(1, len(labels) // (10 * size))
        for worker in range(size):
            while (missing := floor - len(shards[worker])) > 0:
                largest = max(range(size), key=lambda other: len(shards[other]))
                moved = min(missing, len(shards[largest]) - floor)
                shards[worker] = np.concatenate([shards[worker], shards[largest][:moved]])
                shards[largest] = shards[largest][moved:]
        return shards


PARTITION_SYNTAX = "iid, contiguous, classes:K (such as classes:2) or dirichlet:A (such as dirichlet:0.3)"


def parse_partition(text: str) -> Partition:
    """Returns the partition that `text` describes.

    Args:
        text: `iid`, `contiguous`, `classes:K` (about K classes per worker) or `dirichlet:A` (concentration A).

    Raises:
        ValueError: `text` has none of these forms.

    Example:
        >>> parse_partition("classes:2")
        Classes(shards_per_worker=2)
    """
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
    raise ValueError(f"partition must be {PARTITION_SYNTAX}, not {text!r}")


def shard_indices(partition: Partition, labels: Labels, rank: int, size: int, seed: int) -> Indices:
    """Returns the sample indices of worker `rank` out of `size`.

    The seed alone decides, so all workers compute the same division without communicating.

    Raises:
        ValueError: There are fewer samples than workers, or `rank` is not in 0 … size − 1.

    Example:
        >>> shard_indices(Contiguous(), np.zeros(6), rank=1, size=3, seed=0)
        array([2, 3])
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank must be at least 0 and below size = {size}, not {rank}")
    if len(labels) < size:
        raise ValueError(f"{size} workers need at least {size} samples, not {len(labels)}")
    return partition.split(labels, size, generator("partition", seed))[rank]
