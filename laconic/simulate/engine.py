"""Virtual time: a heap of events, and workers that run as greenlets, one at a time.

A worker runs until it waits; then the clock goes on to the next event. Nothing here depends on real time or on the
order in which a dictionary was filled, so a simulation with the same seed is the same in every run.
"""

from __future__ import annotations

import heapq
import itertools
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from laconic.simulate.process import ProcessState

# The worker whose code runs. Greenlets have their own contexts, so it is None in event handlers and other threads.
CURRENT: ContextVar[Task | None] = ContextVar("laconic_simulated_worker", default=None)


class Killed(BaseException):
    """Ends a simulated worker that fails at a given time, as SIGKILL ends a process."""


@dataclass(eq=False)
class Task:
    """One simulated worker: its greenlet, and what it waits for."""

    rank: int
    state: ProcessState
    greenlet: Any = None
    waits_for: Callable[[], str] | None = None  # describes what it waits for; None while it runs or sleeps
    ended: bool = False
    killed: bool = False
    result: Any = None
    error: BaseException | None = None
    error_text: str = ""


@dataclass
class Engine:
    """The clock, the events, and the workers.

    Args:
        on_deadlock: called when all workers wait and no event is left; must wake at least one of them.
        on_failure: called when a worker has raised.
    """

    now: float = 0.0
    tasks: list[Task] = field(default_factory=list)
    failures: list[Task] = field(default_factory=list)  # in the order in which they failed
    on_deadlock: Callable[[], None] = lambda: None
    on_failure: Callable[[Task], None] = lambda task: None
    _heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)
    _loaded: Task | None = None  # whose random numbers and environment the process has
    _hub: Any = field(default_factory=getcurrent)  # handles the events
    _alive: int = 0  # workers that have not ended
    _stopping: bool = False

    def at(self, time: float, event: Callable[..., object], *args: Any) -> None:
        """Calls `event(*args)` at a time; of two events at the same time, the one that was planned first goes first."""
        heapq.heappush(self._heap, (time, next(self._count), event, args))

    def start(self, rank: int, time: float, function: Callable[[], Any], state: ProcessState) -> Task:
        """Plans the start of a worker."""
        task = Task(rank, state)

        def run() -> None:
            CURRENT.set(task)
            torch.set_grad_enabled(True)  # the worker that ran before may have left these otherwise
            torch.set_autocast_enabled("cpu", False)
            try:
                task.result = function()
            except KeyboardInterrupt:
                raise  # in `run`
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001  reported by `simulate`
                task.error, task.error_text = error, traceback.format_exc()
                self.failures.append(task)
                self.on_failure(task)
            finally:
                task.ended = True
                self._alive -= 1

        task.greenlet = greenlet(run, self._hub)
        self.tasks.append(task)
        self._alive += 1
        self.at(time, self.resume, task)
        return task

    def stop_soon(self) -> None:
        """Lets `run` return after the current event."""
        self._stopping = True

    def stop(self) -> None:
        """Ends all workers."""
        for task in self.tasks:
            self.kill(task)

    def run(self) -> None:
        """Handles events until all workers have ended."""
        while self._alive and not self._stopping:
            while self._heap and self._alive and not self._stopping:
                self.now, _, event, args = heapq.heappop(self._heap)
                event(*args)
            if self._alive and not self._stopping:
                self.on_deadlock()

    def resume(self, task: Task, error: BaseException | None = None) -> None:
        """Lets a worker go on until it waits again; raises `error` in it if that is given. Called by events only."""
        if task.ended:
            return
        if self._loaded is not task:
            if self._loaded is not None:
                self._loaded.state.save()
            task.state.load()
            self._loaded = task
        if error is None:
            task.greenlet.switch()
        else:
            task.greenlet.throw(error)

    def kill(self, task: Task) -> None:
        """Ends a worker, wherever it is."""
        if task.ended:
            return
        task.killed = True
        if task.greenlet:
            self.resume(task, Killed())
        else:  # it has not started
            task.ended = True
            self._alive -= 1

    def park(self, waits_for: Callable[[], str] | None) -> None:
        """Stops the current worker until `resume`."""
        task = CURRENT.get()
        assert task is not None
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "a simulated worker must not communicate inside torch.inference_mode(), which would apply to the other "
                "workers of this process too: use torch.no_grad()"
            )
        # torch keeps these by thread, and all workers share one.
        grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        task.waits_for = waits_for
        try:
            self._hub.switch()
        finally:
            task.waits_for = None
            torch.set_grad_enabled(grad)
            torch.set_autocast_enabled("cpu", autocast)

    def sleep(self, seconds: float) -> None:
        """Lets virtual time pass for the current worker."""
        self.at(self.now + seconds, self.resume, CURRENT.get())
        self.park(None)


@dataclass(eq=False)
class Event:
    """Something that workers wait for. It happens once."""

    engine: Engine
    happened: bool = False
    _waiting: list[Task] = field(default_factory=list)

    def happen(self) -> None:
        self.happened = True
        for task in self._waiting:
            self.engine.at(self.engine.now, self.engine.resume, task)
        self._waiting.clear()

    def wait(self, waits_for: Callable[[], str]) -> None:
        """Stops the current worker until this has happened; `waits_for` describes it."""
        if not self.happened:
            task = CURRENT.get()
            assert task is not None
            self._waiting.append(task)
            self.engine.park(waits_for)
