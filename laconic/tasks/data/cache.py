"""Caches unpacked datasets as `.npy` files, which all workers of a machine map into shared memory."""

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
    """Returns $XDG_CACHE_HOME/laconic, by default ~/.cache/laconic."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laconic"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file. The kernel releases it if the process dies; the empty file may remain."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cached_arrays(key: str, unpack: Callable[[], dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Returns the arrays cached under `key`, read-only and memory-mapped.

    If they are not cached yet, one process calls `unpack` and writes them while the others wait.
    """
    folder = cache_folder() / "unpacked" / key
    if not folder.is_dir():
        with locked(folder.with_name(f"{key}.lock")):
            if not folder.is_dir():
                _write(folder, unpack())
    return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(folder.glob("*.npy"))}


def _write(folder: Path, arrays: dict[str, NDArray[Any]]) -> None:
    # The folder gets its final name only when it is complete, so a crash leaves nothing that looks complete.
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
