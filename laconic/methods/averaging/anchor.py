"""A coarse copy of x that all ranks share, from which squared distances are measured cheaply.

The variance among workers can be measured from any point c that is the same everywhere and near x: for every c,
mean ‖x_i − x̄‖² = mean ‖x_i − c‖² − ‖x̄ − c‖². So c needs to be neither exact nor recent. An fp32 model has a bfloat16
anchor, which is read in half the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.compress.backend import kernels_for

COARSE = {torch.float32: torch.bfloat16, torch.float64: torch.float32}
# From this many entries on, the numba kernels save more time than loading them takes.
LARGE = 1 << 16


def make_anchor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an anchor at x, and its squared distance from x.

    >>> anchor, distance = make_anchor(torch.tensor([1.0, 1.0 + 2**-12]))
    >>> anchor, float(distance) == 2**-24
    (tensor([1., 1.], dtype=torch.bfloat16), True)
    """
    anchor = torch.empty_like(x, dtype=COARSE.get(x.dtype, x.dtype))
    return anchor, move_anchor(x, anchor)


def squared_distance(x: Tensor, anchor: Tensor) -> Tensor:
    """Returns ‖x − anchor‖² as a scalar on x's device, for which the host does not wait.

    Ranks with the same x and anchor get the same number, on different processors too: the kernel fixes the order of
    all additions, and in torch the order only affects the last digits of a double.
    """
    if _has_kernel(x, anchor):
        from laconic.methods.averaging import anchor_numba

        return torch.tensor(anchor_numba.squared_distance(x, anchor), dtype=torch.float64)
    return squared_distance_torch(x, anchor)


def move_anchor(x: Tensor, anchor: Tensor) -> Tensor:
    """Moves the anchor to x, in place, and returns the squared distance that rounding leaves."""
    if _has_kernel(x, anchor):
        from laconic.methods.averaging import anchor_numba

        return torch.tensor(anchor_numba.move_anchor(x, anchor), dtype=torch.float64)
    anchor.copy_(x)
    return squared_distance_torch(x, anchor)


def squared_distance_torch(x: Tensor, anchor: Tensor) -> Tensor:
    return (x.double() - anchor.double()).square_().sum()


def _has_kernel(x: Tensor, anchor: Tensor) -> bool:
    fits = (x.dtype, anchor.dtype) == (torch.float32, torch.bfloat16)
    return fits and x.numel() >= LARGE and kernels_for(x) is not None
