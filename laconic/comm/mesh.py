"""Wires from each worker to each other one, and operations that send and receive over all of them at a time.

A message that fits into the kernel's buffers needs no thread: the worker that waits for it reads it. Longer messages
that shall move while the worker computes need one.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from laconic.comm.wire import BATCH_NBYTES, Connector, Wire, WireError

_HEADER = struct.Struct("!QQ")  # a message's number on its wire, and its length in bytes
HAS_EPOLL = hasattr(select, "epoll")  # Linux
SEND_BUFFER_NBYTES = 1 << 18  # so that a worker without a thread can send a small message and go on to compute


class MeshWork:
    """Messages in flight to and from some workers. Has the interface of `Work`."""

    def __init__(self, mesh: Mesh, messages: int) -> None:
        self.left = messages
        self.error: WireError | None = None
        self._mesh = mesh

    def is_completed(self) -> bool:
        return self.left == 0 or self.error is not None

    def wait(self, timeout: timedelta, /) -> None:
        self._mesh.wait(self, timeout.total_seconds())
        if self.error is not None:
            raise self.error
        if self.left:
            raise TimeoutError


class Transfer:
    """One message in one direction, as far as it has not moved yet.

    Args:
        expected: the header that the message should have.
        header: the one that it has: the same if it is sent, filled while it is received.
        body: its content.
        work: the operation that it belongs to.
    """

    def __init__(self, expected: bytes, header: bytes | bytearray, body: memoryview, work: MeshWork) -> None:
        self.expected, self.header, self.work = expected, header, work
        self.rest, self.nbytes = [memoryview(header), body], len(header) + len(body)

    def move(self, move: Callable[..., int]) -> bool:
        """Moves what can be moved by `move`, a wire's `send` or `receive`. Returns whether nothing is left."""
        moved = move(*self.rest)
        self.nbytes -= moved
        if self.nbytes == 0:
            return True
        of_header = min(moved, len(self.rest[0]))
        self.rest = [self.rest[0][of_header:], self.rest[1][moved - of_header :]]
        return False

    def check(self) -> None:
        """Raises if the header is complete and not as expected."""
        if self.header != self.expected and (self.nbytes == 0 or not self.rest[0]):
            found, due = _HEADER.unpack(self.header), _HEADER.unpack(self.expected)
            raise WireError(f"message {found[0]} of {found[1]} bytes came for message {due[0]} of {due[1]} bytes")


class QueuedWire:
    """A wire, with the messages that still have to move over it in each direction, in order.

    Each message has a header with its number and length, so that workers that run different code get an error.
    """

    def __init__(self, peer: int, wire: Wire) -> None:
        self.peer, self.wire = peer, wire
        self.unsent: deque[Transfer] = deque()
        self.missing: deque[Transfer] = deque()
        self._count = 0

    def add(self, outgoing: memoryview, incoming: memoryview, work: MeshWork) -> None:
        self._count += 1
        sent, due = _HEADER.pack(self._count, len(outgoing)), _HEADER.pack(self._count, len(incoming))
        self.unsent.append(Transfer(sent, sent, outgoing, work))
        self.missing.append(Transfer(due, bytearray(_HEADER.size), incoming, work))

    def send(self) -> None:
        while self.unsent and self.unsent[0].move(self.wire.send):
            self.unsent.popleft().work.left -= 1

    def receive(self) -> None:
        while self.missing:
            is_over = self.missing[0].move(self.wire.receive)
            self.missing[0].check()
            if not is_over:
                return
            self.missing.popleft().work.left -= 1

    def events(self) -> int:
        """Returns the epoll events to wait for now."""
        if self.missing:
            self.wire.set_low_water(min(self.missing[0].nbytes, BATCH_NBYTES))
        return (select.EPOLLOUT if self.unsent else 0) | (select.EPOLLIN if self.missing else 0)


class Mesh:
    """Wires to all other workers.

    Args:
        store: through which workers find each other.
        rank: this worker.
        others: the other workers.
        timeout: seconds in which each of them must connect.
        background: if True, a thread does the I/O. Otherwise bytes beyond the socket buffers move inside `wait`.
    """

    def __init__(self, store: Store, rank: int, others: Iterable[int], timeout: float, *, background: bool) -> None:
        self._wires: dict[int, QueuedWire] = {}  # by file descriptor
        self._epoll = select.epoll()
        self._error: WireError | None = None
        self._changed = threading.Condition()  # guards the wires, their messages and the error
        self._closing = False
        self._thread: threading.Thread | None = None
        try:
            self._connect(Connector(store, rank, timeout), others)
        except BaseException:
            self.close()
            raise
        if background:
            self._closing_event = os.eventfd(0)  # wakes up the thread
            self._epoll.register(self._closing_event, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name="laconic-mesh", daemon=True)
            self._thread.start()
        else:
            for queued in self._wires.values():
                queued.wire.set_send_buffer(SEND_BUFFER_NBYTES)

    def _connect(self, connector: Connector, others: Iterable[int]) -> None:
        try:
            for peer in others:
                try:
                    queued = QueuedWire(peer, connector.connect(peer))
                except WireError as error:
                    raise WireError(f"no connection to rank {peer}: {error}") from error
                number = queued.wire.fileno()
                self._wires[number] = queued
                # One-shot: after an event, epoll reports none until `modify` asks again. Another thread may do that
                # without waking up the one that polls.
                self._epoll.register(number, select.EPOLLONESHOT)
        finally:
            connector.close()

    def sendrecv(self, messages: Mapping[int, tuple[memoryview, memoryview]]) -> MeshWork:
        """Starts, for each of these ranks, to send the first buffer to it and to fill the second with what it sends."""
        work = MeshWork(self, 2 * len(messages))
        with self._changed:
            for queued in self._wires.values():
                if queued.peer in messages and self._error is None:
                    queued.add(*messages[queued.peer], work)
                    self._move(queued, queued.send)
            if self._error is not None:
                raise self._error
        return work

    def wait(self, work: MeshWork, seconds: float) -> None:
        """Returns when the work is completed, or after so many seconds."""
        if self._thread is not None:
            with self._changed:
                self._changed.wait_for(work.is_completed, seconds)
        else:
            deadline = time.monotonic() + seconds
            while not work.is_completed() and (rest := deadline - time.monotonic()) > 0:
                self._poll(rest)
        if not work.is_completed():
            self._receive_all()

    def _receive_all(self) -> None:
        """Receives also what has not reached the low-water mark: a message that is too short shows in its header."""
        with self._changed:
            for queued in self._wires.values():
                if queued.missing:
                    self._move(queued, queued.receive)

    def close(self) -> None:
        """Closes the wires. Workers that wait for this one notice at once."""
        if self._closing:
            return
        self._closing = True
        if self._thread is not None:
            os.eventfd_write(self._closing_event, 1)
            self._thread.join()
            os.close(self._closing_event)
        self._epoll.close()
        for queued in self._wires.values():
            queued.wire.close()

    def _run(self) -> None:
        while not self._closing:
            self._poll(-1)

    def _poll(self, seconds: float) -> None:
        """Waits until something can move, and moves it."""
        for number, _ in self._epoll.poll(seconds):
            queued = self._wires.get(number)
            if queued is not None:  # else it is the closing event
                with self._changed:
                    self._move(queued, queued.send, queued.receive)
                    self._changed.notify_all()

    def _move(self, queued: QueuedWire, *directions: Callable[[], None]) -> None:
        try:
            for move in directions:
                move()
            if events := queued.events():
                self._epoll.modify(queued.wire.fileno(), events | select.EPOLLONESHOT)
        except (WireError, OSError) as error:
            self._end(WireError(f"the connection to rank {queued.peer}: {error}"))

    def _end(self, error: WireError) -> None:
        """Ends all messages in flight with this error."""
        self._error = error
        for queued in self._wires.values():
            for transfer in (*queued.unsent, *queued.missing):
                transfer.work.error = error
            queued.unsent.clear()
            queued.missing.clear()
