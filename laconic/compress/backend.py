"""Which implementation runs: numba kernels in main memory, plain torch elsewhere or where numba is missing."""

import functools
import importlib
import warnings
from typing import Any

import torch


@functools.cache
def _numba_kernels() -> Any:
    """The module `laconic.compress.kernels`, or None with a warning: this function runs once."""
    try:
        return importlib.import_module("laconic.compress.kernels")
    except ImportError as error:
        warnings.warn(
            f"numba cannot be imported ({error}): compressors run in plain torch, which is 10 to 100 times slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def kernels_for(*tensors: torch.Tensor) -> Any:
    """The kernels if they can work on these tensors, else None."""
    if all(t.device.type == "cpu" and t.dtype in (torch.float32, torch.uint8) for t in tensors):
        return _numba_kernels()
    return None
