"""Accepts connections from other ranks, and hears all that have not identified themselves at the same time."""

from __future__ import annotations

import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Mapping

BACKLOG = 1024
HELLO_SECONDS = 5.0  # within which a new connection must identify itself, else it is closed
STRANGERS = 256  # connections that have not identified themselves; the oldest is closed when there are more
_HELLO = struct.Struct("!32sIQ")  # the token of the rank that listens, the rank that connects, and a number


class Reception:
    """Listens on a port of its own. A connection counts only if it begins with this port's token.

    Args:
        address: to listen on.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._address, self._token = address, secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, tuple[float, bytes]] = {}  # until when to wait, and what has come so far

    def __str__(self) -> str:
        """What `call` needs to reach this: address, port and token."""
        return f"{self._address} {self._listener.getsockname()[1]} {self._token}"

    def fileno(self) -> int:
        """A descriptor that is readable when `welcome` has something to do."""
        return self._selector.fileno()

    def welcome(self, seconds: float) -> list[tuple[int, int, socket.socket]]:
        """Waits up to so many seconds for something to happen, once.

        Returns:
            For each connection that has identified itself: its rank, its number and its socket.
        """
        known = []
        events = self._selector.select(seconds)
        if any(key.fileobj is self._listener for key, _ in events):
            self._accept()
            events = self._selector.select(0)  # what has come may be complete already
        for key, _ in events:
            if isinstance(key.fileobj, socket.socket) and (found := self._hear(key.fileobj)) is not None:
                known.append((*found, key.fileobj))
        now = time.monotonic()
        for stranger in [s for s, (deadline, _) in self._strangers.items() if now > deadline]:
            self._forget(stranger).close()
        return known

    def _accept(self) -> None:
        try:
            while True:
                stranger, _ = self._listener.accept()
                stranger.setblocking(False)
                self._selector.register(stranger, selectors.EVENT_READ)
                self._strangers[stranger] = time.monotonic() + HELLO_SECONDS, b""
                if len(self._strangers) > STRANGERS:
                    self._forget(next(iter(self._strangers))).close()
        except OSError:
            return  # there is none left, or it is gone again

    def _hear(self, stranger: socket.socket) -> tuple[int, int] | None:
        """Returns rank and number of a connection, if it has said all and knows the token."""
        if stranger not in self._strangers:
            return None  # closed in the meantime, since there were too many
        deadline, hello = self._strangers[stranger]
        try:
            came = stranger.recv(_HELLO.size - len(hello))
        except BlockingIOError:
            return None
        except OSError:
            came = b""
        hello += came
        if came and len(hello) < _HELLO.size:
            self._strangers[stranger] = deadline, hello
            return None
        self._forget(stranger)
        if came:
            token, rank, number = _HELLO.unpack(hello)
            if secrets.compare_digest(token, self._token.encode()):
                return int(rank), int(number)
        stranger.close()
        return None

    def _forget(self, stranger: socket.socket) -> socket.socket:
        del self._strangers[stranger]
        self._selector.unregister(stranger)
        return stranger

    def close(self) -> None:
        """Stops listening. Connections that were returned stay open."""
        self._selector.close()
        self._listener.close()
        for stranger in self._strangers:
            stranger.close()
        self._strangers.clear()


def call(where: str, rank: int, number: int, seconds: float) -> socket.socket:
    """Connects to a reception and identifies this rank.

    Args:
        where: the reception, as its `str`.
        rank: this rank.
        number: for the reader of the hello.
        seconds: in which the connection must be there.
    """
    address, port, token = where.split()
    connection = socket.create_connection((address, int(port)), seconds)
    try:
        connection.sendall(_HELLO.pack(token.encode(), rank, number))
    except OSError:
        connection.close()
        raise
    return connection


class NoAnswer(OSError):
    """A reception that does not answer.

    Args:
        peer: whose it is.
        why: what happened.
    """

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


def call_all(where: Mapping[int, str], rank: int, seconds: float) -> dict[int, socket.socket]:
    """Connects to several receptions at the same time, and identifies this rank, with the number 0.

    Args:
        where: the receptions, as their `str`, by rank.
        rank: this rank.
        seconds: in which all connections must be there.

    Raises:
        NoAnswer: one is not there.
    """
    deadline = time.monotonic() + seconds
    connections: dict[int, socket.socket] = {}
    try:
        for peer, text in where.items():
            address, port, _ = text.split()
            connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            connections[peer] = connection
            connection.setblocking(False)
            connection.connect_ex((address, int(port)))  # goes on while the others are called
        for peer, connection in connections.items():
            poll = select.poll()
            poll.register(connection, select.POLLOUT)
            if not poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
                raise NoAnswer(peer, f"it did not answer within {seconds:g} s")
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise NoAnswer(peer, os.strerror(error))
            connection.settimeout(seconds)
            try:
                connection.sendall(_HELLO.pack(where[peer].split()[2].encode(), rank, 0))
            except OSError as failure:
                raise NoAnswer(peer, str(failure)) from failure
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    return connections
