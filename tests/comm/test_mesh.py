"""Tests meshes over loopback, between threads of this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from laconic.comm.mesh import HAS_EPOLL, Mesh, MeshWork
from laconic.comm.wire import WireError, bytes_of

pytestmark = pytest.mark.skipif(not HAS_EPOLL, reason="needs epoll, which Linux has")
LONG = timedelta(seconds=20)
BACKGROUND = pytest.mark.parametrize("background", [False, True])


@contextmanager
def meshes(size: int, background: bool) -> Iterator[list[Mesh]]:
    store = PrefixStore("job", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))

    def open_mesh(rank: int, client: Store) -> Mesh:
        others = [other for other in range(size) if other != rank]
        return Mesh(client, rank, others, timeout=20, background=background)

    with ThreadPoolExecutor(size) as pool:  # each needs its own client: a wait blocks its other users
        opened = list(pool.map(open_mesh, range(size), [store.clone() for _ in range(size)]))
    try:
        yield opened
    finally:
        for mesh in opened:
            mesh.close()


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
    store = PrefixStore("job", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    with pytest.raises(WireError, match=r"no connection to rank 1: it did not connect within 0\.1 s"):
        Mesh(store, 0, [1], timeout=0.1, background=True)
