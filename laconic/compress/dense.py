"""Compressors that send every entry: `Identity` in fp32, `Half` in 16 bits."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from laconic.compress.backend import kernels_for
from laconic.compress.compressor import Compressor, check_finite, check_sum_finite, holds, not_finite, reinterpret
from laconic.rules import check_choice


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends all entries uncompressed, in fp32: 4 bytes an entry.

    Example:
        >>> import torch
        >>> from laconic.compress import Identity
        >>> Identity().decode(Identity().encode(torch.tensor([0.1, -3.0])), 2)
        tensor([ 0.1000, -3.0000])
    """

    takes_anything = True

    @property
    def kernels(self) -> str:
        return "identity"

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, x: Tensor, out: Tensor, step: int) -> None:
        check_finite(x)
        out.copy_(x.view(torch.uint8))

    def _decode(self, code: Tensor, target: Tensor, step: int) -> None:
        check_finite(reinterpret(code, torch.float32))
        target.view(torch.uint8).copy_(code)

    def _decode_add(self, code: Tensor, target: Tensor, scale: float, step: int) -> None:
        kernels = kernels_for(code, target)
        if kernels:
            values = reinterpret(code, torch.float32)
            check_finite(values)
            kernels.dense.add_scaled(values.numpy(), target.numpy(), np.float32(scale))
        else:
            super()._decode_add(code, target, scale, step)

    def _encode_with_feedback(self, x: Tensor | None, residual: Tensor, out: Tensor, step: int) -> None:
        if residual.dtype != torch.float32:
            super()._encode_with_feedback(x, residual, out, step)
            return
        if x is None:
            check_finite(residual)
        else:
            check_sum_finite(x, residual)
            residual.add_(x)
        out.copy_(residual.view(torch.uint8))
        residual.zero_()


@dataclass(frozen=True)
class Half(Compressor):
    """Rounds all entries to a 16-bit float: 2 bytes an entry.

    Rounds to nearest, ties to even. Entries beyond the format's range become its largest number, with their sign.

    Args:
        format: `"fp16"` (11 significant bits, up to 65504) or `"bf16"` (8 significant bits, the range of fp32).

    Example:
        >>> import torch
        >>> from laconic.compress import Half
        >>> Half().decode(Half().encode(torch.tensor([1.0, 1e-3, 1e9])), 3).tolist()
        [1.0, 0.0010004043579101562, 65504.0]
    """

    format: Literal["fp16", "bf16"] = "fp16"

    def __post_init__(self) -> None:
        check_choice("format", self.format, ("fp16", "bf16"))

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float16 if self.format == "fp16" else torch.bfloat16

    takes_anything = True

    @property
    def kernels(self) -> str:
        return "half"

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, x: Tensor, out: Tensor, step: int) -> None:
        check_finite(x)
        kernels = kernels_for(x, out)
        if kernels:
            halves = reinterpret(out, torch.uint16)
            kernels.dense.encode_half(x.numpy(), self.format == "bf16", halves.numpy())
        else:
            largest = torch.finfo(self._dtype).max
            halves = x.clamp(-largest, largest).to(self._dtype)
        self._copy_unless_view(halves, out)

    def _decode(self, code: Tensor, target: Tensor, step: int) -> None:
        self._check_halves(code)
        target.copy_(reinterpret(code, self._dtype))

    def _decode_add(self, code: Tensor, target: Tensor, scale: float, step: int) -> None:
        kernels = kernels_for(code, target)
        if kernels:
            self._check_halves(code)
            halves = reinterpret(code, torch.uint16).numpy()
            kernels.dense.add_half(halves, self.format == "bf16", target.numpy(), np.float32(scale))
        else:
            super()._decode_add(code, target, scale, step)

    def _encode_with_feedback(self, x: Tensor | None, residual: Tensor, out: Tensor, step: int) -> None:
        kernels = kernels_for(residual, out)
        if kernels and x is not None:
            check_sum_finite(x, residual)
            halves = reinterpret(out, torch.uint16)
            kernels.dense.encode_half_with_feedback(x.numpy(), residual.numpy(), self.format == "bf16", halves.numpy())
            self._copy_unless_view(halves, out)
        else:
            super()._encode_with_feedback(x, residual, out, step)

    def _check_halves(self, code: Tensor) -> None:
        """Raises ValueError if an entry of the code is NaN or infinite."""
        kernels = kernels_for(code)
        if kernels:
            exponent = np.uint16(0x7C00 if self.format == "fp16" else 0x7F80)
            finite = kernels.dense.halves_are_finite(reinterpret(code, torch.uint16).numpy(), exponent)
        else:
            finite = holds(lambda: torch.isfinite(reinterpret(code, self._dtype)).all())
        if not finite:
            raise not_finite(reinterpret(code, self._dtype))

    def _copy_unless_view(self, halves: Tensor, out: Tensor) -> None:
        # `reinterpret` copies if `out` is not aligned; the kernel has then written to the copy.
        if halves.data_ptr() != out.data_ptr():
            out.copy_(halves.view(torch.uint8))
