"""Is every entry of a vector finite? In one read of the vector, where the answer is yes."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def is_finite(x: Tensor) -> bool:
    # A NaN or an infinity always reaches the sum. The sum may overflow without them: then look at every entry.
    if math.isfinite(x.sum().item()):
        return True
    return bool(torch.isfinite(x).all())
