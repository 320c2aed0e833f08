"""Wires from each worker to each other, and messages over all of them at a time: straight, and with few wake-ups.

A message that fits into the kernel's buffers needs no thread: who waits for it reads it. Longer ones, that are to move
while the worker computes, have one.
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

from laconic.comm.wire import BATCH_NBYTES, Switchboard, Wire, WireError

_HEAD = struct.Struct("!QQ")  # the number of a message on its line, and its bytes
HAS_EPOLL = hasattr(select, "epoll")  # Linux
ROOM_NBYTES = 1 << 18  # what the kernel shall take at once from a worker that sends and then does something else


class Swap:
    """Messages to and from some workers, on their way; what `torch.distributed` calls a work."""

    def __init__(self, mesh: Mesh, messages: int) -> None:
        self.left = messages
        self.error: WireError | None = None
        self._mesh = mesh

    def is_completed(self) -> bool:
        return self.left == 0 or self.error is not None

    def wait(self, timeout: timedelta) -> None:
        self._mesh.wait(self, timeout.total_seconds())
        if self.error is not None:
            raise self.error
        if self.left:
            raise TimeoutError


class Message:
    """What is still to pass of a head and a body, in one direction. `name`: what the head says, or should."""

    def __init__(self, name: bytes, head: bytes | bytearray, body: memoryview, swap: Swap) -> None:
        self.name, self.head, self.swap = name, head, swap
        self.rest, self.nbytes = [memoryview(head), body], len(head) + len(body)

    def move(self, move: Callable[..., int]) -> bool:
        """Whether all of it has passed."""
        moved = move(*self.rest)
        self.nbytes -= moved
        if self.nbytes == 0:
            return True
        of_head = min(moved, len(self.rest[0]))
        self.rest = [self.rest[0][of_head:], self.rest[1][moved - of_head :]]
        return False

    def check(self) -> None:
        if self.head != self.name and (self.nbytes == 0 or not self.rest[0]):
            came, due = _HEAD.unpack(self.head), _HEAD.unpack(self.name)
            raise WireError(f"message {came[0]} of {came[1]} bytes came for message {due[0]} of {due[1]} bytes")


class Line:
    """A wire, and what is still to pass over it in each direction, first things first.

    The head of a message says which it is, and how long: workers that have gone different ways are told so."""

    def __init__(self, peer: int, wire: Wire) -> None:
        self.peer, self.wire = peer, wire
        self.unsent: deque[Message] = deque()
        self.missing: deque[Message] = deque()
        self._count = 0

    def add(self, outgoing: memoryview, incoming: memoryview, swap: Swap) -> None:
        self._count += 1
        sent, due = _HEAD.pack(self._count, len(outgoing)), _HEAD.pack(self._count, len(incoming))
        self.unsent.append(Message(sent, sent, outgoing, swap))
        self.missing.append(Message(due, bytearray(_HEAD.size), incoming, swap))

    def send(self) -> None:
        while self.unsent and self.unsent[0].move(self.wire.send):
            self.unsent.popleft().swap.left -= 1

    def receive(self) -> None:
        while self.missing:
            is_over = self.missing[0].move(self.wire.receive)
            self.missing[0].check()
            if not is_over:
                return
            self.missing.popleft().swap.left -= 1

    def events(self) -> int:
        """What it waits for now."""
        if self.missing:
            self.wire.wake_at(min(self.missing[0].nbytes, BATCH_NBYTES))
        return (select.EPOLLOUT if self.unsent else 0) | (select.EPOLLIN if self.missing else 0)


class Mesh:
    """`beside`: a thread moves the messages. Else they move in `wait`, as far as the kernel has no room for them."""

    def __init__(self, store: Store, rank: int, others: Iterable[int], timeout: float, *, beside: bool) -> None:
        self._lines: dict[int, Line] = {}
        self._epoll = select.epoll()
        self._error: WireError | None = None
        self._changed = threading.Condition()  # guards lines, their messages and the error
        self._closing = False
        self._thread: threading.Thread | None = None
        try:
            self._connect(Switchboard(store, rank, timeout), others)
        except BaseException:
            self.close()
            raise
        if beside:
            self._bell = os.eventfd(0)
            self._epoll.register(self._bell, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name="laconic-mesh", daemon=True)
            self._thread.start()
        else:
            for line in self._lines.values():
                line.wire.make_room(ROOM_NBYTES)

    def _connect(self, switchboard: Switchboard, others: Iterable[int]) -> None:
        try:
            for peer in others:
                try:
                    line = Line(peer, switchboard.connect(peer))
                except WireError as error:
                    raise WireError(f"no wire to rank {peer}: {error}") from error
                self._lines[line.wire.fileno()] = line
                # One event, then none before it is asked for again: also from another thread, which wakes nobody.
                self._epoll.register(line.wire.fileno(), select.EPOLLONESHOT)
        finally:
            switchboard.close()

    def swap(self, messages: Mapping[int, tuple[memoryview, memoryview]]) -> Swap:
        """Send the first to each of these workers, and fill the second with what it sends."""
        swap = Swap(self, 2 * len(messages))
        with self._changed:
            for line in self._lines.values():
                if line.peer in messages and self._error is None:
                    line.add(*messages[line.peer], swap)
                    self._move(line, line.send)
            if self._error is not None:
                raise self._error
        return swap

    def wait(self, swap: Swap, seconds: float) -> None:
        """Until it is over, but no longer than that."""
        if self._thread is not None:
            with self._changed:
                self._changed.wait_for(swap.is_completed, seconds)
        else:
            deadline = time.monotonic() + seconds
            while not swap.is_completed() and (rest := deadline - time.monotonic()) > 0:
                self._turn(rest)
        if not swap.is_completed():
            self._look()

    def _look(self) -> None:
        """At what has come too short to wake anyone: a message that is shorter than it should be says so."""
        with self._changed:
            for line in self._lines.values():
                if line.missing:
                    self._move(line, line.receive)

    def close(self) -> None:
        """Others that wait for this worker notice at once."""
        if self._closing:
            return
        self._closing = True
        if self._thread is not None:
            os.eventfd_write(self._bell, 1)
            self._thread.join()
            os.close(self._bell)
        self._epoll.close()
        for line in self._lines.values():
            line.wire.close()

    def _run(self) -> None:
        while not self._closing:
            self._turn(-1)

    def _turn(self, seconds: float) -> None:
        """Wait until something can move, and move it."""
        for number, _ in self._epoll.poll(seconds):
            line = self._lines.get(number)
            if line is not None:  # else it is the bell
                with self._changed:
                    self._move(line, line.send, line.receive)
                    self._changed.notify_all()

    def _move(self, line: Line, *ways: Callable[[], None]) -> None:
        try:
            for way in ways:
                way()
            if events := line.events():
                self._epoll.modify(line.wire.fileno(), events | select.EPOLLONESHOT)
        except (WireError, OSError) as error:
            self._end(WireError(f"the wire to rank {line.peer}: {error}"))

    def _end(self, error: WireError) -> None:
        self._error = error
        for line in self._lines.values():
            for message in (*line.unsent, *line.missing):
                message.swap.error = error
            line.unsent.clear()
            line.missing.clear()
