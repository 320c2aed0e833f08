"""Compiles kernels with numba, and caches them on disk where that is possible."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import numba


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Returns numba's decorator for compiled functions, with a cache on disk.

    A read-only installation without a writable home directory has no place for a cache. Then kernels are compiled anew
    in every process, and the log says so once.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            _warn_once()
            return numba.njit(**options)(function)

    return compiled


@functools.cache
def _warn_once() -> None:
    logging.getLogger("laconic").warning(
        "numba finds no folder that it can write its cache to, so kernels are compiled anew in every process, which "
        "takes about a minute: set NUMBA_CACHE_DIR to a writable folder"
    )
