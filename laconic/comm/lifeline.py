"""Notices when another rank's process ends, without heartbeats, and passes failures on without the store.

Each rank listens on a port as long as it takes part, and holds a connection to the next rank in a ring. When a process
ends, the kernel closes its connections and its port. So the rank before it sees its connection break, connects again,
and is refused. A process that computes, holds the interpreter's lock or is stopped is never taken for dead, since it is
the kernel that accepts its connections. A connection that was reset although the process lives is simply replaced.

The same port receives the errors of other ranks, and answers a roll call.
"""

from __future__ import annotations

import functools
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from laconic.comm.reception import Reception, call

Status = Literal["answers", "silent", "unreachable", "gone"]
RETRY_SECONDS = 1.0  # between two attempts to connect to a rank whose host does not answer
CONNECT_SECONDS = 2.0
TELL_SECONDS = 1.0  # in which another rank's host must take an error message
# The number in a hello says what the caller wants: to watch this rank or to know whether it is there, to say that it
# leaves, or to report a failure in a text of so many bytes more than _NOTICE.
_WATCH, _LEAVE, _NOTICE = 0, 1, 2
_LONGEST_NOTICE = 1 << 14  # bytes
_open: weakref.WeakSet[Lifeline] = weakref.WeakSet()


class Lifeline:
    """One rank's port and its connection to the next rank.

    Args:
        address: of this host, to listen on.
        rank: this worker.
        size: the number of workers.

    Attributes:
        notice: the first failure that another rank has reported to this one, or this one to the others.
        left: the ranks that have said goodbye.
    """

    def __init__(self, address: str, rank: int, size: int) -> None:
        self.notice: str | None = None
        self.left: set[int] = set()
        self._rank, self._size = rank, size
        self._reception = Reception(address)
        self._receptions: dict[int, str] = {}  # of the other ranks
        self._on_death: Callable[[int], None] = lambda rank: None
        self._has_told = False
        self._unreachable: set[int] = set()  # by the last survey
        self._held: socket.socket | None = None  # the connection to the next rank
        self._callers: set[socket.socket] = set()  # connections of others to this rank
        self._wake, self._woken = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="laconic-lifeline", daemon=True)
        _open.add(self)
        _watch_forks()

    def __str__(self) -> str:
        """How the others reach this rank."""
        return str(self._reception)

    @property
    def is_started(self) -> bool:
        return bool(self._receptions)

    def start(self, receptions: dict[int, str], on_death: Callable[[int], None]) -> None:
        """Starts to watch the next rank.

        Args:
            receptions: the `str` of every rank's lifeline.
            on_death: called on the lifeline's thread with a rank whose process has ended, or has closed its lifeline.
        """
        self._receptions, self._on_death = receptions, on_death
        self._thread.start()

    def tell(self, text: str) -> None:
        """Reports a failure to all other ranks: the first that is known here, which may be another one's report.

        Every rank passes it on before it closes, so that none is accused because it has ended after a failure.
        """
        self.notice = self.notice or text
        if not self._has_told:
            self._has_told = True
            content = self.notice.encode()[:_LONGEST_NOTICE]
            self._push(_NOTICE + len(content), content)

    def leave(self) -> None:
        """Says goodbye to all other ranks, so that they do not take this one for dead, and closes."""
        self._push(_LEAVE, b"")
        self.close()

    def _push(self, number: int, content: bytes) -> None:
        def send(rank: int) -> None:
            try:
                with call(self._receptions[rank], self._rank, number, TELL_SECONDS) as connection:
                    connection.sendall(content)
            except OSError:
                return  # it is gone, or finds out by itself

        # A host that has just not answered a survey would only delay this rank's own error.
        self._in_parallel(send, self._receptions.keys() - self.left - self._unreachable)

    def survey(self, ranks: Iterable[int], seconds: float) -> dict[int, Status]:
        """Finds out which of these ranks' processes exist.

        Returns:
            "answers": a thread of the process answered. "silent": the process exists, but is stopped, or its
            interpreter is busy. "unreachable": its host did not answer. "gone": the process has left or died.
        """
        result: dict[int, Status] = {}

        deadline = time.monotonic() + seconds

        def ask(rank: int) -> None:
            while (left := deadline - time.monotonic()) > 0:
                try:
                    with call(self._receptions[rank], self._rank, _WATCH, left) as connection:
                        result[rank] = "silent"
                        connection.settimeout(max(0.01, deadline - time.monotonic()))
                        if connection.recv(1):
                            result[rank] = "answers"
                            return
                except ConnectionRefusedError:
                    result[rank] = "gone"
                    return
                except ConnectionError:
                    pass
                except OSError:  # also a time-out
                    return
                # A process that ends closes its connections one after another, and its port among them.
                time.sleep(0.05)

        others = [rank for rank in ranks if rank != self._rank]
        result.update(dict.fromkeys(others, "unreachable"))
        self._in_parallel(ask, others)
        self._unreachable = {rank for rank, status in result.items() if status == "unreachable"}
        if "gone" in result.values():
            self._catch_up(seconds)
        return dict(result)

    def _catch_up(self, seconds: float) -> None:
        """Waits until the thread has read what other ranks had sent before they closed their ports.

        It answers calls in batches, in any order. So the answer to a second call comes after the whole first batch.
        """
        for _ in range(2):
            try:
                with call(str(self), self._rank, _WATCH, seconds) as connection:
                    connection.recv(1)
            except OSError:
                return  # it is busy, or closing

    def _in_parallel(self, function: Callable[[int], None], ranks: Iterable[int]) -> None:
        others = [rank for rank in ranks if rank != self._rank]
        if others:
            with ThreadPoolExecutor(min(32, len(others))) as pool:
                list(pool.map(function, others))

    def close(self) -> None:
        """Closes the port and ends the thread. The rank before this one then watches the next one."""
        if self._closing:
            return
        self._closing = True
        self._wake.close()
        if self._thread.ident is not None:
            self._thread.join(TELL_SECONDS)
        self.release()

    def release(self) -> None:
        """Closes the descriptors."""
        _open.discard(self)
        self._reception.close()
        for connection in (self._held, self._wake, self._woken, *self._callers):
            if connection is not None:
                connection.close()

    # Called by the lifeline's thread.

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._woken, selectors.EVENT_READ)
        selector.register(self._reception, selectors.EVENT_READ)
        watched = self._hold_next(self._rank, selector)
        while not self._closing:
            lost = self._held is None
            for key, _ in selector.select(RETRY_SECONDS if lost and watched != self._rank else None):
                if key.fileobj is self._reception:
                    self._welcome(selector)
                elif key.fileobj is self._held:
                    lost = not _is_open(self._held)
                elif key.fileobj is not self._woken:
                    self._hear(key.fileobj, selector)
            if lost and not self._closing:
                if self._held is not None:
                    selector.unregister(self._held)
                    self._held.close()
                    self._held = None
                    time.sleep(0.01)  # a process that ends closes its connections one after another, its port too
                watched = self._hold_next((watched - 1) % self._size, selector)
        selector.close()

    def _hold_next(self, rank: int, selector: selectors.BaseSelector) -> int:
        """Connects to the first rank after `rank` in the ring that has not ended, and returns it."""
        for watched in ((rank + distance) % self._size for distance in range(1, self._size + 1)):
            if watched == self._rank:
                return watched
            try:
                self._held = call(self._receptions[watched], self._rank, _WATCH, CONNECT_SECONDS)
            except ConnectionRefusedError:
                self._welcome(selector)  # a goodbye may be there, unread
                if watched not in self.left and not self._closing:
                    self._on_death(watched)
                continue
            except OSError:
                return watched  # its host does not answer, or closes the connection: to be tried again
            self._held.setblocking(False)
            selector.register(self._held, selectors.EVENT_READ)
            return watched
        raise AssertionError("the ring leads back to this rank")

    def _welcome(self, selector: selectors.BaseSelector) -> None:
        for rank, number, caller in self._reception.welcome(0):
            if number == _WATCH:
                try:
                    caller.send(b"+")
                except OSError:
                    caller.close()
                else:
                    self._callers.add(caller)
                    selector.register(caller, selectors.EVENT_READ)
                continue
            with caller:
                if number == _LEAVE:
                    self.left.add(rank)
                else:
                    self._read_notice(caller, min(number - _NOTICE, _LONGEST_NOTICE))

    def _hear(self, caller: object, selector: selectors.BaseSelector) -> None:
        if isinstance(caller, socket.socket) and not _is_open(caller):
            selector.unregister(caller)
            self._callers.discard(caller)
            caller.close()

    def _read_notice(self, caller: socket.socket, nbytes: int) -> None:
        caller.settimeout(TELL_SECONDS)
        try:
            notice = caller.recv(nbytes, socket.MSG_WAITALL)
        except OSError:
            return
        if len(notice) == nbytes and self.notice is None:
            self.notice = notice.decode(errors="replace")


def _is_open(connection: socket.socket) -> bool:
    """Reads what has come, and returns whether the other end is still there."""
    try:
        while connection.recv(64):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _release_in_child() -> None:
    """Closes the descriptors that a forked child (of a DataLoader, say) has inherited.

    Otherwise the port of a process that was killed would stay open until its children have ended too.
    """
    for lifeline in list(_open):
        lifeline.release()


@functools.cache  # once per process, and not at import
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_release_in_child)
