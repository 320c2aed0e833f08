"""The order in which a worker reads its samples: shuffled epochs with random access, a pure function of the seed."""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def generator(purpose: str, *keys: int) -> np.random.Generator:
    """Returns a random generator that depends only on `purpose` and `keys`, never on global random state.

    Example:
        >>> bool(generator("example", 1, 2).random() == generator("example", 1, 2).random())
        True
    """
    if min(keys, default=0) < 0:
        raise ValueError(f"seeds must not be negative, but one of {keys} is")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([zlib.crc32(purpose.encode()), *keys])))


class Order:
    """Maps a step to the samples of its batch.

    Epochs follow each other without end; each visits every sample once, in a new random order. All batches are full: a
    batch may span two epochs (or more, if the shard is smaller than a batch). So workers whose shards differ in size
    make the same number of steps.

    Args:
        samples: The indices of this worker's samples.
        batch_size: Samples per batch.
        seed: The seed of the run.
        rank: This worker's rank.

    Example:
        >>> order = Order(np.arange(4), batch_size=3, seed=0, rank=0)
        >>> sorted(int(i) for step in range(4) for i in order(step))  # 12 samples: three epochs
        [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    """

    def __init__(self, samples: Indices, batch_size: int, seed: int, rank: int) -> None:
        assert len(samples) > 0
        assert batch_size > 0
        self.samples = samples
        self.batch_size = batch_size

        @lru_cache(maxsize=2)
        def epoch(number: int) -> Indices:
            return generator("order", seed, rank, number).permutation(samples)

        self._epoch = epoch

    def __call__(self, step: int) -> Indices:
        """Returns the indices of the samples in the batch of `step`, (batch_size,)."""
        if step < 0:
            raise ValueError(f"step must not be negative, not {step}")
        number, offset = divmod(step * self.batch_size, len(self.samples))
        parts: list[Indices] = []
        missing = self.batch_size
        while missing:
            part = self._epoch(number)[offset : offset + missing]
            parts.append(part)
            missing -= len(part)
            number, offset = number + 1, 0
        return np.concatenate(parts)
