"""Numbered messages between two workers, which survive the loss of the connection that carries them.

A sent message is kept until the other end confirms it, in the header of one of its own messages. When a connection was
reset and replaced, both ends say how many messages they have received, and send the others again.
"""

from __future__ import annotations

import select
import struct
from collections import deque
from typing import Protocol

from laconic.comm.wire import BATCH_NBYTES, Wire, WireError

# A message's number between these two workers, its length in bytes, and how many its sender has received.
_HEADER = struct.Struct("!QQQ")
_COUNT = struct.Struct("!Q")  # messages received, first on a replaced connection


class Operation(Protocol):
    """The operation that messages belong to."""

    left: int  # messages that have not moved completely yet
    error: WireError | None


class Outgoing:
    """A message to be sent, and kept until it is confirmed."""

    def __init__(self, number: int, body: memoryview, work: Operation) -> None:
        self.number = number
        self.body: memoryview | bytes = body
        self.work: Operation | None = work
        self._rest: list[memoryview] = []

    def send(self, wire: Wire, received: int) -> bool:
        """Sends what can be sent now, and returns whether nothing is left. `received`: messages, to confirm them."""
        if not self._rest:
            self._rest = [memoryview(_HEADER.pack(self.number, len(self.body), received)), memoryview(self.body)]
        self._rest = _after(self._rest, wire.send(*self._rest))
        if any(self._rest):
            return False
        if self.work is not None:
            # Its owner may overwrite the buffer from now on, and the other end may still ask for the message again.
            self.body = bytes(self.body)
            self.work.left -= 1
            self.work = None
        self._rest = []
        return True

    def restart(self) -> None:
        self._rest = []


class Incoming:
    """A message to be received."""

    def __init__(self, number: int, body: memoryview, work: Operation) -> None:
        self._number, self._body, self.work = number, body, work
        self.restart()

    def restart(self) -> None:
        self._header = bytearray(_HEADER.size)
        self._rest = [memoryview(self._header), self._body]

    @property
    def nbytes(self) -> int:
        """Bytes that are missing."""
        return sum(map(len, self._rest))

    @property
    def has_header(self) -> bool:
        return not self._rest[0]

    @property
    def confirmed(self) -> int:
        """How many messages its sender had received."""
        return int(_HEADER.unpack(self._header)[2])

    def receive(self, wire: Wire) -> bool:
        """Receives what has arrived, and returns whether nothing is missing. Raises if it is another message."""
        self._rest = _after(self._rest, wire.receive(*self._rest))
        if self.has_header:
            number, nbytes, _ = _HEADER.unpack(self._header)
            if (number, nbytes) != (self._number, len(self._body)):
                raise MessageError(
                    f"message {number} of {nbytes} bytes came for message {self._number} of {len(self._body)} bytes"
                )
        return not any(self._rest)


class MessageError(WireError):
    """The other end has sent another message than the one that is expected. A new connection would not help."""


class Conversation:
    """Messages to and from one worker, and the wire that carries them now, if any.

    Attributes:
        peer: the rank of the other worker.
        wire: None while the connection is lost.
        generation: how often the wire was replaced.
        lost: how many wires this end has lost in a row, without a message in between.
    """

    def __init__(self, peer: int, wire: Wire) -> None:
        self.peer, self.generation, self.lost = peer, 0, 0
        self.wire: Wire | None = wire
        self.missing: deque[Incoming] = deque()
        self._unsent: deque[Outgoing] = deque()
        self._unconfirmed: deque[Outgoing] = deque()
        self._started = self._received = 0
        self._greeting = memoryview(b"")  # this end's count, as far as it is unsent
        self._answer: bytearray | None = None  # the other end's, while it is missing
        self._answer_rest = memoryview(b"")

    def add(self, outgoing: memoryview, incoming: memoryview, work: Operation) -> None:
        """Queues a message to be sent and one to be received, under the same number."""
        self._started += 1
        self._unsent.append(Outgoing(self._started, outgoing, work))
        self.missing.append(Incoming(self._started, incoming, work))

    def replace(self, wire: Wire, generation: int) -> None:
        """Continues over another wire, from the last message that has arrived completely."""
        self.wire, self.generation = wire, generation
        for outgoing in self._unsent:
            outgoing.restart()
        for incoming in self.missing:
            incoming.restart()
        self._greeting = memoryview(_COUNT.pack(self._received))
        self._answer = bytearray(_COUNT.size)
        self._answer_rest = memoryview(self._answer)

    def drop(self) -> list[Operation]:
        """Gives up all messages in flight. Returns their operations."""
        works = [message.work for message in self.missing]
        works += [message.work for message in self._unsent if message.work is not None]
        self.missing.clear()
        self._unsent.clear()
        return works

    def send(self) -> None:
        """Sends what can be sent now."""
        if self.wire is None:
            return
        if self._greeting:
            self._greeting = self._greeting[self.wire.send(self._greeting) :]
        if self._greeting or self._answer is not None:
            return
        while self._unsent and self._unsent[0].send(self.wire, self._received):
            self._unconfirmed.append(self._unsent.popleft())

    def receive(self) -> None:
        """Receives what has arrived."""
        if self.wire is None:
            return
        if self._answer is not None:
            self._answer_rest = self._answer_rest[self.wire.receive(self._answer_rest) :]
            if self._answer_rest:
                return
            (confirmed,) = _COUNT.unpack(self._answer)
            self._answer = None
            self._confirm(confirmed)
            self._unsent = self._unconfirmed + self._unsent
            self._unconfirmed = deque()
            self.send()
        while self.missing:
            message = self.missing[0]
            if message.nbytes and not message.receive(self.wire) and not message.has_header:
                return
            self._confirm(message.confirmed)
            if message.nbytes:
                return
            self.missing.popleft()
            self._received += 1
            self.lost = 0
            message.work.left -= 1

    def _confirm(self, number: int) -> None:
        while self._unconfirmed and self._unconfirmed[0].number <= number:
            self._unconfirmed.popleft()

    def events(self) -> int:
        """Returns the epoll events to wait for now."""
        if self.wire is None:
            return 0
        if self._answer is not None:
            self.wire.set_low_water(1)
            return select.EPOLLIN | (select.EPOLLOUT if self._greeting else 0)
        if self.missing:
            self.wire.set_low_water(max(1, min(self.missing[0].nbytes, BATCH_NBYTES)))
        return (select.EPOLLOUT if self._unsent else 0) | (select.EPOLLIN if self.missing else 0)


def _after(parts: list[memoryview], nbytes: int) -> list[memoryview]:
    """Returns header and body without their first bytes."""
    of_header = min(nbytes, len(parts[0]))
    return [parts[0][of_header:], parts[1][nbytes - of_header :]]
