"""Wires: TCP connections between two workers, over which both send at the same time, with few wake-ups.

gloo's threads wake up for nearly every packet. While training uses all cores, that costs more than the bytes do.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from laconic.comm.reception import NoAnswer, Reception, call, call_all
from laconic.comm.store import JobStore

BATCH_NBYTES = 1 << 18  # must have arrived before this process is woken up, if so much is still to come
LOOK_SECONDS = 60.0  # between two reads of a wire on which less than that arrives
CHECK_SECONDS = 1.0  # between two checks for failures, while waiting for a connection
_SIOCGIFADDR = 0x8915  # Linux's ioctl for the address of an interface


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

    Args:
        store: through which ranks find each other.
        rank: this worker.
        timeout: seconds in which a peer must connect.
        check: called now and then while waiting for a peer; raises if waiting is in vain.
    """

    def __init__(self, store: JobStore, rank: int, timeout: float, check: Callable[[], None] = lambda: None) -> None:
        self._store, self._rank, self._timeout, self._check = store, rank, timeout, check
        self._reception = Reception(own_address(store.address))
        self._receptions: dict[int, str] = {}  # of the peers
        self._accepted: dict[int, Wire] = {}  # from ranks that have connected before this rank asked for them
        store.set(_key(rank), str(self._reception))

    def connect_all(self, peers: Sequence[int]) -> dict[int, Wire]:
        """Returns a new wire to each of the peers, which call this too.

        Lower ranks are called at the same time: one after another, each would cost several round trips.

        Raises:
            WireError: there is none to some peer within the time-out.
        """
        lower = [peer for peer in peers if peer < self._rank]
        wires: dict[int, Wire] = {}
        try:
            self._look_up(lower)
            called = call_all({peer: self._receptions[peer] for peer in lower}, self._rank, self._timeout)
            wires.update((peer, Wire(connection, self._timeout)) for peer, connection in called.items())
            for peer in peers:
                if peer > self._rank:
                    wires[peer] = self._connect_named(peer)
        except NoAnswer as error:
            raise WireError(f"no connection to rank {error.peer}: {error}") from error
        except BaseException:
            for wire in wires.values():
                wire.close()
            raise
        return wires

    def _connect_named(self, peer: int) -> Wire:
        try:
            return self.connect(peer)
        except WireError as error:
            raise WireError(f"no connection to rank {peer}: {error}") from error

    def _look_up(self, peers: Sequence[int]) -> None:
        """Reads where peers listen, in one call."""
        deadline, keys = time.monotonic() + self._timeout, [_key(peer) for peer in peers]
        while keys and not self._store.appear(keys, min(CHECK_SECONDS, self._timeout)):
            self._check()
            if time.monotonic() > deadline:
                missing = next(peer for peer, key in zip(peers, keys, strict=True) if not self._store.check([key]))
                raise WireError(
                    f"no connection to rank {missing}: it did not say where it listens within {self._timeout:g} s"
                )
        found = self._store.multi_get(keys) if keys else []
        self._receptions.update((peer, text.decode()) for peer, text in zip(peers, found, strict=True))

    def connect(self, peer: int) -> Wire:
        """Returns a new wire to the peer, which calls this too.

        Raises:
            WireError: there is none within the time-out.
        """
        deadline = time.monotonic() + self._timeout
        try:
            return self._connect(peer, deadline) if peer < self._rank else self._accept(peer, deadline)
        except OSError as error:
            raise WireError(str(error)) from error

    def call(self, peer: int, number: int, seconds: float) -> socket.socket:
        """Connects to the port of a peer, which receives the number by `welcome`. Raises an OSError if it is gone."""
        if peer not in self._receptions:
            self._receptions[peer] = self._store.get(_key(peer)).decode()
        return call(self._receptions[peer], self._rank, number, seconds)

    def fileno(self) -> int:
        """A descriptor that is readable when `welcome` has something to do."""
        return self._reception.fileno()

    def welcome(self) -> list[tuple[int, int, socket.socket]]:
        """Returns rank, number and socket of the peers that have called since."""
        return self._reception.welcome(0)

    def close(self) -> None:
        """Stops listening. Wires that were returned stay open."""
        self._reception.close()
        for wire in self._accepted.values():
            wire.close()

    def _connect(self, peer: int, deadline: float) -> Wire:
        while not self._store.appear([_key(peer)], min(CHECK_SECONDS, self._timeout)):
            self._check()
            if time.monotonic() > deadline:
                raise WireError(f"it did not say where it listens within {self._timeout:g} s")
        return Wire(self.call(peer, 0, self._timeout), self._timeout)

    def _accept(self, peer: int, deadline: float) -> Wire:
        checked = time.monotonic()
        while peer not in self._accepted:
            now = time.monotonic()
            if now > deadline:
                raise WireError(f"it did not connect within {self._timeout:g} s")
            if now > checked + CHECK_SECONDS:
                self._check()
                checked = now
            for rank, _, connection in self._reception.welcome(min(CHECK_SECONDS, deadline - now)):
                self._accepted[rank] = Wire(connection, self._timeout)
        return self._accepted.pop(peer)


def own_address(store: tuple[str, int] | None) -> str:
    """Returns the address at which others reach this process.

    That is the address of the interface that GLOO_SOCKET_IFNAME names, else of the one that leads to the store, else
    that of the host's name.

    Args:
        store: host and port of the job's store.
    """
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if interfaces:
        return _address_of(interfaces[0])
    host, port = store or (socket.gethostname(), 9)
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
