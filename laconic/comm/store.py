"""The job's key-value store, with a deadline for every call.

A call of torch's TCPStore waits for its answer without a time-out: for ever if the process that holds the store is
stopped, for a quarter of an hour if a link is cut. So a thread with a connection of its own makes the calls, and the
caller waits for the thread. The thread is a daemon, and does not keep a process from ending.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from laconic.comm.comm import PeerError

T = TypeVar("T")
LOOK_SECONDS = 2.0  # between two looks at the process that holds the store, while it does not answer
CONNECT_SECONDS = 3.0


class StoreGone(PeerError):
    """The job's store does not answer.

    Attributes:
        is_silent: its host may still be there.
        is_named: the text says what this rank was doing.
    """

    def __init__(self, text: str, *, is_silent: bool = False, is_named: bool = False) -> None:
        super().__init__(text)
        self.is_silent, self.is_named = is_silent, is_named


class _Call:
    """A call in flight, or its result."""

    def __init__(self, function: Callable[[Store], object]) -> None:
        self.function = function
        self.done = threading.Event()
        self.result: object = None
        self.error: Exception | None = None


class _Caller:
    """Makes the calls to a store, one after another, on a thread and a connection of its own."""

    def __init__(self, store: Store, holder: str, timeout: float) -> None:
        self.store, self.holder, self.timeout = store, holder, timeout
        self.explain: Callable[[bool], str | None] = lambda is_over: None
        self.gone: str | None = None  # why, once the store has not answered in time
        self.clones: list[JobStore] = []
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="laconic-store", daemon=True).start()

    def call(self, function: Callable[[Store], T], seconds: float = 0.0) -> T:
        """Returns function(client). `seconds`: how long the function itself may wait in the store."""
        if self.gone is not None:
            raise StoreGone(self.gone)
        call = _Call(function)
        self._calls.put(call)
        now = time.monotonic()
        deadline = now + self.timeout + seconds
        while not call.done.wait(pause := min(LOOK_SECONDS + seconds, max(0.0, deadline - now))):
            before, now = now, time.monotonic()
            if now - before > pause + LOOK_SECONDS:  # this process itself was stopped, and has not yet read the answer
                deadline = now + self.timeout
            is_over = now >= deadline
            why = self.explain(is_over)
            if why is not None or is_over:
                self.gone = why or f"{self.name} did not answer for {self.timeout:g} s"
                raise StoreGone(self.gone, is_silent=True)
        if isinstance(call.error, DistNetworkError):
            self.gone = f"{self.name} is gone ({str(call.error).splitlines()[0]})"
            raise StoreGone(self.gone) from call.error
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]

    def post(self, function: Callable[[Store], object]) -> None:
        """Makes a call whose result nobody needs. If the store does not answer, the next call finds out."""
        self._calls.put(_Call(function))

    def close(self) -> None:
        """Ends the thread and its connection."""
        self.gone = self.gone or f"{self.name} was closed by this rank"
        self._calls.put(None)
        for clone in self.clones:
            clone.close()

    @property
    def name(self) -> str:
        address = address_of(self.store)
        return f"the job's store{f' at {address[0]}:{address[1]}' if address else ''}, held by {self.holder},"

    def _run(self) -> None:
        client: Store | None = None
        while (call := self._calls.get()) is not None:
            try:
                if client is None:
                    client = _connected(self.store)
                try:
                    call.result = call.function(client)
                except DistNetworkError:
                    # The connection was reset. Every call that laconic makes may be repeated: a compare_set that was
                    # made already returns the same value again.
                    client = None
                    client = _connected(self.store)
                    call.result = call.function(client)
            except Exception as error:  # noqa: BLE001  raised again by the caller
                call.error = error
            call.done.set()


def _connected(store: Store) -> Store:
    """Returns a new connection to the store."""
    address = address_of(store)
    if address is not None:
        # torch would try for minutes to connect to a port that nobody listens on.
        try:
            socket.create_connection(address, CONNECT_SECONDS).close()
        except ConnectionRefusedError as error:
            raise DistNetworkError(str(error)) from error
        except OSError:
            pass  # it may be slow: torch tries again
    clone: Store = store.clone() if hasattr(store, "clone") else store
    return clone


def address_of(store: Store) -> tuple[str, int] | None:
    """Returns host and port of a TCPStore, None for others."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


class JobStore:
    """The job's store. Its calls have torch's names and raise `StoreGone` instead of waiting for ever.

    All threads may use it. A call from one thread waits for those of the others; `clone` returns one that does not.

    Args:
        store: torch's store.
        holder: the process that holds it, for error messages.
        timeout: seconds in which a call must be answered.
    """

    def __init__(self, store: Store, holder: str, timeout: float) -> None:
        self._caller, self._prefix = _Caller(store, holder, timeout), ""

    def prefixed(self, prefix: str) -> JobStore:
        """Returns the keys that begin with this prefix, as a store."""
        store = object.__new__(JobStore)
        store._caller, store._prefix = self._caller, f"{self._prefix}{prefix}/"
        return store

    def clone(self) -> JobStore:
        """Returns the same store over another connection."""
        store = JobStore(self._caller.store, self._caller.holder, self._caller.timeout)
        store._prefix, store._caller.explain = self._prefix, self._caller.explain
        self._caller.clones.append(store)
        return store

    def close(self) -> None:
        """Ends the connections of this store and its clones."""
        self._caller.close()

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port, if it is a TCPStore."""
        return address_of(self._caller.store)

    @property
    def name(self) -> str:
        """Where it is and who holds it, for error messages."""
        return self._caller.name

    def set_explain(self, explain: Callable[[bool], str | None]) -> None:
        """Sets a function that is called every few seconds in which the store does not answer.

        Args:
            explain: its argument says whether the time-out is over. Returns why to give up now, or None to wait on
                (after the time-out: for the usual text).
        """
        self._caller.explain = explain

    def get(self, key: str, /) -> bytes:
        """Returns the value of a key, which must be there."""
        return self._caller.call(lambda store: store.get(self._prefix + key))

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Returns the values of keys that must be there, in one call."""
        return self._caller.call(lambda store: store.multi_get([self._prefix + key for key in keys]))

    def set(self, key: str, value: str, /) -> None:
        self._caller.call(lambda store: store.set(self._prefix + key, value))

    def add(self, key: str, amount: int, /) -> int:
        return self._caller.call(lambda store: store.add(self._prefix + key, amount))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return self._caller.call(lambda store: store.compare_set(self._prefix + key, expected, desired))

    def check(self, keys: list[str], /) -> bool:
        return self._caller.call(lambda store: store.check([self._prefix + key for key in keys]))

    def delete(self, keys: list[str], /) -> None:
        """Deletes keys, without waiting for the store."""
        self._caller.post(lambda store: [store.delete_key(self._prefix + key) for key in keys])

    def wait(self, keys: list[str], seconds: float, /) -> None:
        """Waits in the store until the keys are there; torch raises a RuntimeError if they are not in time."""
        names = [self._prefix + key for key in keys]
        self._caller.call(lambda store: store.wait(names, timedelta(seconds=seconds)), seconds)

    def appear(self, keys: list[str], seconds: float, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Returns whether all keys are there within so many seconds.

        Unlike `wait`, this blocks no other caller, and writes nothing to the user's terminal when the time is over. It
        polls at growing intervals, and is late by at most a tenth of the time waited.

        Args:
            keys: the keys.
            seconds: how long to wait for them.
            meanwhile: called after each look.
        """
        start = time.monotonic()
        while not self.check(keys):
            meanwhile()
            waited = time.monotonic() - start
            if waited >= seconds:
                return False
            time.sleep(min(max(0.001, waited / 10), seconds - waited))
        return True
