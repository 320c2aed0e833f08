"""Tests meshes over loopback, between threads of this process."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from laconic.comm.mesh import HAS_EPOLL, Mesh, MeshWork
from laconic.comm.store import JobStore
from laconic.comm.wire import Connector, WireError, bytes_of
from laconic.launch import open_store

pytestmark = pytest.mark.skipif(not HAS_EPOLL, reason="needs epoll, which Linux has")
LONG = timedelta(seconds=20)
BACKGROUND = pytest.mark.parametrize("background", [False, True])


@contextmanager
def meshes(size: int, background: bool) -> Iterator[list[Mesh]]:
    store = JobStore(open_store("127.0.0.1", 0), "this process", timeout=20)

    def open_mesh(rank: int) -> Mesh:
        others = [other for other in range(size) if other != rank]
        return Mesh(Connector(store, rank, timeout=20), rank, others, background=background)

    with ThreadPoolExecutor(size) as pool:
        opened = list(pool.map(open_mesh, range(size)))
    try:
        yield opened
    finally:
        for mesh in opened:
            mesh.close()
        store.close()


def content(sender: int, receiver: int, number: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + 10 * sender + receiver)
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator)


def start(mesh: Mesh, rank: int, others: list[int], number: int, numel: int) -> tuple[MeshWork, dict[int, Tensor]]:
    incoming = {other: torch.zeros(numel, dtype=torch.uint8) for other in others}
    return mesh.sendrecv(
        {other: (bytes_of(content(rank, other, number, numel)), bytes_of(incoming[other])) for other in others}
    ), incoming


@BACKGROUND
def test_messages_of_any_length_arrive_whichever_is_waited_for_first(background: bool) -> None:
    """Several are in flight: of no bytes, of a few, and of more than the kernel's buffers hold."""
    lengths = [0, 3, 20_000_000, 1, 70_000]

    def sendrecv(mesh: Mesh, rank: int) -> None:
        others = [other for other in range(3) if other != rank]
        started = [start(mesh, rank, others, number, numel) for number, numel in enumerate(lengths)]
        for number in (4, 0, 2, 1, 3):
            work, incoming = started[number]
            work.wait(LONG)
            assert work.is_completed()
            for other, received in incoming.items():
                assert torch.equal(received, content(other, rank, number, lengths[number]))

    with meshes(3, background) as opened, ThreadPoolExecutor(3) as pool:
        list(pool.map(sendrecv, opened, range(3)))


@BACKGROUND
def test_the_other_workers_continue_when_one_is_gone(background: bool) -> None:
    with meshes(3, background) as opened, ThreadPoolExecutor(2) as pool:
        opened[2].close()

        def sendrecv(rank: int) -> None:
            work, incoming = start(opened[rank], rank, [1 - rank], 0, 10)
            work.wait(LONG)
            assert torch.equal(incoming[1 - rank], content(1 - rank, rank, 0, 10))

        list(pool.map(sendrecv, range(2)))
        opened.pop()


@BACKGROUND
def test_a_wait_that_timed_out_can_be_repeated(background: bool) -> None:
    with meshes(2, background) as opened:
        work, incoming = start(opened[0], 0, [1], 0, 1000)
        with pytest.raises(TimeoutError):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        other, _ = start(opened[1], 1, [0], 0, 1000)
        work.wait(LONG)
        other.wait(LONG)
        assert torch.equal(incoming[1], content(1, 0, 0, 1000))


@BACKGROUND
def test_a_peer_that_is_gone_ends_everything_in_flight_and_everything_started_later(background: bool) -> None:
    with meshes(3, background) as opened:
        works = [start(opened[0], 0, [1, 2], number, 1000)[0] for number in range(2)]
        opened.pop(1).close()
        for work in works:
            with pytest.raises(WireError, match=r"the connection to rank 1: (the connection was closed|.*reset)"):
                work.wait(LONG)
            assert work.is_completed()
        with pytest.raises(WireError, match="the connection to rank 1"):
            start(opened[0], 0, [2], 2, 10)


@BACKGROUND
@pytest.mark.parametrize("numel", [9, 11])
def test_messages_of_different_lengths_are_an_error(numel: int, background: bool) -> None:
    with meshes(2, background) as opened:
        work, _ = start(opened[0], 0, [1], 0, 10)
        start(opened[1], 1, [0], 0, numel)
        with pytest.raises(WireError, match=f"rank 1: message 1 of {numel} bytes came for message 1 of 10 bytes"):
            work.wait(timedelta(seconds=2))  # a message that is too short is seen when a wait times out


def test_a_worker_that_does_not_connect_is_named() -> None:
    connector = Connector(JobStore(open_store("127.0.0.1", 0), "this process", timeout=20), 0, timeout=0.1)
    with pytest.raises(WireError, match=r"no connection to rank 1: it did not connect within 0\.1 s"):
        Mesh(connector, 0, [1], background=True)


def reset(mesh: Mesh, peer: int) -> None:
    """Resets the connection to a peer, as a router that has forgotten it would: neither end has been asked."""
    wire = mesh._conversations[peer].wire
    assert wire is not None
    connection = socket.socket(fileno=os.dup(wire.fileno()))
    # connect() to an address of the family AF_UNSPEC disconnects; with unread data, or lingering for 0 s, by a reset.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with connection:
        assert ctypes.CDLL(None).connect(connection.fileno(), struct.pack("H14x", socket.AF_UNSPEC), 16) == 0


@BACKGROUND
@pytest.mark.parametrize("at", [0, 1])
def test_a_reset_connection_is_replaced_while_it_is_idle(background: bool, at: int) -> None:
    """Several times, and noticed first by the lower or by the higher rank."""
    with meshes(2, background) as opened, ThreadPoolExecutor(2) as pool:

        def sendrecv(rank: int, number: int) -> None:
            work, incoming = start(opened[rank], rank, [1 - rank], number, 1000)
            work.wait(LONG)
            assert torch.equal(incoming[1 - rank], content(1 - rank, rank, number, 1000))

        for number in range(4):
            list(pool.map(sendrecv, range(2), [number] * 2))
            reset(opened[at], 1 - at)


@BACKGROUND
@pytest.mark.parametrize("at", [0, 1])
def test_a_reset_connection_is_replaced_in_the_middle_of_messages(background: bool, at: int) -> None:
    """Every message arrives once and whole, also those that the kernel had taken and then discarded."""
    lengths = [3_000_000, 10, 0, 20_000_000, 7]

    def sendrecv(rank: int) -> None:
        started = [start(opened[rank], rank, [1 - rank], number, numel) for number, numel in enumerate(lengths)]
        for number, (work, incoming) in enumerate(started):
            work.wait(LONG)
            assert torch.equal(incoming[1 - rank], content(1 - rank, rank, number, lengths[number]))

    with meshes(2, background) as opened, ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(sendrecv, rank) for rank in range(2)]
        conversation = opened[at]._conversations[1 - at]
        while conversation._received == 0:
            time.sleep(0.001)
        with opened[at]._changed:
            reset(opened[at], 1 - at)
        for future in futures:
            future.result(timeout=60)
        assert [mesh._conversations[1 - i].generation for i, mesh in enumerate(opened)] == [1, 1]
        assert [len(mesh._conversations[1 - i]._unconfirmed) < 3 for i, mesh in enumerate(opened)] == [True, True]


@BACKGROUND
def test_sent_messages_are_forgotten_when_the_other_end_has_them(background: bool) -> None:
    with meshes(2, background) as opened, ThreadPoolExecutor(2) as pool:

        def sendrecv(rank: int) -> None:
            for number in range(30):
                start(opened[rank], rank, [1 - rank], number, 100)[0].wait(LONG)

        list(pool.map(sendrecv, range(2)))
        assert all(len(mesh._conversations[1 - i]._unconfirmed) <= 2 for i, mesh in enumerate(opened))
