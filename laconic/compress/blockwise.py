"""The common frame of quantizers with one fp32 scale per block: byte layout, padding, and the choice of kernel."""

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.compress import packing
from laconic.compress.backend import kernels_for
from laconic.compress.compressor import Compressor, check_finite, holds, not_finite
from laconic.rules import MOST

BLOCK = 2048


class Blockwise(Compressor):
    """Quantizes each block of `block` entries on its own.

    The code of a block is its scale (4 bytes, fp32) and its packed symbols; the codes of blocks follow one another. A
    symbol is the integer of `bits` bits that stands for one entry (for `Pick`: for one group of entries). Therefore the
    code of a slice that starts and ends at multiples of `block` is a slice of the code of the whole vector. A shorter
    last block is packed as a plain sequence, so that `nbytes` = ⌈numel·bits/8⌉ + 4·blocks (except for `Pick`).
    """

    takes_anything = True

    @property
    @abstractmethod
    def bits(self) -> int:
        """The width of a symbol."""

    @property
    @abstractmethod
    def block(self) -> int:
        """The number of entries that share a scale, a multiple of 64."""

    @property
    @abstractmethod
    def kernels(self) -> str:
        """The key of this quantizer in `KINDS` of `kernels/blockwise.py`."""

    @property
    def _kernel_bits(self) -> int:
        """What the kernels take as `bits`."""
        return self.bits

    @abstractmethod
    def _find_scales(self, p: Tensor, counts: Tensor) -> Tensor:
        """Returns the scales (blocks, 1) of zero-padded blocks p (blocks, block) with `counts` (blocks, 1) entries."""

    @abstractmethod
    def _quantize(self, p: Tensor, scales: Tensor, key: int) -> Tensor:
        """Returns the symbols of p (blocks, count) as uint8, in the shape that `_pack` takes.

        Block b draws its random numbers with the key `key` + b.
        """

    @abstractmethod
    def _dequantize(self, symbols: Tensor, scales: Tensor) -> Tensor:
        """Returns the fp32 values that symbols (blocks, count) stand for, given the scales (blocks, 1)."""

    def _key(self, step: int) -> int:
        """Returns the key of block 0's random numbers."""
        return 0

    def _pack(self, symbols: Tensor) -> Tensor:
        """Packs the symbols of full blocks, or of one shorter last block: (blocks, count) → (blocks, nbytes)."""
        if symbols.shape[1] == self.block:
            return packing.pack_fields(symbols, self.bits)
        return packing.pack_sequence(symbols[0], self.bits)[None]

    def _unpack(self, packed: Tensor, count: int) -> Tensor:
        """Inverts `_pack`: (blocks, nbytes) → (blocks, count)."""
        if count == self.block:
            return packing.unpack_fields(packed, self.bits)
        return packing.unpack_sequence(packed[0], self.bits, count).to(torch.uint8)[None]

    @property
    def _block_nbytes(self) -> int:
        return self.nbytes(self.block)

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        return packing.packed_nbytes(numel, self.bits) + 4 * self._blocks(numel)

    def _encode(self, x: Tensor, out: Tensor, step: int) -> None:
        kernels = kernels_for(x, out)
        if kernels:
            self._encode_by_kernel(x, None, out, step)
            return
        check_finite(x)
        full, count = divmod(x.numel(), self.block)
        p = pad(x, (0, -x.numel() % self.block)).view(-1, self.block)
        counts = torch.full((p.shape[0], 1), self.block, dtype=torch.float64, device=x.device)
        if count:
            counts[-1] = count
        scales = self._find_scales(p, counts)
        key = self._key(step)
        blocks = out[: full * self._block_nbytes].view(full, self._block_nbytes)
        blocks[:, :4] = scales[:full].view(torch.uint8)
        blocks[:, 4:] = self._pack(self._quantize(p[:full], scales[:full], key))
        if count:
            last = out[full * self._block_nbytes :]
            last[:4] = scales[-1].view(torch.uint8)
            last[4:] = self._pack(self._quantize(p[full:, :count], scales[full:], key + full))[0]

    def _decode(self, code: Tensor, target: Tensor, step: int) -> None:
        kernels = kernels_for(code, target)
        if kernels:
            self._decode_by_kernel(code, target, None)
            return
        full, count = divmod(target.numel(), self.block)
        blocks = code[: full * self._block_nbytes].view(full, self._block_nbytes)
        last = code[full * self._block_nbytes :]
        # Copies: a view as fp32 needs an address that is a multiple of 4.
        scales = blocks[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
        last_scale = last[:4].clone().view(torch.float32)
        for part in (scales, last_scale):
            if not holds(lambda part=part: (torch.isfinite(part) & ~torch.signbit(part)).all()):  # type: ignore[misc]
                raise self._bad_scale(code)
        target[: full * self.block] = self._dequantize(self._unpack(blocks[:, 4:], self.block), scales).flatten()
        if count:
            target[full * self.block :] = self._dequantize(self._unpack(last[None, 4:], count), last_scale)[0]

    def _decode_add(self, code: Tensor, target: Tensor, scale: float, step: int) -> None:
        kernels = kernels_for(code, target)
        if kernels:
            self._decode_by_kernel(code, target, scale)
        else:
            super()._decode_add(code, target, scale, step)

    def _encode_with_feedback(self, x: Tensor | None, residual: Tensor, out: Tensor, step: int) -> None:
        kernels = kernels_for(residual, out)
        if kernels and x is not None:
            self._encode_by_kernel(x, residual, out, step)
        else:
            super()._encode_with_feedback(x, residual, out, step)

    def _kernels(self) -> Any:
        blockwise = kernels_for().blockwise
        return blockwise.kernels_of(blockwise.KINDS[self.kernels])

    def _encode_by_kernel(self, x: Tensor, residual: Tensor | None, out: Tensor, step: int) -> None:
        kernels = self._kernels()
        scales = np.empty(self._blocks(x.numel()), np.float32)
        vectors = (x.numpy(), (x if residual is None else residual).numpy(), residual is not None)
        if not kernels.find_scales(self.block, *vectors, scales):
            raise not_finite(x if residual is None else x + residual)
        key = np.uint64(self._key(step))
        kernels.encode(self._kernel_bits, self.block, *vectors, scales, key, out.numpy())

    def _decode_by_kernel(self, code: Tensor, target: Tensor, factor: float | None) -> None:
        """Writes the decoded vector to `target`; with a factor, adds factor · decoded to it."""
        kernels = self._kernels()
        if not kernels.scales_are_valid(self._kernel_bits, self.block, code.numpy(), self._blocks(target.numel())):
            raise self._bad_scale(code)
        accumulate = factor is not None
        factor32 = np.float32(1.0 if factor is None else factor)
        kernels.decode(self._kernel_bits, self.block, code.numpy(), target.numpy(), accumulate, factor32)

    def _bad_scale(self, code: Tensor) -> ValueError:
        """Returns the error that names the first block with an invalid scale."""
        for block, start in enumerate(range(0, code.numel(), self._block_nbytes)):
            scale = code[start : start + 4].clone().view(torch.float32).item()
            if not 0.0 <= scale < float("inf") or str(scale).startswith("-"):
                return ValueError(
                    f"the code is damaged: the scale of a block must be finite and not negative, "
                    f"but block {block} has {scale}"
                )
        raise AssertionError("all scales are valid")


def check_block(block: int) -> None:
    """Raises ValueError unless `block` is a positive multiple of 64."""
    if type(block) is not int or not 64 <= block <= MOST or block % 64:
        raise ValueError(f"block must be a positive multiple of 64, at most {MOST}, not {block!r}")
