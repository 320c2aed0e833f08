"""`RandomBlock`: one contiguous block a step, the same on all workers, so codes need no indices and can be summed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.compress.compressor import Compressor, check_finite, check_sum_finite, reinterpret
from laconic.compress.random import derive_key, permuted_index
from laconic.rules import check_number, check_seed


@dataclass(frozen=True)
class RandomBlock(Compressor):
    """Sends one block of ⌈numel/ratio⌉ consecutive entries a step, uncompressed; all other entries decode to 0.

    Steps are grouped into cycles of at most ⌈ratio⌉ steps. Each cycle visits every block, and so every entry, exactly
    once, in a new random order. All codes have the same size: if the last block is shorter, its code ends in zeros.
    All workers must use the same `seed`; then codes of the same step can be added as fp32 vectors, e.g. by all-reduce.

    Args:
        ratio: the compression ratio, at least 1.
        seed: selects the random order.

    Example:
        >>> import torch
        >>> from laconic.compress import RandomBlock
        >>> compressor, x = RandomBlock(ratio=2), torch.arange(1.0, 5.0)
        >>> [compressor.decode(compressor.encode(x, step=step), 4, step=step) for step in range(2)]
        [tensor([0., 0., 3., 4.]), tensor([1., 2., 0., 0.])]

    References:
        Wangni, Wang, Liu, Zhang, "Gradient Sparsification for Communication-Efficient Distributed Optimization",
        NeurIPS 2018, arXiv 1710.09854 (random sparsification, entry by entry).

        Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
        NeurIPS 2019, arXiv 1905.13727 (random blocks, as a baseline).
    """

    ratio: float = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, least=1)
        check_seed(self.seed)

    def length(self, numel: int) -> int:
        """Returns the number of entries in a block."""
        return max(1, int(-(-numel // self.ratio))) if numel else 0

    def cycle(self, numel: int) -> int:
        """Returns the number of steps in which each entry is sent once."""
        return -(-numel // self.length(numel)) if numel else 1

    def bounds(self, numel: int, step: int) -> tuple[int, int]:
        """Returns the start and the end of the block that is sent at `step`."""
        cycle, length = self.cycle(numel), self.length(numel)
        cycle_number, position = divmod(step, cycle)
        start = permuted_index(position, cycle, derive_key(self.seed, cycle_number)) * length
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

    def _read(self, code: Tensor, numel: int, step: int) -> tuple[int, int, Tensor]:
        start, stop = self.bounds(numel, step)
        values = reinterpret(code, torch.float32)[: stop - start]
        check_finite(values)
        return start, stop, values

    def _decode(self, code: Tensor, target: Tensor, step: int) -> None:
        start, stop, values = self._read(code, target.numel(), step)
        target.zero_()
        target[start:stop] = values

    def _decode_add(self, code: Tensor, target: Tensor, scale: float, step: int) -> None:
        start, stop, values = self._read(code, target.numel(), step)
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
