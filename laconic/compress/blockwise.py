"""The frame of quantizers with one fp32 scale a block: padding, layout, and the choice of kernel."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.compress import packing
from laconic.compress.backend import kernels_for
from laconic.compress.compressor import Compressor, check_finite, not_finite

BLOCK = 2048


class Blockwise(Compressor):
    """Each block is coded on its own as its scale (4 bytes) and its packed codes, and blocks follow one another.

    So the code of a slice from one multiple of `block` to another is a slice of the whole's code. In the last block, if
    it is not full, codes are packed in sequence, which makes `nbytes` = ⌈numel·bits/8⌉ + 4·blocks. (But for `Pick`.)
    """

    @property
    @abstractmethod
    def bits(self) -> int: ...

    @property
    @abstractmethod
    def block(self) -> int: ...

    @property
    @abstractmethod
    def _kind(self) -> str:
        """The constant in `kernels.levels` that names this quantizer."""

    @abstractmethod
    def _scales(self, p: Tensor, counts: Tensor) -> Tensor:
        """One scale for each of the blocks p (blocks, block), of which `counts` entries are no padding: (blocks, 1)."""

    @abstractmethod
    def _quantize(self, p: Tensor, scales: Tensor, key: int) -> Tensor:
        """Codes, in uint8, of the shape of p (or as `_pack` takes them). Key k + i of block 0 is key k of block i."""

    @abstractmethod
    def _levels(self, codes: Tensor, scales: Tensor) -> Tensor:
        """What codes stand for, in fp32."""

    def _key(self, step: int) -> int:
        return 0

    def _pack(self, codes: Tensor) -> Tensor:
        """Codes of full blocks, or of the last one, as bytes: (blocks, nbytes)."""
        if codes.shape[1] == self.block:
            return packing.pack_fields(codes, self.bits)
        return packing.pack_sequence(codes[0], self.bits)[None]

    def _unpack(self, packed: Tensor, count: int) -> Tensor:
        """The inverse: (blocks, count)."""
        if count == self.block:
            return packing.unpack_fields(packed, self.bits)
        return packing.unpack_sequence(packed[0], self.bits, count).to(torch.uint8)[None]

    @property
    def _stride(self) -> int:
        return self.nbytes(self.block)

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        return packing.packed_nbytes(numel, self.bits) + 4 * self._blocks(numel)

    def _encode(self, x: Tensor, out: Tensor, step: int) -> None:
        kernels = kernels_for(x, out)
        if kernels:
            self._encode_by_kernel(kernels.blockwise, x, None, out, step)
            return
        check_finite(x)
        full, count = divmod(x.numel(), self.block)
        p = pad(x, (0, -x.numel() % self.block)).view(-1, self.block)
        counts = torch.full((p.shape[0], 1), self.block, dtype=torch.float64, device=x.device)
        if count:
            counts[-1] = count
        scales = self._scales(p, counts)
        key = self._key(step)
        blocks = out[: full * self._stride].view(full, self._stride)
        blocks[:, :4] = scales[:full].view(torch.uint8)
        blocks[:, 4:] = self._pack(self._quantize(p[:full], scales[:full], key))
        if count:
            rest = out[full * self._stride :]
            rest[:4] = scales[-1].view(torch.uint8)
            rest[4:] = self._pack(self._quantize(p[full:, :count], scales[full:], key + full))[0]

    def _decode(self, code: Tensor, target: Tensor, step: int) -> None:
        kernels = kernels_for(code, target)
        if kernels:
            self._decode_by_kernel(kernels.blockwise, code, target, None)
            return
        full, count = divmod(target.numel(), self.block)
        blocks = code[: full * self._stride].view(full, self._stride)
        rest = code[full * self._stride :]
        scales = blocks[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)  # wherever they were
        last_scale = rest[:4].clone().view(torch.float32)
        for part in (scales, last_scale):
            if not bool((torch.isfinite(part) & ~torch.signbit(part)).all()):
                raise self._bad_scale(code)
        target[: full * self.block] = self._levels(self._unpack(blocks[:, 4:], self.block), scales).flatten()
        if count:
            target[full * self.block :] = self._levels(self._unpack(rest[None, 4:], count), last_scale)[0]

    def _decode_add(self, code: Tensor, target: Tensor, scale: float, step: int) -> None:
        kernels = kernels_for(code, target)
        if kernels:
            self._decode_by_kernel(kernels.blockwise, code, target, scale)
        else:
            super()._decode_add(code, target, scale, step)

    def _decode_part(self, code: Tensor, numel: int, start: int, stop: int, step: int) -> Tensor:
        first = start // self.block * self.block
        last = min(numel, self._blocks(stop) * self.block)
        blocks = torch.empty(last - first, dtype=torch.float32, device=code.device)
        self._decode(code[self.nbytes(first) : self.nbytes(last)], blocks, step)
        return blocks[start - first : stop - first]

    def _encode_difference(self, x: Tensor, base: Tensor, out: Tensor, step: int) -> None:
        kernels = kernels_for(x, base, out)
        if not kernels:
            super()._encode_difference(x, base, out, step)
            return
        vectors = (x.numpy(), base.numpy(), out.numpy())
        if not kernels.settle.encode_difference(*self.coding(step), *vectors):
            raise not_finite(x - base)

    def _settle(
        self, codes: Sequence[Tensor], weights: Sequence[float], own: int, x: Tensor, base: Tensor | None, step: int
    ) -> None:
        other = x if base is None else base
        kernels = kernels_for(x, other, *codes)
        if not kernels:
            super()._settle(codes, weights, own, x, base, step)
            return
        readable = self.readable(codes, weights, own, x.numel())
        kernels.settle.settle(*readable, x.numpy(), other.numpy(), base is not None)

    def _settings(self) -> tuple[int, int, int]:
        return getattr(kernels_for().levels, self._kind), self.bits, self.block

    def coding(self, step: int) -> tuple[Any, ...]:
        """What the kernels that encode are told."""
        return *self._settings(), np.uint64(self._key(step))

    def readable(self, codes: Sequence[Tensor], weights: Sequence[float], own: int, numel: int) -> tuple[Any, ...]:
        """What the kernel `read_block` is told of codes in main memory, after a look at them."""
        settings = self._settings()
        if wrong := [code.numel() for code in codes if code.numel() != self.nbytes(numel)]:
            raise ValueError(f"a code of {numel} entries must have {self.nbytes(numel)} bytes, not {wrong[0]}")
        addresses, nbytes = np.array([code.data_ptr() for code in codes], np.uint64), codes[0].numel()
        bad = kernels_for().settle.find_bad_code(*settings, addresses, nbytes, self._blocks(numel))
        if bad >= 0:
            raise self._bad_scale(codes[bad])
        return *settings, addresses, nbytes, np.array(weights, np.float32), own

    def _encode_with_feedback(self, x: Tensor | None, residual: Tensor, out: Tensor, step: int) -> None:
        kernels = kernels_for(residual, out)
        if kernels and x is not None:
            self._encode_by_kernel(kernels.blockwise, x, residual, out, step)
        else:
            super()._encode_with_feedback(x, residual, out, step)

    def _encode_by_kernel(self, kernels: Any, x: Tensor, residual: Tensor | None, out: Tensor, step: int) -> None:
        kind, bits, block, key = self.coding(step)
        scales = np.empty(self._blocks(x.numel()), np.float32)
        vectors = (x.numpy(), (x if residual is None else residual).numpy(), residual is not None)
        if not kernels.find_scales(kind, block, *vectors, scales):
            raise not_finite(x if residual is None else x + residual)
        kernels.encode(kind, bits, block, *vectors, scales, key, out.numpy())

    def _decode_by_kernel(self, kernels: Any, code: Tensor, target: Tensor, factor: float | None) -> None:
        settings = self._settings()
        if not kernels.scales_are_valid(*settings, code.numpy(), self._blocks(target.numel())):
            raise self._bad_scale(code)
        accumulate = factor is not None
        factor32 = np.float32(1.0 if factor is None else factor)
        kernels.decode(*settings, code.numpy(), target.numpy(), accumulate, factor32)

    def _bad_scale(self, code: Tensor) -> ValueError:
        for block, start in enumerate(range(0, code.numel(), self._stride)):
            scale = code[start : start + 4].clone().view(torch.float32).item()
            if not 0.0 <= scale < float("inf") or str(scale).startswith("-"):
                return ValueError(
                    f"the scale of a block must be finite and not negative, but block {block} has {scale}"
                )
        raise AssertionError("all scales are valid")


def check_block(block: int) -> None:
    if block < 64 or block % 64:
        raise ValueError(f"block must be a positive multiple of 64, not {block}")
