"""Compiles the numba kernels that a run needs, before it begins, and at most once on a machine.

numba compiles a kernel at its first call and keeps it in a cache on disk. A worker calls `prepare` with the kernels
that its method names, before it connects to the others, so that no step and no time-out includes a compilation. Of the
processes that share a cache one compiles, while the others wait for it and then load the result.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from laconic.compress import Compressor, Half, Identity, Log, Pick, Sign, TopK, Uniform, encode_with_feedback
from laconic.compress.backend import kernel_sources, kernels_for
from laconic.methods.averaging import anchor
from laconic.methods.divisible import stretch

COMPILING = "compiling kernels (%s), once, about %d s"
# After so many seconds a process compiles kernels that another one has not finished: it may be stopped, or on a machine
# whose file system holds locks of the dead.
WAIT_SECONDS = 300.0
POLL_SECONDS = 0.05
START_SECONDS = 0.5  # of numba's compiler, before the first kernel

_log = logging.getLogger("laconic")
_prepared: set[str] = set()  # in this process


class KernelSet(NamedTuple):
    """Kernels that are compiled together."""

    seconds: float  # to compile them, on one core of 2026
    call: Callable[[], None]  # calls each of them, with the types that training uses


def _call_compressor(compressor: Compressor) -> None:
    x = torch.linspace(-1, 1, 4097)
    code = encode_with_feedback(compressor, x, torch.zeros_like(x))
    compressor.encode(x)
    compressor.decode(code, x.numel())
    compressor.decode_add(code, torch.zeros_like(x))


def _call_anchor() -> None:
    x = torch.linspace(-1, 1, anchor.LARGE)
    laid, _ = anchor.make_anchor(x)
    anchor.squared_distance(x, laid)


def _call_stretch() -> None:
    x = torch.ones(stretch.LARGE)
    factors = stretch.Factors.of(stretch.Settings(1e-3, 0.9, 0.999, 1e-8), count=1, seen=1, steps=1, workers=2)
    kernels = stretch.find_kernels(x)
    assert kernels is not None  # `prepare` has seen that numba is there
    vectors = [x.clone().numpy() for _ in range(4)]
    kernels.refresh(*vectors[:2], *factors)
    kernels.stretch(*vectors, *factors)


def _of(compressor: Compressor, seconds: float) -> KernelSet:
    return KernelSet(seconds, functools.partial(_call_compressor, compressor))


# By the names that `Compressor.kernels` and `Method.kernels` use.
SETS = {
    "identity": _of(Identity(), 0.2),
    "half": _of(Half(), 0.8),
    "sign": _of(Sign(), 1.2),
    "pick": _of(Pick(), 1.9),
    "log": _of(Log(), 1.9),
    "uniform": _of(Uniform(), 2.0),
    "stochastic": _of(Uniform(stochastic=True), 2.0),
    "topk": _of(TopK(), 2.0),
    "topk signs": _of(TopK(bits=1), 3.2),
    "anchor": KernelSet(0.4, _call_anchor),
    "stretch": KernelSet(0.2, _call_stretch),
}


def warm_up() -> None:
    """Compiles every kernel, or loads it from numba's cache.

    A worker compiles what its method needs by itself. This is for an image or a machine that is prepared ahead of time:

        python -c "import laconic.kernels; laconic.kernels.warm_up()"
    """
    prepare(SETS)


def load_cached() -> None:
    """Loads the kernels that have been compiled on this machine before; compiles none."""
    if importlib.util.find_spec("numba") is not None:
        prepare(name for name in SETS if _is_cached(name))


def prepare(names: Iterable[str]) -> None:
    """Compiles kernels, or loads them from numba's cache.

    Without numba there is one warning, and nothing to do. If kernels must be compiled, the logger `laconic` says which,
    and about how long it takes.

    Args:
        names: keys of `SETS`.

    >>> import laconic
    >>> prepare(laconic.LocalSGD(period=8).kernels(numel=1000, workers=4))  # none
    """
    wanted = sorted(set(names) - _prepared)
    if not wanted or kernels_for() is None:
        return
    if not all(map(_is_cached, wanted)):
        with _alone():
            missing = [name for name in wanted if not _is_cached(name)]  # another process may have compiled some
            if missing:
                seconds = START_SECONDS + sum(SETS[name].seconds for name in missing)
                _log.warning(COMPILING, ", ".join(missing), math.ceil(seconds))
            for name in missing:
                _call(name)
                if (mark := _mark(name)) is not None:
                    mark.touch()
    for name in wanted:
        _call(name)


def _call(name: str) -> None:
    if name not in _prepared:
        SETS[name].call()
        _prepared.add(name)


def _is_cached(name: str) -> bool:
    mark = _mark(name)
    return mark is not None and mark.exists()


def _mark(name: str) -> Path | None:
    """Returns the file that says that a set is in numba's cache; None if there is no cache."""
    folder = _folder()
    return None if folder is None else folder / f"laconic-{name}.{_version()}.compiled"


def _folder() -> Path | None:
    """Returns the folder of numba's cache of the compressors' kernels, or None if numba finds no writable one."""
    path = kernels_for().dense.all_finite.stats.cache_path
    if path is None:
        return None
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _version() -> str:
    """Returns a digest of all that numba's cached code depends on: sources, versions, processor."""
    import llvmlite.binding

    parts = [importlib.metadata.version("numba"), importlib.metadata.version("llvmlite"), platform.python_version()]
    parts += [llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()]
    digest = hashlib.sha256(repr(parts).encode())
    for source in kernel_sources(Path(__file__).parent):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _alone() -> Iterator[None]:
    """Keeps other processes that share the cache from compiling at the same time.

    The system releases the lock if its process dies.
    """
    folder = _folder()
    if folder is None:
        yield
        return
    with (folder / "laconic.lock").open("w") as file:
        deadline = time.monotonic() + WAIT_SECONDS
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                _log.warning("another process has compiled kernels for %g s: compiling them here too", WAIT_SECONDS)
                break
            time.sleep(POLL_SECONDS)
        yield


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
