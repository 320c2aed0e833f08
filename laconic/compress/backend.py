"""Which implementation runs: numba kernels in main memory, plain torch elsewhere or where numba is missing."""

import functools
import hashlib
import importlib
import warnings
from pathlib import Path
from typing import Any

import torch


@functools.cache
def _numba_kernels() -> Any:
    """The module `laconic.compress.kernels`, or None with a warning: this function runs once."""
    forget_stale_kernels(Path(__file__).parents[1])
    try:
        return importlib.import_module("laconic.compress.kernels")
    except ImportError as error:
        warnings.warn(
            f"numba cannot be imported ({error}): compressors run in plain torch, which is 10 to 100 times slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def forget_stale_kernels(package: Path) -> None:
    """Empty numba's cache where anything that is compiled into kernels has changed: numba looks at a kernel's own file
    only, and would go on with functions and constants of others as they were. (Its cache as it is by default; one of
    NUMBA_CACHE_DIR is left alone.)"""
    sources = sorted([*(package / "compress").rglob("*.py"), *(package / "methods").glob("windows*.py")])
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    note = package / "compress" / "kernels" / "__pycache__" / "sources.sha256"
    try:
        if note.exists() and note.read_text() == digest:
            return
        for source in sources:
            for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*.nb[ic]"):
                compiled.unlink(missing_ok=True)
        note.parent.mkdir(exist_ok=True)
        note.write_text(digest)
    except OSError:  # an installation that may not be written to, whose files change together
        return


def kernels_for(*tensors: torch.Tensor) -> Any:
    """The kernels if they can work on these tensors, else None."""
    if all(t.device.type == "cpu" and t.dtype in (torch.float32, torch.uint8) for t in tensors):
        return _numba_kernels()
    return None
