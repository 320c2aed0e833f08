"""`RandomBlock`: one contiguous block a step, the same on all workers, so codes can be added and need no indices."""

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.compress.compressor import Compressor, check_finite, check_sum_finite, view_as
from laconic.compress.random import mix, permuted


@dataclass(frozen=True)
class RandomBlock(Compressor):
    """⌈numel/ratio⌉ consecutive entries, chosen by `seed` and step, in full precision.

    A cycle of at most ⌈ratio⌉ steps visits each block, and so each entry, exactly once, in an order of its own. All
    codes have one size; where the vector does not divide evenly, the code of its last block ends in zeros.
    """

    ratio: float = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.ratio < float("inf"):
            raise ValueError(f"ratio must be finite and at least 1, not {self.ratio}")

    def length(self, numel: int) -> int:
        """Entries in a block."""
        return max(1, int(-(-numel // self.ratio))) if numel else 0

    def cycle(self, numel: int) -> int:
        """Steps in which each entry is visited once."""
        return -(-numel // self.length(numel)) if numel else 1

    def bounds(self, numel: int, step: int) -> tuple[int, int]:
        """Where the block of this step starts and stops."""
        cycle, length = self.cycle(numel), self.length(numel)
        turn, position = divmod(step, cycle)
        start = permuted(position, cycle, mix(self.seed, turn)) * length
        return start, min(start + length, numel)

    def nbytes(self, numel: int) -> int:
        return 4 * self.length(numel)

    def _encode(self, x: Tensor, out: Tensor, step: int) -> None:
        start, stop = self.bounds(x.numel(), step)
        self._write(x[start:stop], out)

    def _write(self, values: Tensor, out: Tensor) -> None:
        check_finite(values)
        used = 4 * values.numel()
        if used < out.numel():
            out[used:] = 0
            out = out[:used]
        out.copy_(values.view(torch.uint8))

    def _values(self, code: Tensor, numel: int, step: int) -> tuple[int, int, Tensor]:
        start, stop = self.bounds(numel, step)
        values = view_as(code, torch.float32)[: stop - start]
        check_finite(values)
        return start, stop, values

    def _decode(self, code: Tensor, target: Tensor, step: int) -> None:
        start, stop, values = self._values(code, target.numel(), step)
        target.zero_()
        target[start:stop] = values

    def _decode_add(self, code: Tensor, target: Tensor, scale: float, step: int) -> None:
        start, stop, values = self._values(code, target.numel(), step)
        target[start:stop] += values * scale

    def _encode_with_feedback(self, x: Tensor | None, residual: Tensor, out: Tensor, step: int) -> None:
        if residual.dtype != torch.float32:
            super()._encode_with_feedback(x, residual, out, step)
            return
        if x is not None:
            check_sum_finite(x, residual)
            residual.add_(x)
        start, stop = self.bounds(residual.numel(), step)
        values = residual[start:stop]
        self._write(values, out)
        values.zero_()
