"""An accelerator for tests: "fake:0" and "fake:1". `fake_device.cpp` says what it does as a real one does.

The tests build it once, with the machine's C++ compiler, into the user's cache. A process that calls `load` has it.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

SOURCE = Path(__file__).parent / "fake_device.cpp"


@dataclass(frozen=True)
class Counts:
    """What this thread has asked of the device: operations, waits of the host for it, and copies from and to it."""

    kernels: int
    synchronisations: int
    to_host: int
    to_device: int

    def __sub__(self, before: Counts) -> Counts:
        return Counts(
            self.kernels - before.kernels,
            self.synchronisations - before.synchronisations,
            self.to_host - before.to_host,
            self.to_device - before.to_device,
        )


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)


requires_compiler = pytest.mark.skipif(
    _compiler() is None, reason="no C++ compiler builds the fake device (Debian: apt-get install g++)"
)


def _build() -> Path:
    """Returns the device's library, and builds it if this source was not built for this torch yet."""
    compiler = _compiler()
    assert compiler is not None
    # What extensions are compiled with, but without `cpp_extension`, which needs ninja.
    torch_folder = Path(torch.__file__).parent
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {torch_folder} {compiler}".encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laconic" / "fake_device"
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"{key[:16]}.so"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_suffix(".part")
            abi = int(torch.compiled_with_cxx11_abi())
            includes = [f"-I{torch_folder / 'include' / path}" for path in ("", "torch/csrc/api/include")]
            links = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder / 'lib'}"]
            options = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
            subprocess.run([compiler, *options, *includes, str(SOURCE), "-o", str(partial), *links], check=True)
            partial.rename(library)
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """Adds the device to this process. Returns its library."""
    path = str(_build())
    torch.ops.load_library(path)
    library = ctypes.CDLL(path)
    library.fake_device_counter.restype = library.fake_device_allocated.restype = ctypes.c_long
    rename_privateuse1_backend("fake")
    module: Any = types.ModuleType("torch.fake")

    def index_of(device: Any = None) -> int:
        index = torch.device(device).index if device is not None and not isinstance(device, int) else device
        return library.fake_device_current_device() if index is None else index

    def get_rng_state(device: Any = None) -> Tensor:
        state = torch.get_rng_state()  # the device's generator is of the CPU's kind
        library.fake_device_get_rng_state(index_of(device), ctypes.c_void_p(state.data_ptr()), state.numel())
        return state

    def set_rng_state(state: Tensor, device: Any = None) -> None:
        library.fake_device_set_rng_state(index_of(device), ctypes.c_void_p(state.data_ptr()), state.numel())

    def manual_seed_all(seed: int) -> None:
        for index in range(module.device_count()):
            library.fake_device_seed(index, ctypes.c_ulong(seed))

    module.is_available = lambda: True
    module.device_count = library.fake_device_count
    module.current_device = library.fake_device_current_device
    module.set_device = lambda device: library.fake_device_set_device(index_of(device))
    module.synchronize = lambda device=None: torch.accelerator.synchronize(index_of(device))
    module.device = lambda device: torch.accelerator.device_index(index_of(device))
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = get_rng_state
    module.set_rng_state = set_rng_state
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch._register_device_module("fake", module)
    generate_methods_for_privateuse1_backend(for_storage=True)
    return library


def allocated() -> int:
    """Returns the bytes of device memory in use, of all devices, in whole pages."""
    nbytes: int = load().fake_device_allocated()
    return nbytes


def counts() -> Counts:
    """Returns what this thread has asked of the device so far."""
    return Counts(*(load().fake_device_counter(i) for i in range(4)))
