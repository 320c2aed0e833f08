"""A coarse copy of x that all ranks share, from which squared distances are measured at little cost.

The variance among workers needs any point c that is the same everywhere and near x: for every c,
mean ‖x_i − x̄‖² = mean ‖x_i − c‖² − ‖x̄ − c‖². So the point need be neither exact nor new, and in half the bytes of x it
is read faster: fp32 has a bfloat16 anchor.
"""

from __future__ import annotations

import torch
from torch import Tensor

COARSE = {torch.float32: torch.bfloat16, torch.float64: torch.float32}
# From here on the compiled kernels save more than it takes to load them.
LARGE = 1 << 16


def lay_anchor(x: Tensor) -> tuple[Tensor, float]:
    """An anchor at x, and its squared distance from x."""
    anchor = torch.empty_like(x, dtype=COARSE.get(x.dtype, x.dtype))
    return anchor, move_anchor(x, anchor)


def squared_distance(x: Tensor, anchor: Tensor) -> float:
    """‖x − anchor‖².

    Ranks with the same x and anchor get the same number on unlike processors too: the kernel fixes the order of every
    addition, and torch's order matters only in the last digits of a double.
    """
    if _has_kernel(x, anchor):
        from laconic import anchor_kernels

        return anchor_kernels.squared_distance(x, anchor)
    return squared_distance_torch(x, anchor)


def move_anchor(x: Tensor, anchor: Tensor) -> float:
    """Move the anchor to x; gives the squared distance that is left."""
    if _has_kernel(x, anchor):
        from laconic import anchor_kernels

        return anchor_kernels.move_anchor(x, anchor)
    anchor.copy_(x)
    return squared_distance_torch(x, anchor)


def squared_distance_torch(x: Tensor, anchor: Tensor) -> float:
    return float((x.double() - anchor.double()).square_().sum())


def _has_kernel(x: Tensor, anchor: Tensor) -> bool:
    return x.numel() >= LARGE and x.device.type == "cpu" and (x.dtype, anchor.dtype) == (torch.float32, torch.bfloat16)
