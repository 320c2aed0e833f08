"""Wires from each worker to each other one, and operations that send and receive over all of them at a time.

A message that fits into the kernel's buffers needs no thread: the worker that waits for it reads it. Longer messages
that shall move while the worker computes need one.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

from laconic.comm.messages import Conversation, MessageError
from laconic.comm.wire import Connector, Wire, WireError

HAS_EPOLL = hasattr(select, "epoll")  # Linux
SEND_BUFFER_NBYTES = 1 << 18  # so that a worker without a thread can send a small message and go on to compute
MAX_LOST = 3  # connections between two workers that may break in a row, before a message has arrived
RECONNECT_SECONDS = 3.0  # in which the host of a lost connection must answer


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


class Mesh:
    """Wires to all other workers.

    A connection that was reset although the other worker lives is replaced: the higher rank connects again, and the
    lower one calls it to do so, in case it has not noticed. If connections break again and again before a message has
    arrived, or the other worker's port is closed, that ends all messages with an error.

    Args:
        connector: makes the wires. It is closed by `close`.
        rank: this worker.
        others: the other workers.
        background: if True, a thread does the I/O. Otherwise bytes beyond the socket buffers move inside `wait`.
    """

    def __init__(self, connector: Connector, rank: int, others: Iterable[int], *, background: bool) -> None:
        self._connector, self._rank, self._background = connector, rank, background
        self._conversations: dict[int, Conversation] = {}  # by rank
        self._peers: dict[int, int] = {}  # ranks by file descriptor
        self._epoll = select.epoll()
        self._error: WireError | None = None
        self._changed = threading.Condition()  # guards the conversations and the error
        self._closing = False
        self._thread: threading.Thread | None = None
        try:
            self._connect(others)
        except BaseException:
            self.close()
            raise
        self._epoll.register(connector, select.EPOLLIN)
        if background:
            self._closing_event = os.eventfd(0)  # wakes up the thread
            self._epoll.register(self._closing_event, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name="laconic-mesh", daemon=True)
            self._thread.start()

    def _connect(self, others: Iterable[int]) -> None:
        for peer, wire in self._connector.connect_all(list(others)).items():
            self._conversations[peer] = Conversation(peer, wire)
            self._watch(peer, wire)

    def _watch(self, peer: int, wire: Wire) -> None:
        if not self._background:
            wire.set_send_buffer(SEND_BUFFER_NBYTES)
        self._peers[wire.fileno()] = peer
        # One-shot: after an event, epoll reports none until `modify` asks again. Another thread may do that without
        # waking up the one that polls.
        self._epoll.register(wire.fileno(), select.EPOLLONESHOT)

    def sendrecv(self, messages: Mapping[int, tuple[memoryview, memoryview]]) -> MeshWork:
        """Starts, for each of these ranks, to send the first buffer to it and to fill the second with what it sends."""
        work = MeshWork(self, 2 * len(messages))
        with self._changed:
            for peer, (outgoing, incoming) in messages.items():
                if self._error is None:
                    conversation = self._conversations[peer]
                    conversation.add(outgoing, incoming, work)
                    self._move(conversation, conversation.send)
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
            for conversation in self._conversations.values():
                if conversation.missing:
                    self._move(conversation, conversation.receive)

    def serve(self) -> None:
        """Moves what can be moved, and replaces connections, while this worker waits for something else."""
        if self._thread is None and not self._closing:
            self._poll(0)

    def close(self) -> None:
        """Closes the wires. Workers that wait for this one notice at once."""
        if self._closing:
            return
        self._closing = True
        if self._thread is not None:
            os.eventfd_write(self._closing_event, 1)
            self._thread.join()
            os.close(self._closing_event)
        self._connector.close()
        self._epoll.close()
        for conversation in self._conversations.values():
            if conversation.wire is not None:
                conversation.wire.close()

    def _run(self) -> None:
        while not self._closing:
            self._poll(-1)

    def _poll(self, seconds: float) -> None:
        """Waits until something can move, and moves it."""
        for number, _ in self._epoll.poll(seconds):
            with self._changed:
                if number in self._peers:
                    conversation = self._conversations[self._peers[number]]
                    self._move(conversation, conversation.send, conversation.receive)
                elif number == self._connector.fileno():
                    for peer, generation, connection in self._connector.welcome():
                        self._welcome(peer, generation, connection)
                self._changed.notify_all()

    def _move(self, conversation: Conversation, *directions: Callable[[], None]) -> None:
        try:
            try:
                for move in directions:
                    move()
            except MessageError:
                raise
            except (WireError, OSError) as error:
                self._reconnect(conversation, error)
            if conversation.wire is not None and (events := conversation.events()):
                self._epoll.modify(conversation.wire.fileno(), events | select.EPOLLONESHOT)
        except (WireError, OSError) as error:
            self._end(WireError(f"the connection to rank {conversation.peer}: {error}"))

    def _reconnect(self, conversation: Conversation, lost: Exception) -> None:
        """Replaces a lost connection. Raises `lost` if the other worker is gone."""
        self._disconnect(conversation)
        if conversation.lost == MAX_LOST:
            raise lost
        conversation.lost += 1
        generation = conversation.generation + 1
        try:
            connection = self._connector.call(conversation.peer, generation, RECONNECT_SECONDS)
        except OSError:
            raise lost from None
        if conversation.peer < self._rank:
            self._replace(conversation, connection, generation)
        else:
            connection.close()  # the other end calls back, and `_welcome` receives it

    def _welcome(self, peer: int, generation: int, connection: socket.socket) -> None:
        """Receives a call of a worker that has lost its connection to this one."""
        conversation = self._conversations.get(peer)
        if conversation is None or generation <= conversation.generation or self._error is not None:
            connection.close()  # this end has noticed first, and has connected already
            return
        self._disconnect(conversation)
        if peer > self._rank:
            self._replace(conversation, connection, generation)
            self._move(conversation, conversation.send)
        else:
            connection.close()
            try:
                self._reconnect(conversation, WireError("the connection was lost"))
            except WireError as error:
                self._end(WireError(f"the connection to rank {peer}: {error}"))

    def _disconnect(self, conversation: Conversation) -> None:
        if conversation.wire is not None:
            number = conversation.wire.fileno()
            self._epoll.unregister(number)
            del self._peers[number]
            conversation.wire.close()
            conversation.wire = None

    def _replace(self, conversation: Conversation, connection: socket.socket, generation: int) -> None:
        wire = Wire(connection, RECONNECT_SECONDS)
        conversation.replace(wire, generation)
        self._watch(conversation.peer, wire)
        self._epoll.modify(wire.fileno(), conversation.events() | select.EPOLLONESHOT)

    def _end(self, error: WireError) -> None:
        """Ends all messages in flight with this error."""
        self._error = error
        for conversation in self._conversations.values():
            for work in conversation.drop():
                work.error = error
