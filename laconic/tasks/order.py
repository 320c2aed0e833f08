"""The order of samples: a random-access stream of shuffled epochs, a pure function of its keys."""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def generator(purpose: str, *keys: int) -> np.random.Generator:
    """A generator that depends on the purpose and the keys only, never on global random state."""
    if min(keys, default=0) < 0:
        raise ValueError(f"seeds must not be negative, not {keys}")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([zlib.crc32(purpose.encode()), *keys])))


class Order:
    """Which of a worker's samples make up the batch of step t: full batches cut from one endless row of epochs.

    Each epoch visits every sample once, in an order of its own. A batch may span two epochs (or many, when the shard is
    smaller than a batch), so workers whose shards differ in size stay in step.
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
        """The samples of the batch of `step`, (batch_size,)."""
        if step < 0:
            raise ValueError(f"step must not be negative, not {step}")
        number, offset = divmod(step * self.batch_size, len(self.samples))
        pieces: list[Indices] = []
        missing = self.batch_size
        while missing:
            piece = self._epoch(number)[offset : offset + missing]
            pieces.append(piece)
            missing -= len(piece)
            number, offset = number + 1, 0
        return np.concatenate(pieces)
