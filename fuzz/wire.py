"""Fuzzes the ports and connections of workers: strangers that send anything, and peers that send damaged messages.

Workers that speak to each other meanwhile must receive what was sent to them. A worker whose peer sends damaged
messages must get a WireError or a time-out, never another error, a hang or a message that differs from the one sent.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch

from fuzz.driver import main
from laconic.comm.mesh import Mesh
from laconic.comm.messages import _HEADER
from laconic.comm.reception import _HELLO, Reception, call
from laconic.comm.store import JobStore
from laconic.comm.wire import Connector, Wire, WireError, bytes_of
from laconic.launch import open_store

SECONDS = 10.0  # the time-out of connections
WAIT = timedelta(seconds=0.3)  # for a message that may never come
SLACK = 20.0  # seconds beyond that, after which a wait counts as a hang


def noise(chance: random.Random, length: int) -> bytes:
    kind = chance.randrange(3)
    if kind == 0:
        return bytes(length)
    return b"\xff" * length if kind == 1 else chance.randbytes(length)


def damage(content: bytes, chance: random.Random) -> bytes:
    """Returns content with a few bits flipped, a part removed or repeated, or noise in the middle."""
    damaged = bytearray(content)
    i = chance.randrange(len(damaged))
    kind = chance.randrange(5)
    if kind == 0:
        damaged[i] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del damaged[i:]
    elif kind == 2:
        damaged[i:i] = damaged[: chance.randrange(len(damaged))]
    elif kind == 3:
        damaged[i:i] = noise(chance, chance.randrange(1, 100))
    else:
        damaged = bytearray(noise(chance, chance.randrange(1, 200)))
    return bytes(damaged)


def strangers(chance: random.Random) -> None:
    """Two workers exchange messages while strangers connect to their ports."""
    store = JobStore(open_store("127.0.0.1", 0), "this process", timeout=SECONDS)
    connectors = [Connector(store, rank, SECONDS) for rank in range(2)]
    ports = [store.get(f"wire/{rank}").decode() for rank in range(2)]
    guests: list[socket.socket] = []

    def invite(number: int) -> None:
        for _ in range(number):
            address, port, token = chance.choice(ports).split()
            guest = socket.create_connection((address, int(port)), SECONDS)
            hello = _HELLO.pack(noise(chance, 32), chance.randrange(2**32), chance.randrange(2**64))
            if chance.random() < 0.3:  # knows the token, but not who it is
                hello = _HELLO.pack(token.encode(), chance.randrange(2, 2**32), chance.randrange(2**64))
            guest.sendall(hello if chance.random() < 0.4 else damage(hello, chance))
            if chance.random() < 0.5:
                guest.close()
            else:
                guests.append(guest)

    try:
        invite(chance.randrange(8))
        with ThreadPoolExecutor(2) as pool:
            opened = list(pool.map(lambda r: Mesh(connectors[r], r, [1 - r], background=chance.random() < 0.5), (0, 1)))
        try:
            for _ in range(3):
                invite(chance.randrange(8))
                exchange(opened, chance)
        finally:
            for mesh in opened:
                mesh.close()
    finally:
        store.close()
        for guest in guests:
            guest.close()


def exchange(opened: list[Mesh], chance: random.Random) -> None:
    """Sends a message in both directions, and compares."""
    length = chance.choice([1, 100, 100_000])
    sent = [torch.frombuffer(bytearray(chance.randbytes(length)), dtype=torch.uint8) for _ in range(2)]
    received = [torch.zeros(length, dtype=torch.uint8) for _ in range(2)]

    def run(rank: int) -> None:
        other = 1 - rank
        opened[rank].sendrecv({other: (bytes_of(sent[rank]), bytes_of(received[rank]))}).wait(timedelta(seconds=SLACK))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, (0, 1)))
    assert torch.equal(received[0], sent[1]), "another message than the one sent"
    assert torch.equal(received[1], sent[0]), "another message than the one sent"


def bad_peer(chance: random.Random) -> None:
    """Worker 0 receives messages of which some are damaged."""
    store = JobStore(open_store("127.0.0.1", 0), "this process", timeout=SECONDS)
    connector = Connector(store, 0, SECONDS)
    port = Reception("127.0.0.1")  # of the bad peer, which never answers there
    store.set("wire/1", str(port))
    if chance.random() < 0.5:
        port.close()
    peer = call(store.get("wire/0").decode(), 1, 0, SECONDS)
    mesh = Mesh(connector, 0, [1], background=chance.random() < 0.5)
    start = time.monotonic()
    try:
        for number in range(1, 4):
            content = chance.randbytes(chance.choice([1, 10, 1000]))
            frame = _HEADER.pack(number, len(content), chance.choice([0, number - 1, number, 2**64 - 1])) + content
            is_damaged = chance.random() < 0.6
            sent = damage(frame, chance) if is_damaged else frame
            received = torch.zeros(len(content), dtype=torch.uint8)
            peer.sendall(sent)
            if is_damaged and chance.random() < 0.3:
                _close(peer, chance)
            work = mesh.sendrecv({1: (bytes_of(torch.ones(5, dtype=torch.uint8)), bytes_of(received))})
            work.wait(WAIT)
            got = bytes(received.numpy().tobytes())
            header = sent[: _HEADER.size]
            assert header[:16] == frame[:16], "a message with another header was accepted"
            assert got == sent[_HEADER.size : _HEADER.size + len(content)], "another message than the one sent"
            if is_damaged:
                return  # what is left over of it confuses the next message
    except (WireError, TimeoutError, OSError):
        pass
    finally:
        mesh.close()
        peer.close()
        port.close()
        store.close()
    assert time.monotonic() - start < SLACK, "a hang"


def bad_wire(chance: random.Random) -> None:
    """One wire whose other end sends too little, too much, or closes."""
    ours, theirs = _connected()
    wire = Wire(ours, 0.2)
    incoming = torch.zeros(chance.choice([1, 1000, 400_000]), dtype=torch.uint8)
    content = chance.randbytes(chance.choice([0, incoming.numel() - 1, incoming.numel(), incoming.numel() + 9]))
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(theirs.sendall, content)
        try:
            wire.sendrecv(torch.zeros(chance.choice([0, 1, 100]), dtype=torch.uint8), incoming)
            assert incoming.numpy().tobytes() == content[: incoming.numel()], "other bytes than those sent"
        except WireError:
            assert len(content) < incoming.numel(), "an error although all bytes were sent"
        finally:
            wire.close()
            sending.exception(timeout=SLACK)  # an end that was closed early is none of this
            theirs.close()
    assert time.monotonic() - start < SLACK, "a hang"


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname(), SECONDS)
        ours, _ = server.accept()
    return ours, theirs


def _close(connection: socket.socket, chance: random.Random) -> None:
    if chance.random() < 0.5:  # with an RST instead of a FIN
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def try_case(chance: random.Random) -> None:
    chance.choice([strangers, bad_peer, bad_peer, bad_wire])(chance)


if __name__ == "__main__":
    main("wire", try_case)
