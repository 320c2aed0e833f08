"""Faults that a rank causes in its own process."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import laconic
from laconic.comm.wire import Wire
from soak.plan import Fault

Report = Callable[..., None]
LATE_SECONDS = 0.3  # by which the others are in the phase, when the victim shall be missing there
_AF_UNSPEC = bytes(16)


class PlantedError(RuntimeError):
    """An exception in the user's code."""


class Saboteur:
    """Causes the faults of one rank, at the moments that the training loop reports to it.

    Args:
        faults: those whose victim is this rank.
        report: sends an event to the launcher.
        disk: the file system of the checkpoint.
    """

    def __init__(self, faults: list[Fault], report: Report, disk: Path) -> None:
        self._faults, self._report, self._disk = list(faults), report, disk
        self._strangers: list[socket.socket] = []
        self._phase: Fault | None = None  # the fault of the phase that the rank is in
        self._meetings = 0
        self._limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def at_start(self) -> None:
        """Opens silent connections to each server socket of this process as soon as it listens."""
        for fault in self._take("strangers", None, "start"):
            create, number = socket.create_server, fault.amount

            def crowded(*args: Any, create: Any = create, number: int = number, **kwargs: Any) -> socket.socket:
                server: socket.socket = create(*args, **kwargs)
                for _ in range(number):
                    stranger = socket.socket(server.family)
                    stranger.setblocking(False)
                    stranger.connect_ex(server.getsockname())
                    self._strangers.append(stranger)
                return server

            socket.create_server = crowded
            self._report("fault", number=fault.number)

    def before_step(self, step: int) -> None:
        """Called before the gradient of this step is computed."""
        for fault in self._take("slow", step, "step"):
            self._report("fault", number=fault.number)
            time.sleep(fault.seconds)
            self._report("healed", number=fault.number)
        for fault in self._take("reset", step, "step"):
            wires = [thing for thing in gc.get_objects() if isinstance(thing, Wire) and thing.fileno() >= 0]
            if wires:
                reset(wires[(fault.number + step) % len(wires)].fileno())
                self._report("fault", number=fault.number)
        for fault in self._take("exception", step, "step"):
            self._report("fault", number=fault.number)
            raise PlantedError("no such image")

    def after_backward(self, step: int, worker: laconic.Worker) -> None:
        for fault in self._take("nan", step, "step"):
            self._report("fault", number=fault.number)
            gradient = worker.parameters[0].grad
            assert gradient is not None
            gradient.view(-1)[fault.number % gradient.numel()] = float("nan")

    def enter(self, phase: str, step: int, worker: laconic.Worker) -> None:
        """Called before `consensus()`, `save()`, `load()` and the end of the block."""
        for fault in self._take(None, step, phase):
            self._phase = fault
            if fault.kind == "disk_full":
                fill(self._disk, fault.amount << 10)
                self._report("fault", number=fault.number)
            elif fault.kind == "disk_full_on_one":
                resource.setrlimit(resource.RLIMIT_FSIZE, (fault.amount << 9, self._limit[1]))
                self._report("fault", number=fault.number)
            elif fault.point == "before":
                time.sleep(LATE_SECONDS)
                self._kill(fault)
            elif fault.point == "timer":
                threading.Thread(target=self._kill_later, args=(fault,), daemon=True).start()
            else:
                self._kill_at_meeting(fault, worker)
            return

    def leave(self, phase: str) -> None:
        """Called after them."""
        fault, self._phase = self._phase, None
        if fault is None:
            return
        if fault.kind == "disk_full":
            (self._disk / "ballast").unlink()
            self._report("healed", number=fault.number)
        elif fault.kind == "disk_full_on_one":
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limit)
            self._report("healed", number=fault.number)
        elif phase != "end":  # at the end there is nothing left to disturb
            self._kill(fault)

    def _take(self, kind: str | None, step: int | None, phase: str) -> list[Fault]:
        """Removes and returns the faults that are due."""
        due = [
            fault
            for fault in self._faults
            if (fault.phase == phase or (fault.phase == "load" and phase == "save"))  # if there was nothing to load
            and (kind is None or fault.kind == kind)
            and (step is None or phase == "load" or fault.step <= step)
        ]
        self._faults = [fault for fault in self._faults if fault not in due]
        return due

    def _kill_at_meeting(self, fault: Fault, worker: laconic.Worker) -> None:
        meet = worker.comm.meet
        left = fault.amount

        def counted(*args: Any, **kwargs: Any) -> list[Any]:
            nonlocal left
            if left == 0:
                self._kill(fault)
            left -= 1
            return meet(*args, **kwargs)

        worker.comm.meet = counted  # type: ignore[method-assign]

    def _kill_later(self, fault: Fault) -> None:
        time.sleep(fault.delay)
        if self._phase is fault:
            self._kill(fault)

    def _kill(self, fault: Fault) -> None:
        if fault.kind == "restart_in":  # the launcher kills all ranks when it reads this
            self._report("fault", number=fault.number)
            time.sleep(3600)
        self._report("fault", number=fault.number)
        os.kill(os.getpid(), signal.SIGKILL)


def reset(descriptor: int) -> None:
    """Aborts a TCP connection: its peer receives an RST, and this end is no longer connected."""
    if ctypes.CDLL(None, use_errno=True).connect(descriptor, _AF_UNSPEC, len(_AF_UNSPEC)):
        raise OSError(ctypes.get_errno(), "cannot reset the connection")


def fill(disk: Path, left: int) -> None:
    """Fills a file system up to the last `left` bytes."""
    with open(disk / "ballast", "wb") as ballast, suppress(OSError):
        room = os.statvfs(disk)
        nbytes = room.f_bavail * room.f_frsize - left
        if nbytes > 0:
            os.posix_fallocate(ballast.fileno(), 0, nbytes)
