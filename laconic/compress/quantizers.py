"""The quantizers of Efficient-Adam (Chen, Shen, Liu, Luo, arXiv 2205.14473) and QSGD; `Ternary` and `Pick`."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.compress.blockwise import BLOCK, Blockwise, check_block
from laconic.compress.random import chances, mix


@dataclass(frozen=True)
class Sign(Blockwise):
    """One bit an entry: ± the block's mean magnitude. Lossy enough to be of use with error feedback only."""

    block: int = BLOCK
    _kind = "SIGN_KIND"

    def __post_init__(self) -> None:
        check_block(self.block)

    @property
    def bits(self) -> int:
        return 1

    def _scales(self, p: Tensor, counts: Tensor) -> Tensor:
        return mean_magnitudes(p, counts)

    def _quantize(self, p: Tensor, scales: Tensor, key: int) -> Tensor:
        return torch.signbit(p).to(torch.uint8)

    def _levels(self, codes: Tensor, scales: Tensor) -> Tensor:
        return torch.where(codes == 1, -scales, scales)


LEVEL_IN_MEANS = 3.0


@dataclass(frozen=True)
class Ternary(Blockwise):
    """Levels 0 and ± three times the block's mean magnitude (± its largest, if that is less); the nearest is taken.

    So most entries are 0, and what is said is said of those that stand out, in 2 bits. For error feedback: what is
    above the level follows later. (TernGrad, Wen et al., arXiv 1705.07878, has the three levels too, by chance and
    without feedback, and cuts off at 2.5 standard deviations.)
    """

    block: int = BLOCK
    _kind = "TERNARY_KIND"

    def __post_init__(self) -> None:
        check_block(self.block)

    @property
    def bits(self) -> int:
        return 2

    def _scales(self, p: Tensor, counts: Tensor) -> Tensor:
        return torch.minimum(LEVEL_IN_MEANS * mean_magnitudes(p, counts), p.abs().amax(1, keepdim=True))

    def _quantize(self, p: Tensor, scales: Tensor, key: int) -> Tensor:
        is_far = (p.abs() >= 0.5 * scales) & (p != 0)
        return (1 + torch.where(torch.signbit(p), -1, 1) * is_far).to(torch.uint8)

    def _levels(self, codes: Tensor, scales: Tensor) -> Tensor:
        return (codes.to(torch.float32) - 1) * scales


@dataclass(frozen=True)
class Pick(Blockwise):
    """Of each `of` entries one, in 4 bits: the largest, as a level of `Ternary`, if it is not nearest to 0.

    The entries of a group are an `of`-th of a block apart from each other. For error feedback: what was second follows
    later. That is about as good as `Ternary`, where what stands out is rare, in 0.6 bits an entry with seven.
    """

    of: int = 7
    block: int = BLOCK
    _kind = "PICK_KIND"

    def __post_init__(self) -> None:
        if not 2 <= self.of <= 7:  # each of 7 entries with a minus or without, or none, is one of 15
            raise ValueError(f"of must be from 2 to 7, not {self.of}")
        check_block(self.block)

    @property
    def bits(self) -> int:
        """Not bits, but `of`: what the kernels are told in their place."""
        return self.of

    def _groups(self, numel: int) -> int:
        return -(-numel // self.of)

    def nbytes(self, numel: int) -> int:
        full, rest = divmod(numel, self.block)
        return full * (4 + (self._groups(self.block) + 1) // 2) + bool(rest) * (4 + (self._groups(rest) + 1) // 2)

    def _scales(self, p: Tensor, counts: Tensor) -> Tensor:
        return torch.minimum(LEVEL_IN_MEANS * mean_magnitudes(p, counts), p.abs().amax(1, keepdim=True))

    def _quantize(self, p: Tensor, scales: Tensor, key: int) -> Tensor:
        """For each group the number of the entry that is picked, from 1 on; with a minus more by `of`."""
        groups = self._groups(p.shape[1])
        rows = pad(p, (0, groups * self.of - p.shape[1])).view(-1, self.of, groups)
        most, codes = torch.zeros_like(rows[:, 0]), torch.zeros_like(rows[:, 0], dtype=torch.int64)
        for number, row in enumerate(rows.unbind(1), start=1):
            codes = torch.where(row.abs() > most, torch.where(torch.signbit(row), number + self.of, number), codes)
            most = torch.maximum(row.abs(), most)
        return torch.where(most >= 0.5 * scales, codes, 0).to(torch.uint8)

    def _levels(self, codes: Tensor, scales: Tensor) -> Tensor:
        return (codes.to(torch.float32) - 1) * scales

    def _pack(self, codes: Tensor) -> Tensor:
        half = (codes.shape[1] + 1) // 2
        return codes[:, :half] | (pad(codes[:, half:], (0, codes.shape[1] % 2)) << 4)

    def _unpack(self, packed: Tensor, count: int) -> Tensor:
        """For each entry what `Ternary` has: 1, and one more or less if it was picked."""
        picked = torch.cat([packed & 15, packed >> 4], dim=1)[:, None, : self._groups(count)]
        numbers = torch.arange(1, self.of + 1, device=packed.device)[:, None]
        codes = 1 + (picked == numbers).to(torch.int8) - (picked == numbers + self.of).to(torch.int8)
        return codes.flatten(1)[:, :count]


def mean_magnitudes(p: Tensor, counts: Tensor) -> Tensor:
    # The order of the sum is part of the definition: all implementations must agree on its rounding.
    quarters = (p.abs() * 0.25).view(p.shape[0], p.shape[1] // 64, 4, 16)
    fours = ((quarters[:, :, 0] + quarters[:, :, 1]) + (quarters[:, :, 2] + quarters[:, :, 3])).double()
    lanes = torch.zeros(p.shape[0], 16, dtype=torch.float64, device=p.device)
    for row in fours.unbind(1):
        lanes = lanes + row
    for width in (8, 4, 2, 1):
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    return (4.0 * lanes / counts).float()


@dataclass(frozen=True)
class Log(Blockwise):
    """Levels 0, ±2⁻ᵏ … ±½, ±1 times the block's largest magnitude, k = 2^(bits−1) − 2; the nearest is taken.

    The largest entry of a block is exact; the error of an entry is at most a third of it down to 2⁻ᵏ of the largest.
    """

    bits: int = 4
    block: int = BLOCK
    _kind = "LOG_KIND"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 6:
            raise ValueError(f"bits must be from 2 to 6, not {self.bits}")
        check_block(self.block)

    def _scales(self, p: Tensor, counts: Tensor) -> Tensor:
        return p.abs().amax(1, keepdim=True)

    def _quantize(self, p: Tensor, scales: Tensor, key: int) -> Tensor:
        levels = (1 << (self.bits - 1)) - 1
        magnitude, largest = p.abs().double(), scales.double()
        index = torch.zeros(p.shape, dtype=torch.uint8, device=p.device)
        for i in range(1, levels + 1):
            begins_at = 0.5 if i == 1 else 0.75  # the lowest level's neighbour is 0, that of others half of themselves
            index += (magnitude >= largest * (begins_at * 2.0 ** (i - levels))) & (magnitude > 0)
        return index | (torch.signbit(p).to(torch.uint8) << (self.bits - 1))

    def _levels(self, codes: Tensor, scales: Tensor) -> Tensor:
        levels = (1 << (self.bits - 1)) - 1
        index = codes & levels
        size = torch.where(index > 0, torch.exp2(index.double() - levels), 0.0) * scales.double()
        return torch.where(codes > levels, -size, size).float()


@dataclass(frozen=True)
class Uniform(Blockwise):
    """Evenly spaced levels from − to + the block's largest magnitude, 2^bits − 1 of them, so that 0 is one.

    Rounds to the nearest; with `stochastic` up or down by chance, so that the mean over steps is the entry itself. Then
    give each rank its own `seed` (`for_rank`), or all ranks err in the same direction.
    """

    bits: int = 8
    stochastic: bool = False
    block: int = BLOCK
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be from 2 to 8, not {self.bits}")
        check_block(self.block)

    @property
    def _kind(self) -> str:
        return "STOCHASTIC_KIND" if self.stochastic else "UNIFORM_KIND"

    def for_rank(self, rank: int) -> Self:
        return replace(self, seed=mix(self.seed, rank)) if self.stochastic else self

    def _key(self, step: int) -> int:
        return mix(self.seed, step)

    @property
    def _top(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _scales(self, p: Tensor, counts: Tensor) -> Tensor:
        return p.abs().amax(1, keepdim=True)

    def _quantize(self, p: Tensor, scales: Tensor, key: int) -> Tensor:
        enlarge = torch.where(scales < 2.0**-60, 2.0**64, 1.0).float()  # keeps steps finite, and is exact
        # A tensor on top: number / tensor would take the reciprocal first and round twice.
        steps = torch.where(scales > 0, torch.full_like(scales, self._top) / (scales * enlarge), 0.0)
        moved = (p * enlarge) * steps
        if self.stochastic:
            moved = (moved + chances(key, p.shape[0], p.shape[1], p.device)).clamp(-self._top, self._top)
        return (moved.round() + self._top).to(torch.uint8)

    def _levels(self, codes: Tensor, scales: Tensor) -> Tensor:
        unit = torch.tensor(1.0, dtype=torch.float32, device=codes.device) / self._top
        return ((codes.to(torch.float32) - self._top) * unit) * scales
