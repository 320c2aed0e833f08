"""Quantizers with one scale per block: `Sign`, `Pick`, `Log` and `Uniform`."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import Self

from laconic.compress.blockwise import BLOCK, Blockwise, check_block
from laconic.compress.random import derive_key, uniform_noise
from laconic.rules import check_count, check_flag, check_seed

PICK_FACTOR = 3.0  # the level of `Pick`, in mean magnitudes of the block


@dataclass(frozen=True)
class Sign(Blockwise):
    """Sends the sign of each entry, scaled by the block's mean magnitude: 1 bit an entry.

        Q(x)ᵢ = sign(xᵢ) · ‖x‖₁ / n        for a block x of n entries

    Use it with error feedback: without, small entries are inflated to the mean magnitude.

    Args:
        block: the number of entries that share a scale, a multiple of 64.

    Example:
        >>> import torch
        >>> from laconic.compress import Sign
        >>> Sign().decode(Sign().encode(torch.tensor([1.0, -3.0])), 2)
        tensor([ 2., -2.])

    References:
        Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
        Training of Speech DNNs", Interspeech 2014.

        Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML
        2019, arXiv 1901.09847.
    """

    block: int = BLOCK
    kernels = "sign"

    def __post_init__(self) -> None:
        check_block(self.block)

    @property
    def bits(self) -> int:
        return 1

    def _find_scales(self, p: Tensor, counts: Tensor) -> Tensor:
        return _mean_magnitudes(p, counts)

    def _quantize(self, p: Tensor, scales: Tensor, key: int) -> Tensor:
        return torch.signbit(p).to(torch.uint8)

    def _dequantize(self, symbols: Tensor, scales: Tensor) -> Tensor:
        return torch.where(symbols == 1, -scales, scales)


@dataclass(frozen=True)
class Pick(Blockwise):
    """Sends the largest entry of each group of `of` entries, rounded to the nearest of −s, 0 and s: 4 bits a group.

        s = min(3 · mean |x|, max |x|)        over a block x

    A group's symbol says which entry was picked and its sign, or 0 if all its entries round to 0. With groups of 7 that
    is 0.6 bits an entry. The entries of a group are block/`of` entries apart. Use it with error feedback: entries that
    were not picked are sent later.

    Args:
        of: the number of entries in a group, 2 to 7.
        block: the number of entries that share a scale, a multiple of 64.

    Example:
        >>> import torch
        >>> from laconic.compress import Pick
        >>> compressor = Pick(of=2)  # two groups: entries 0 and 2, entries 1 and 3
        >>> compressor.decode(compressor.encode(torch.tensor([0.1, -0.9, 0.1, 0.8])), 4)
        tensor([ 0.0000, -0.9000,  0.0000,  0.0000])
    """

    of: int = 7
    block: int = BLOCK
    kernels = "pick"

    def __post_init__(self) -> None:
        check_count("of", self.of, least=2, most=7)  # 7 entries · 2 signs + "none" = 15 symbols fit into 4 bits
        check_block(self.block)

    @property
    def bits(self) -> int:
        """The width of a group's symbol."""
        return 4

    @property
    def _kernel_bits(self) -> int:
        return self.of

    def _groups(self, numel: int) -> int:
        return -(-numel // self.of)

    def nbytes(self, numel: int) -> int:
        full, count = divmod(numel, self.block)
        return full * (4 + (self._groups(self.block) + 1) // 2) + bool(count) * (4 + (self._groups(count) + 1) // 2)

    def _find_scales(self, p: Tensor, counts: Tensor) -> Tensor:
        return torch.minimum(PICK_FACTOR * _mean_magnitudes(p, counts), p.abs().amax(1, keepdim=True))

    def _quantize(self, p: Tensor, scales: Tensor, key: int) -> Tensor:
        """Returns one symbol per group: 0 for none, i for the i-th entry (from 1 on), i + `of` if it is negative."""
        groups = self._groups(p.shape[1])
        rows = pad(p, (0, groups * self.of - p.shape[1])).view(-1, self.of, groups)
        largest, symbols = torch.zeros_like(rows[:, 0]), torch.zeros_like(rows[:, 0], dtype=torch.int64)
        for number, row in enumerate(rows.unbind(1), start=1):
            signed_number = torch.where(torch.signbit(row), number + self.of, number)
            symbols = torch.where(row.abs() > largest, signed_number, symbols)
            largest = torch.maximum(row.abs(), largest)
        return torch.where(largest >= 0.5 * scales, symbols, 0).to(torch.uint8)

    def _dequantize(self, symbols: Tensor, scales: Tensor) -> Tensor:
        return (symbols.to(torch.float32) - 1) * scales

    def _pack(self, symbols: Tensor) -> Tensor:
        half = (symbols.shape[1] + 1) // 2
        return symbols[:, :half] | (pad(symbols[:, half:], (0, symbols.shape[1] % 2)) << 4)

    def _unpack(self, packed: Tensor, count: int) -> Tensor:
        """Returns one symbol per entry: 0, 1 or 2 for −s, 0 or s."""
        picked = torch.cat([packed & 15, packed >> 4], dim=1)[:, None, : self._groups(count)]
        numbers = torch.arange(1, self.of + 1, device=packed.device)[:, None]
        symbols = 1 + (picked == numbers).to(torch.int8) - (picked == numbers + self.of).to(torch.int8)
        return symbols.flatten(1)[:, :count]


def _mean_magnitudes(p: Tensor, counts: Tensor) -> Tensor:
    # The order of summation is part of the definition: the kernels must round in the same way.
    quarters = (p.abs() * 0.25).view(p.shape[0], p.shape[1] // 64, 4, 16)
    sums_of_4 = ((quarters[:, :, 0] + quarters[:, :, 1]) + (quarters[:, :, 2] + quarters[:, :, 3])).double()
    lanes = torch.zeros(p.shape[0], 16, dtype=torch.float64, device=p.device)
    for row in sums_of_4.unbind(1):
        lanes = lanes + row
    for width in (8, 4, 2, 1):
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    return (4.0 * lanes / counts).float()


@dataclass(frozen=True)
class Log(Blockwise):
    """Rounds each entry to the nearest power of two of the block's largest magnitude, or 0: `bits` bits an entry.

        levels: 0, ±2⁻ᵏ s, …, ±½ s, ±s        s = max |x| over a block, k = 2^(bits−1) − 2

    The largest entry of a block is exact. Entries of at least 2⁻ᵏ s have an error of at most a third of themselves;
    smaller ones of at most 2⁻ᵏ⁻¹ s.

    Args:
        bits: the width of a symbol, 2 to 6.
        block: the number of entries that share a scale, a multiple of 64.

    Example:
        >>> import torch
        >>> from laconic.compress import Log
        >>> Log(3).decode(Log(3).encode(torch.tensor([0.8, -0.7, 0.3, 0.01])), 4)
        tensor([ 0.8000, -0.8000,  0.4000,  0.0000])

    References:
        Chen, Shen, Liu, Luo, "Efficient-Adam: Communication-Efficient Distributed Adam", arXiv 2205.14473.
    """

    bits: int = 4
    block: int = BLOCK
    kernels = "log"

    def __post_init__(self) -> None:
        check_count("bits", self.bits, least=2, most=6)
        check_block(self.block)

    @property
    def _top(self) -> int:
        """The symbol of the highest level, without the sign bit."""
        return (1 << (self.bits - 1)) - 1

    def _find_scales(self, p: Tensor, counts: Tensor) -> Tensor:
        return p.abs().amax(1, keepdim=True)

    def _quantize(self, p: Tensor, scales: Tensor, key: int) -> Tensor:
        magnitude, largest = p.abs().double(), scales.double()
        index = torch.zeros(p.shape, dtype=torch.uint8, device=p.device)
        for i in range(1, self._top + 1):
            # A level's lower bound is halfway to the level below: to 0 for the lowest, to half of itself for others.
            lower_bound = 0.5 if i == 1 else 0.75
            index += (magnitude >= largest * (lower_bound * 2.0 ** (i - self._top))) & (magnitude > 0)
        return index | (torch.signbit(p).to(torch.uint8) << (self.bits - 1))

    def _dequantize(self, symbols: Tensor, scales: Tensor) -> Tensor:
        index = symbols & self._top
        magnitude = torch.where(index > 0, torch.exp2(index.double() - self._top), 0.0) * scales.double()
        return torch.where(symbols > self._top, -magnitude, magnitude).float()


@dataclass(frozen=True)
class Uniform(Blockwise):
    """Rounds each entry to one of 2^bits − 1 evenly spaced levels: `bits` bits an entry.

        levels: i/n · s for i = −n, …, n        s = max |x| over a block, n = 2^(bits−1) − 1

    Rounds to the nearest level or, with `stochastic`, to one of the two neighbours at random so that E[Q(x)] = x. For
    stochastic rounding give each rank its own random stream with `with_stream`.

    Args:
        bits: the width of a symbol, 2 to 8.
        stochastic: whether to round at random.
        block: the number of entries that share a scale, a multiple of 64.
        seed: selects the random stream of stochastic rounding.

    Example:
        >>> import torch
        >>> from laconic.compress import Uniform
        >>> compressor = Uniform(3)  # levels −1, −2/3, −1/3, 0, 1/3, 2/3 and 1, times the largest magnitude
        >>> compressor.decode(compressor.encode(torch.tensor([3.0, -1.2, 0.4, 1.6])), 4)
        tensor([ 3., -1.,  0.,  2.])

    References:
        Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and
        Encoding", NeurIPS 2017, arXiv 1610.02132.
    """

    bits: int = 8
    stochastic: bool = False
    block: int = BLOCK
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("bits", self.bits, least=2, most=8)
        check_flag("stochastic", self.stochastic)
        check_block(self.block)
        check_seed(self.seed)

    @property
    def kernels(self) -> str:
        return "stochastic" if self.stochastic else "uniform"

    def with_stream(self, number: int) -> Self:
        return replace(self, seed=derive_key(self.seed, number)) if self.stochastic else self

    def _key(self, step: int) -> int:
        return derive_key(self.seed, step)

    @property
    def _top(self) -> int:
        """The number n of the highest level."""
        return (1 << (self.bits - 1)) - 1

    def _find_scales(self, p: Tensor, counts: Tensor) -> Tensor:
        return p.abs().amax(1, keepdim=True)

    def _quantize(self, p: Tensor, scales: Tensor, key: int) -> Tensor:
        # For tiny scales top / scale would overflow. Multiplying by a power of two is exact.
        enlarge = torch.where(scales < 2.0**-60, 2.0**64, 1.0).float()
        # The numerator is a tensor: number / tensor would multiply by the reciprocal and round twice.
        steps = torch.where(scales > 0, torch.full_like(scales, self._top) / (scales * enlarge), 0.0)
        level = (p * enlarge) * steps
        if self.stochastic:
            level = (level + uniform_noise(key, p.shape[0], p.shape[1], p.device)).clamp(-self._top, self._top)
        return (level.round() + self._top).to(torch.uint8)

    def _dequantize(self, symbols: Tensor, scales: Tensor) -> Tensor:
        unit = torch.ones((), dtype=torch.float32, device=symbols.device) / self._top
        return ((symbols.to(torch.float32) - self._top) * unit) * scales
