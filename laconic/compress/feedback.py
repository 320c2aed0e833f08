"""Error feedback over any compressor: what a code fails to say is kept and said later."""

import torch
from torch import Tensor

from laconic.compress.compressor import Compressor, as_float32, check_vector


def encode_with_feedback(
    compressor: Compressor, x: Tensor | None, residual: Tensor, *, step: int = 0, out: Tensor | None = None
) -> Tensor:
    """The code of p = x + residual; `residual` becomes p − decoded, in place.

    `residual` is a vector of fp32, or of fp64, and starts as zeros. `x=None` means that x was added to it before;
    `RandomBlock` then touches only its block. A nan or inf in p raises ValueError, and `residual` stays as it was.
    """
    check_vector("residual", residual)
    if residual.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"residual must be float32 or float64, not {residual.dtype}: it holds what fewer bits would lose"
        )
    if x is not None:
        if x.numel() != residual.numel():
            raise ValueError(f"x must have as many entries as residual, {residual.numel()}, not {x.numel()}")
        x = as_float32(x) if residual.dtype == torch.float32 else x.detach().reshape(-1).to(torch.float64)
    out = compressor._place_for_code(residual.numel(), residual.device, out)
    compressor._encode_with_feedback(x, residual.detach(), out, step)
    return out
