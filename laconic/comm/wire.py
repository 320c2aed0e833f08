"""Wires: TCP connections between two workers, over which both send at the same time, with few wake-ups.

gloo's threads wake up for nearly every packet. While training uses all cores, that costs more than the bytes do.
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

BATCH_NBYTES = 1 << 18  # must have arrived before this process is woken up, if so much is still to come
LOOK_SECONDS = 60.0  # between two reads of a wire on which less than that arrives
HELLO_SECONDS = 5.0  # within which a new connection must identify itself, else it is closed
BACKLOG = 64
_SIOCGIFADDR = 0x8915  # Linux's ioctl for the address of an interface
_HELLO = struct.Struct("!32sI")  # the token of the rank that listens, and the rank that connects


class WireError(RuntimeError):
    """The other end is gone, or nothing arrives from it."""


class Wire:
    """One TCP connection. For one thread at a time.

    Args:
        connection: its socket.
        timeout: seconds for which `sendrecv` may send and receive nothing at all.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._timeout = connection, timeout
        self._poll = select.poll()
        self._low_water = 1

    def sendrecv(self, outgoing: Tensor, incoming: Tensor) -> None:
        """Sends `outgoing`, and fills `incoming` with what the other end sends. Both are contiguous, in main memory."""
        unsent, missing = bytes_of(outgoing), bytes_of(incoming)
        moved_at = time.monotonic()
        while unsent or missing:
            if missing:
                self.set_low_water(min(len(missing), BATCH_NBYTES))
            self._poll.register(self._socket, (select.POLLOUT if unsent else 0) | (select.POLLIN if missing else 0))
            self._poll.poll(1000 * min(max(0.0, moved_at + self._timeout - time.monotonic()), LOOK_SECONDS))
            # Read also when the poll timed out: a trickle never reaches the low-water mark, but is a sign of life.
            sent, received = self.send(unsent), self.receive(missing)
            unsent, missing = unsent[sent:], missing[received:]
            if sent or received:
                moved_at = time.monotonic()
            elif time.monotonic() >= moved_at + self._timeout:
                raise WireError(f"nothing moved for {self._timeout:g} s")

    def close(self) -> None:
        """Closes the connection, which the other end notices at once."""
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_send_buffer(self, nbytes: int) -> None:
        """Sets how many bytes the kernel shall take at once."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)

    def set_low_water(self, nbytes: int) -> None:
        """Sets how many bytes must have arrived before a poll returns."""
        if nbytes != self._low_water:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low_water = nbytes

    def send(self, *unsent: memoryview) -> int:
        """Sends as many bytes as the kernel takes now, and returns how many."""
        if not any(unsent):
            return 0
        try:
            return self._socket.sendmsg(unsent)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise WireError(str(error)) from error

    def receive(self, *missing: memoryview) -> int:
        """Receives the bytes that have arrived, and returns how many."""
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


class Connector:
    """Makes wires to other ranks. Of two ranks the lower one listens and the higher one connects.

    The store holds each rank's address, and a token that only the workers of this job can read.
    """

    def __init__(self, store: Store, rank: int, timeout: float) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        address = own_address(store)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self._token = secrets.token_hex(16)
        self._accepted: dict[int, Wire] = {}  # from ranks that have connected before this rank asked for them
        store.set(_key(rank), f"{address} {self._listener.getsockname()[1]} {self._token}")

    def connect(self, peer: int) -> Wire:
        """Returns a new wire to the peer, which calls this too.

        Raises:
            WireError: there is none within the time-out.
        """
        try:
            return self._connect(peer) if peer < self._rank else self._accept(peer)
        except OSError as error:
            raise WireError(str(error)) from error

    def close(self) -> None:
        """Stops listening. Wires that were returned stay open."""
        self._listener.close()
        for wire in self._accepted.values():
            wire.close()

    def _connect(self, peer: int) -> Wire:
        address, port, token = self._store.get(_key(peer)).decode().split()
        connection = socket.create_connection((address, int(port)), self._timeout)
        try:
            connection.sendall(_HELLO.pack(token.encode(), self._rank))
        except OSError:
            connection.close()
            raise
        return Wire(connection, self._timeout)

    def _accept(self, peer: int) -> Wire:
        deadline = time.monotonic() + self._timeout
        while peer not in self._accepted:
            self._listener.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise WireError(f"it did not connect within {self._timeout:g} s") from None
            rank = self._identify(connection)
            if rank is None:
                connection.close()
            else:
                self._accepted[rank] = Wire(connection, self._timeout)
        return self._accepted.pop(peer)

    def _identify(self, connection: socket.socket) -> int | None:
        """Returns the rank at the other end, or None if it does not know the token."""
        connection.settimeout(HELLO_SECONDS)
        try:
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:
            return None
        if len(hello) < _HELLO.size:
            return None
        token, rank = _HELLO.unpack(hello)
        return int(rank) if secrets.compare_digest(token, self._token.encode()) else None


def own_address(store: Store) -> str:
    """Returns the address at which others reach this process.

    That is the address of the interface that GLOO_SOCKET_IFNAME names, else of the one that leads to the store.
    """
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if interfaces:
        return _address_of(interfaces[0])
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host, port = (store.host, store.port) if isinstance(store, TCPStore) else (socket.gethostname(), 9)
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: it only chooses the route
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str:
    import fcntl  # Windows has none

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
    """Returns the memory of a contiguous tensor on the CPU.

    >>> list(bytes_of(torch.tensor([1, 2], dtype=torch.int16)))
    [1, 0, 2, 0]
    """
    return tensor.reshape(-1).view(torch.uint8).numpy().data
