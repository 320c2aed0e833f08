"""Messages of torch.distributed that have been started and are still to be waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from laconic.comm.comm import Pending

T = TypeVar("T")


class OnItsWay(Pending[T]):
    """Holds, by its functions, the handle and the tensors: gloo needs all of them alive until the end."""

    def __init__(self, wait: Callable[[], None], launch: Callable[[], Any], finish: Callable[[], T]) -> None:
        self._underway: tuple[Callable[[], None], Callable[[], Any]] | None = (wait, launch)
        self._finish = finish
        self._result: list[T] = []

    def wait(self) -> T:
        if self._underway is not None:
            self._underway[0]()
            self._result = [self._finish()]
            self._underway = None
        return self._result[0]


class Delivery:
    """Messages between two ranks. A wait for one that times out breaks all connections of its gloo group, so a thread
    waits to the end, and who waits for a slice of time waits for the thread."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, name="laconic-delivery", daemon=True).start()

    def _run(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        self._done.set()

    def wait(self, timeout: timedelta) -> None:
        if not self._done.wait(timeout.total_seconds()):
            raise TimeoutError
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._done.is_set()
