"""Operations in flight. torch.distributed calls the handle of a started operation its "work"."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from laconic.comm.comm import Pending
from laconic.comm.register import CHECK_SECONDS, Register, first_line

T = TypeVar("T")


POLL_SECONDS = 1e-3  # between two looks at an operation of a device


class Work(Protocol):
    """The handle of a started operation: one of gloo's, of a `Mesh`, or a `PointToPointWork`."""

    def wait(self, timeout: timedelta, /) -> object:
        """Raises a RuntimeError or a TimeoutError if the operation failed or is not over in time."""

    def is_completed(self) -> bool: ...


def wait_for(work: Work, register: Register, doing: str, participants: Mapping[int, str], number: int) -> None:
    """Waits for an operation, and checks once a second whether it can still complete.

    Args:
        work: the operation.
        register: where ranks leave their errors, and say which meeting they are at.
        doing: describes the operation in error messages.
        participants, number: as in `Register.raise_if_stuck`.

    Raises:
        PeerError: names the rank because of which the operation cannot complete, or those that give no sign of life.
    """
    start = time.monotonic()
    while True:
        # A wait that times out may do so just before the operation completes. Hence an error is the operation's own
        # only if the operation was over before the wait began.
        was_completed = work.is_completed()
        try:
            work.wait(timedelta(seconds=CHECK_SECONDS))
            return
        except (RuntimeError, TimeoutError) as error:
            if was_completed:
                raise register.roll_call(doing, first_line(error), participants) from error
            if work.is_completed():
                continue
            if time.monotonic() - start > register.timeout:
                raise register.roll_call(doing, f"waited {register.timeout:g} s", participants) from error
            register.serve()
            register.raise_if_stuck(doing, participants, number)


class DeviceWork:
    """Operations of a device's own backend (NCCL, XCCL, …), as one.

    A wait without a time-out makes the calling thread's current stream wait for them, and returns at once. A timed wait
    would block the host, and when its time is over break the communicator.

    Args:
        works: the handles of torch.distributed.
        doing: describes the operations in error messages.
        participants, number: as in `Register.raise_if_stuck`.
        step: in which they were started.
    """

    def __init__(
        self, works: Sequence[Any], doing: str, participants: Mapping[int, str], number: int, step: int
    ) -> None:
        self._works, self._doing, self._participants, self._number = works, doing, participants, number
        self.step = step

    def order(self, register: Register) -> None:
        """Makes the current stream wait for the operations. Raises a PeerError if they have failed already."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise register.roll_call(self._doing, first_line(error), self._participants) from error

    def await_completion(self, register: Register) -> None:
        """Makes the host wait for the operations, and checks once a second whether they can still complete.

        Raises:
            PeerError: as `wait_for`.
        """
        start = checked = time.monotonic()
        while not all(work.is_completed() for work in self._works):
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if now - start > register.timeout:
                raise register.roll_call(self._doing, f"waited {register.timeout:g} s", self._participants)
            if now - checked > CHECK_SECONDS:
                checked = now
                register.serve()
                register.raise_if_stuck(self._doing, self._participants, self._number)


def call_torch(function: Callable[[], T], register: Register, doing: str) -> T:
    """Calls a function of torch that uses the job's store, and so may wait for ever. Checks for failures meanwhile.

    Raises:
        PeerError: it did not return in time, or a rank has failed.
    """
    result: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            result.append(function())
        except Exception as error:  # noqa: BLE001  raised again below
            errors.append(error)

    thread = threading.Thread(target=run, name="laconic-torch", daemon=True)
    thread.start()
    start = time.monotonic()
    while thread.is_alive() and time.monotonic() - start <= register.timeout:
        thread.join(CHECK_SECONDS)
        if thread.is_alive():
            register.raise_if_failed(doing)
    others = [rank for rank in register.members if rank != register.rank]
    if errors:
        raise register.roll_call(doing, first_line(errors[0]), others) from errors[0]
    if not result:
        raise register.roll_call(doing, f"waited {register.timeout:g} s", others)
    return result[0]


class PendingWork(Pending[T]):
    """The result of an operation in flight.

    Args:
        wait: waits for the operation.
        finish: called once after that, returns the result.
        launch: the function that started the operation. It is kept since it refers to the operation's tensors, which
            gloo needs until the operation is over.
    """

    def __init__(self, wait: Callable[[], None], finish: Callable[[], T], launch: Callable[[], object]) -> None:
        self._in_flight: tuple[Callable[[], None], Callable[[], object]] | None = (wait, launch)
        self._finish = finish
        self._result: list[T] = []

    def wait(self) -> T:
        if self._in_flight is not None:
            self._in_flight[0]()
            self._result = [self._finish()]
            self._in_flight = None
        return self._result[0]


class PointToPointWork:
    """Works between two ranks, as one.

    When a wait for such a work times out, gloo breaks all connections of the process group. So a thread waits without
    a time-out, and `wait` waits for the thread.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, name="laconic-exchange", daemon=True).start()

    def _run(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        self._done.set()

    def wait(self, timeout: timedelta, /) -> None:
        if not self._done.wait(timeout.total_seconds()):
            raise TimeoutError
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._done.is_set()
