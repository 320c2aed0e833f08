"""What belongs to a process in a real job, and to a simulated worker here: random numbers and environment variables."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_NUMPY_NBYTES = 2500  # of numpy's Mersenne twister: 624 words and a position


class ProcessState:
    """One worker's state of the process. It is loaded before the worker goes on, and saved before another one does.

    The global generators of torch and numpy start in the same state on all workers, as in processes that were forked;
    Python's is seeded.

    Args:
        environment: variables that differ between workers.
        seed: of Python's generator, another one for each worker.
    """

    def __init__(self, environment: dict[str, str], seed: str) -> None:
        self._environment = environment
        self._torch = torch.Generator().get_state()
        self._python: Any = random.Random(seed).getstate()
        self._numpy, self._numpy_memory = _FIRST_NUMPY

    def load(self) -> None:
        os.environ.update(self._environment)
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy_memory != _numpy_memory():
            np.random.set_state(self._numpy)

    def save(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        # Few workers use numpy's generator, and reading its state takes 0.1 ms, so look first whether it has changed.
        memory = _numpy_memory()
        if memory != self._numpy_memory:
            self._numpy, self._numpy_memory = np.random.get_state(legacy=False), memory


def _numpy_memory() -> bytes:
    address = np.random.mtrand.get_bit_generator().ctypes.state_address
    return bytes((ctypes.c_char * _NUMPY_NBYTES).from_address(address))


def _first_numpy() -> tuple[Any, bytes]:
    own = np.random.get_state(legacy=False)
    np.random.seed(0)
    first = np.random.get_state(legacy=False), _numpy_memory()
    np.random.set_state(own)
    return first


_FIRST_NUMPY = _first_numpy()


@contextmanager
def kept_process() -> Iterator[None]:
    """Restores environment, random numbers, threads and grad mode of this process at the end of the `with` block."""
    environment, threads, grad = dict(os.environ), torch.get_num_threads(), torch.is_grad_enabled()
    state = ProcessState({}, "")
    state.save()
    torch.set_num_threads(1)  # as in worker processes; also, sums depend on the number of threads
    try:
        yield
    finally:
        state.load()
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
