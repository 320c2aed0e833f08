"""Chooses the implementation: numba kernels for fp32 tensors in main memory, plain torch for all others."""

import functools
import hashlib
import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import torch

_IMPORTS_NUMBA = re.compile(rb"^\s*(?:import numba|from numba|from laconic\.compress\.jit)\b", re.MULTILINE)
_IMPORTS_PACKAGE = re.compile(rb"^from laconic\.([.\w]+) import", re.MULTILINE)


def kernels_for(*tensors: torch.Tensor) -> Any:
    """Returns the module `laconic.compress.kernels`, or None if it cannot work on these tensors.

    Kernels take tensors of fp32 or bytes in main memory. They are compiled at first use and then cached on disk.

    >>> kernels_for(torch.zeros(2, dtype=torch.float64)) is None
    True
    """
    if all(t.device.type == "cpu" and t.dtype in (torch.float32, torch.uint8) for t in tensors):
        return _numba_kernels()
    return None


@functools.cache
def _numba_kernels() -> Any:
    """Imports `laconic.compress.kernels`; returns None, with a warning, where numba cannot be imported.

    The cache makes this run once per process, so there is one warning.
    """
    forget_stale_kernels(Path(__file__).parents[1])
    try:
        return importlib.import_module("laconic.compress.kernels")
    except ImportError as error:
        warnings.warn(
            f"numba cannot be imported ({error}): quantizing and some methods run in plain torch, which is 10 to 100 "
            f"times slower. Install it with pip install 'laconic[fast]'",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def forget_stale_kernels(package: Path) -> None:
    """Deletes numba's cache of `package` if a source that may be compiled into its kernels has changed.

    numba compares only the file that defines a kernel. Functions and constants that the kernel takes from other files
    would stay as they were when it was compiled. A cache in NUMBA_CACHE_DIR is not touched.
    """
    sources = kernel_sources(package)
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    recorded = package / "__pycache__" / "kernel_sources.sha256"
    try:
        if recorded.exists() and recorded.read_text() == digest:
            return
        for source in sources:
            for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*.nb[ic]"):
                compiled.unlink(missing_ok=True)
        recorded.parent.mkdir(exist_ok=True)
        recorded.write_text(digest)
    except OSError:
        return  # a read-only installation, whose files only change together


def kernel_sources(package: Path) -> list[Path]:
    """Returns the files that hold kernels, and those they import constants and functions from, in a fixed order.

    A file that imports numba holds kernels. Imports are followed one level: a module that a kernel takes a constant
    from must define that constant itself.
    """
    holding = [source for source in package.rglob("*.py") if _IMPORTS_NUMBA.search(source.read_bytes())]
    names = {name.decode() for source in holding for name in _IMPORTS_PACKAGE.findall(source.read_bytes())}
    imported = [package.joinpath(*name.split(".")).with_suffix(".py") for name in names]
    return sorted({*holding, *(source for source in imported if source.exists())})
