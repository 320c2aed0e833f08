"""Compressors that send every entry: `Identity` in fp32, `Half` in 16 bits."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from laconic.compress.backend import kernels_for
from laconic.compress.compressor import Compressor, check_finite, check_sum_finite, view_as


@dataclass(frozen=True)
class Identity(Compressor):
    """All entries as they are, in fp32."""

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, x: Tensor, out: Tensor, step: int) -> None:
        check_finite(x)
        out.copy_(x.view(torch.uint8))

    def _decode(self, code: Tensor, target: Tensor, step: int) -> None:
        target.view(torch.uint8).copy_(code)

    def _decode_add(self, code: Tensor, target: Tensor, scale: float, step: int) -> None:
        kernels = kernels_for(code, target)
        if kernels:
            kernels.dense.add_scaled(view_as(code, torch.float32).numpy(), target.numpy(), np.float32(scale))
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
    """All entries rounded to fp16 or bf16. What is too large becomes the largest number of the format."""

    format: Literal["fp16", "bf16"] = "fp16"

    def __post_init__(self) -> None:
        if self.format not in ("fp16", "bf16"):
            raise ValueError(f"format must be fp16 or bf16, not {self.format}")

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float16 if self.format == "fp16" else torch.bfloat16

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, x: Tensor, out: Tensor, step: int) -> None:
        check_finite(x)
        kernels = kernels_for(x, out)
        if kernels:
            halves = view_as(out, torch.uint16)
            kernels.dense.encode_half(x.numpy(), self.format == "bf16", halves.numpy())
        else:
            largest = torch.finfo(self._dtype).max
            halves = x.clamp(-largest, largest).to(self._dtype)
        self._deliver(halves, out)

    def _decode(self, code: Tensor, target: Tensor, step: int) -> None:
        target.copy_(view_as(code, self._dtype))

    def _decode_add(self, code: Tensor, target: Tensor, scale: float, step: int) -> None:
        kernels = kernels_for(code, target)
        if kernels:
            halves = view_as(code, torch.uint16).numpy()
            kernels.dense.add_half(halves, self.format == "bf16", target.numpy(), np.float32(scale))
        else:
            super()._decode_add(code, target, scale, step)

    def _encode_with_feedback(self, x: Tensor | None, residual: Tensor, out: Tensor, step: int) -> None:
        kernels = kernels_for(residual, out)
        if kernels and x is not None:
            check_sum_finite(x, residual)
            halves = view_as(out, torch.uint16)
            kernels.dense.encode_half_with_feedback(x.numpy(), residual.numpy(), self.format == "bf16", halves.numpy())
            self._deliver(halves, out)
        else:
            super()._encode_with_feedback(x, residual, out, step)

    def _deliver(self, halves: Tensor, out: Tensor) -> None:
        if halves.data_ptr() != out.data_ptr():
            out.copy_(halves.view(torch.uint8))
