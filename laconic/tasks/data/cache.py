"""Unpacked copies of datasets: plain `.npy` files that all workers of a machine map and share."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/laconic, by default ~/.cache/laconic."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laconic"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the kernel frees it if we die, and the empty file may stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def unpacked(key: str, make: Callable[[], dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """The arrays kept under `key`, read-only and memory-mapped; made, once for all processes, if not there yet."""
    folder = cache_folder() / "unpacked" / key
    if not folder.is_dir():
        with locked(folder.with_name(f"{key}.lock")):
            if not folder.is_dir():
                _write(folder, make())
    return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(folder.glob("*.npy"))}


def _write(folder: Path, arrays: dict[str, NDArray[Any]]) -> None:
    # A folder that is renamed into place only when complete: a crash leaves nothing that looks finished.
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        for name, array in arrays.items():
            with (partial / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
