"""Compiles kernels with numba, and caches them on disk where that is possible."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import numba


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compiles a function that Python calls, at its first call, and caches it on disk. Releases the GIL.

    A read-only installation without a writable home directory has no place for a cache. Then kernels are compiled anew
    in every process, and the log says so once.
    """
    if function is None:
        return functools.partial(kernel, **options)
    options = {"nogil": True, "no_cfunc_wrapper": True, **options}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        _warn_once()
        return numba.njit(**options)(function)


def helper(function: Callable[..., Any]) -> Any:
    """Compiles a function that only kernels call.

    It becomes a part of each kernel that uses it. Without wrappers for Python and C and without a cache entry of its
    own, kernels compile in two thirds of the time.
    """
    options: dict[str, Any] = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**options)(function)


@functools.cache
def _warn_once() -> None:
    logging.getLogger("laconic").warning(
        "numba finds no folder that it can write its cache to, so kernels are compiled anew in every process, which "
        "takes some seconds: set NUMBA_CACHE_DIR to a writable folder"
    )
