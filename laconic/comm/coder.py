"""Encodes the parts of a vector as one message, and marks messages of vectors that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.compress import Compressor, encode_with_feedback
from laconic.compress.blockwise import Blockwise
from laconic.compress.compressor import unchecked

# A message that is full of this byte stands for a vector with a NaN or an infinity. No compressor writes such a
# message: each begins with a float, and these bytes are a NaN in fp32, fp16 and bf16.
NOT_FINITE = 255


class Part(NamedTuple):
    """Entries `start` to `stop` of a vector, averaged by the rank `owner`."""

    start: int
    stop: int
    owner: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def split(start: int, stop: int, owners: Sequence[int], unit: int = 1) -> list[Part]:
    """Splits the entries `start` to `stop` into one part per owner: whole units, equal to within one unit.

    >>> split(0, 10, owners=[0, 1, 2])
    [Part(start=0, stop=3, owner=0), Part(start=3, stop=6, owner=1), Part(start=6, stop=10, owner=2)]
    """
    units = -(-(stop - start) // unit)
    bounds = [min(stop, start + unit * (i * units // len(owners))) for i in range(len(owners) + 1)]
    return [Part(bounds[i], bounds[i + 1], owner) for i, owner in enumerate(owners)]


def block_of(compressor: Compressor) -> int:
    """Returns how many consecutive entries share one scale; 1 for compressors without blocks."""
    return compressor.block if isinstance(compressor, Blockwise) else 1


class Coder:
    """Encodes neighbouring parts of a vector one by one, end to end in one message.

    The code of a part does not depend on its neighbours, so it is the same whoever owns them. Where a single call
    writes the same message, it is used: that is faster.
    """

    def __init__(self, compressor: Compressor, parts: Sequence[Part], seed: int, seeds: int) -> None:
        self.numel = sum(part.numel for part in parts)
        self._takes_anything = compressor.takes_anything
        self._numels = [part.numel for part in parts]
        self._compressors = [compressor.with_stream(part.start * seeds + seed) for part in parts]
        if parts and _is_sliceable(compressor) and all(n % block_of(compressor) == 0 for n in self._numels[:-1]):
            self._numels, self._compressors = [self.numel], [compressor]
        self._nbytes = [compressor.nbytes(numel) for numel in self._numels]

    def is_late(self, x: Tensor) -> bool:
        """Returns whether values are on a device, and are checked without making the host wait."""
        return x.device.type != "cpu" and self._takes_anything

    def _checks(self, x: Tensor) -> AbstractContextManager[None]:
        return unchecked() if self.is_late(x) else nullcontext()

    def encode(self, vector: Tensor, residual: Tensor | None, step: int) -> Tensor:
        if not self.is_late(vector):
            return self._encode(vector, residual, step)
        with unchecked():
            message = self._encode(vector, residual, step)
        return torch.where(torch.isfinite(vector).all(), message, NOT_FINITE)

    def _encode(self, vector: Tensor, residual: Tensor | None, step: int) -> Tensor:
        message = torch.empty(sum(self._nbytes), dtype=torch.uint8, device=vector.device)
        vectors, codes = _split(vector, self._numels), _split(message, self._nbytes)
        residuals = [None] * len(vectors) if residual is None else _split(residual, self._numels)
        for compressor, x, e, code in zip(self._compressors, vectors, residuals, codes, strict=True):
            try:
                if e is None:
                    compressor.encode(x, step=step, out=code)
                else:
                    encode_with_feedback(compressor, x, e, step=step, out=code)
            except ValueError:
                if bool(torch.isfinite(x).all()):
                    raise
                return self.not_finite(vector.device)  # the other ranks wait for a message
        return message

    def decode(self, message: Tensor, out: Tensor | None, step: int) -> Tensor:
        if out is None:
            out = torch.empty(self.numel, dtype=torch.float32, device=message.device)
        codes, vectors = _split(message, self._nbytes), _split(out, self._numels)
        with self._checks(message):
            for compressor, code, x in zip(self._compressors, codes, vectors, strict=True):
                compressor.decode(code, x.numel(), step=step, out=x)
        return out

    def decode_add(self, message: Tensor, total: Tensor, step: int) -> None:
        codes, vectors = _split(message, self._nbytes), _split(total, self._numels)
        with self._checks(message):
            for compressor, code, x in zip(self._compressors, codes, vectors, strict=True):
                compressor.decode_add(code, x, step=step)

    def not_finite(self, device: torch.device) -> Tensor:
        return torch.full((sum(self._nbytes),), NOT_FINITE, dtype=torch.uint8, device=device)


def _split(tensor: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """torch.split, but without the time for a view where there is one size."""
    return (tensor,) if len(sizes) == 1 else torch.split(tensor, sizes)


def _is_sliceable(compressor: Compressor) -> bool:
    """Whether the codes of consecutive whole blocks, end to end, are the code of all of them."""
    return isinstance(compressor, Blockwise) and compressor.with_stream(1) == compressor


def any_marked(messages: Sequence[Tensor]) -> Tensor:
    """Whether some message stands for a vector with a NaN or an infinity, as a tensor on the device."""
    marked = [(message == NOT_FINITE).all() for message in messages if message.numel()]
    return torch.stack(marked).any() if marked else torch.zeros((), dtype=torch.bool, device=messages[0].device)


def is_unmarked(message: Tensor) -> bool:
    """Whether the message does not stand for a vector with a NaN or an infinity. Reads 4 bytes of most messages."""
    return set(message[:4].tolist()) != {NOT_FINITE} or not bool((message == NOT_FINITE).all())
