"""TCP connections between two workers, over which both send at the same time and wake up as seldom as they can.

gloo's loop wakes for nearly every packet; beside a training that uses all cores, that costs more than the bytes.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

BATCH_NBYTES = 1 << 18  # what must have arrived before this process is woken, if so much is still to come
LOOK_SECONDS = 60.0  # between two looks at a wire on which too little comes to be woken
HELLO_SECONDS = 5.0  # what a connection has to say who it is, before it is taken for a stranger
BACKLOG = 64
_SIOCGIFADDR = 0x8915  # Linux's number for "the address of this interface"
_HELLO = struct.Struct("!32sI")  # the listener's token, and the caller's rank


class WireError(RuntimeError):
    """The other end is gone, or nothing comes from it."""


class Wire:
    """One connection. For one thread at a time; `timeout` is how long nothing at all may move, in seconds."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._timeout = connection, timeout
        self._poll = select.poll()
        self._low_water = 1

    def swap(self, outgoing: Tensor, incoming: Tensor) -> None:
        """Send `outgoing` while `incoming` is filled by what the other end sends. Both contiguous, in main memory."""
        unsent, missing = bytes_of(outgoing), bytes_of(incoming)
        moved_at = time.monotonic()
        while unsent or missing:
            if missing:
                self.wake_at(min(len(missing), BATCH_NBYTES))
            self._poll.register(self._socket, (select.POLLOUT if unsent else 0) | (select.POLLIN if missing else 0))
            self._poll.poll(1000 * min(max(0.0, moved_at + self._timeout - time.monotonic()), LOOK_SECONDS))
            # Woken or not, look: what comes drop by drop reaches no low-water mark, but it is a sign of life.
            sent, received = self.send(unsent), self.receive(missing)
            unsent, missing = unsent[sent:], missing[received:]
            if sent or received:
                moved_at = time.monotonic()
            elif time.monotonic() >= moved_at + self._timeout:
                raise WireError(f"nothing moved for {self._timeout:g} s")

    def close(self) -> None:
        """The other end notices at once."""
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def make_room(self, nbytes: int) -> None:
        """For so much to be sent at once."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)

    def wake_at(self, nbytes: int) -> None:
        """How much must have arrived before this is worth reading."""
        if nbytes != self._low_water:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low_water = nbytes

    def send(self, *unsent: memoryview) -> int:
        """As much as the kernel takes now: so many bytes."""
        if not any(unsent):
            return 0
        try:
            return self._socket.sendmsg(unsent)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise WireError(str(error)) from error

    def receive(self, *missing: memoryview) -> int:
        """As much as has arrived."""
        if not any(missing):
            return 0
        try:
            nbytes = self._socket.recvmsg_into(missing)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise WireError(str(error)) from error
        if nbytes == 0:
            raise WireError("the connection was closed")
        return nbytes


class Switchboard:
    """Where a worker's wires end: of two workers the lower rank listens and the higher one calls, each when it needs
    the wire. The store says where to call, and a token that only the workers of this job know."""

    def __init__(self, store: Store, rank: int, timeout: float) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        address = own_address(store)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self._token = secrets.token_hex(16)
        self._early: dict[int, Wire] = {}  # who has called, but is not waited for yet
        store.set(_key(rank), f"{address} {self._listener.getsockname()[1]} {self._token}")

    def connect(self, peer: int) -> Wire:
        """A new wire to this peer, which does the same. Raises a WireError."""
        try:
            return self._call(peer) if peer < self._rank else self._answer(peer)
        except OSError as error:
            raise WireError(str(error)) from error

    def close(self) -> None:
        self._listener.close()
        for wire in self._early.values():
            wire.close()

    def _call(self, peer: int) -> Wire:
        address, port, token = self._store.get(_key(peer)).decode().split()
        connection = socket.create_connection((address, int(port)), self._timeout)
        try:
            connection.sendall(_HELLO.pack(token.encode(), self._rank))
        except OSError:
            connection.close()
            raise
        return Wire(connection, self._timeout)

    def _answer(self, peer: int) -> Wire:
        deadline = time.monotonic() + self._timeout
        while peer not in self._early:
            self._listener.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise WireError(f"it did not call within {self._timeout:g} s") from None
            caller = self._who_is(connection)
            if caller is None:
                connection.close()
            else:
                self._early[caller] = Wire(connection, self._timeout)
        return self._early.pop(peer)

    def _who_is(self, connection: socket.socket) -> int | None:
        connection.settimeout(HELLO_SECONDS)
        try:
            said = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:
            return None
        if len(said) < _HELLO.size:
            return None
        token, rank = _HELLO.unpack(said)
        return int(rank) if secrets.compare_digest(token, self._token.encode()) else None


def own_address(store: Store) -> str:
    """Where others reach this process: on the interface that gloo was told to use, else as it reaches the store."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if interfaces:
        return _address_of(interfaces[0])
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host, port = (store.host, store.port) if isinstance(store, TCPStore) else (socket.gethostname(), 9)
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: it only chooses the way
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str:
    import fcntl  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise ValueError(
                f"GLOO_SOCKET_IFNAME must name a network interface with an IPv4 address, not {interface!r} ({error})"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _key(rank: int) -> str:
    return f"wire/{rank}"


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
