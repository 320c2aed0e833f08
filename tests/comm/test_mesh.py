"""Meshes over loopback, between threads of this process."""

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

from laconic.comm.mesh import HAS_EPOLL, Mesh, Swap
from laconic.comm.wire import WireError, bytes_of

pytestmark = pytest.mark.skipif(not HAS_EPOLL, reason="needs epoll, which Linux has")
LONG = timedelta(seconds=20)
BESIDE = pytest.mark.parametrize("beside", [False, True])


@contextmanager
def meshes(size: int, beside: bool) -> Iterator[list[Mesh]]:
    store = PrefixStore("job", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))

    def open_mesh(rank: int, client: Store) -> Mesh:
        others = [other for other in range(size) if other != rank]
        return Mesh(client, rank, others, timeout=20, beside=beside)

    with ThreadPoolExecutor(size) as pool:  # who waits keeps others out of its client
        opened = list(pool.map(open_mesh, range(size), [store.clone() for _ in range(size)]))
    try:
        yield opened
    finally:
        for mesh in opened:
            mesh.close()


def said(sender: int, receiver: int, number: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + 10 * sender + receiver)
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator)


def start(mesh: Mesh, rank: int, others: list[int], number: int, numel: int) -> tuple[Swap, dict[int, Tensor]]:
    incoming = {other: torch.zeros(numel, dtype=torch.uint8) for other in others}
    return mesh.swap(
        {other: (bytes_of(said(rank, other, number, numel)), bytes_of(incoming[other])) for other in others}
    ), incoming


@BESIDE
def test_messages_of_any_length_arrive_whichever_is_waited_for_first(beside: bool) -> None:
    """Several on their way at a time: none at all, a few bytes, and more than the kernel has room for."""
    lengths = [0, 3, 20_000_000, 1, 70_000]

    def talk(mesh: Mesh, rank: int) -> None:
        others = [other for other in range(3) if other != rank]
        started = [start(mesh, rank, others, number, numel) for number, numel in enumerate(lengths)]
        for number in (4, 0, 2, 1, 3):
            swap, incoming = started[number]
            swap.wait(LONG)
            assert swap.is_completed()
            for other, received in incoming.items():
                assert torch.equal(received, said(other, rank, number, lengths[number]))

    with meshes(3, beside) as opened, ThreadPoolExecutor(3) as pool:
        list(pool.map(talk, opened, range(3)))


@BESIDE
def test_some_of_the_workers_go_on_when_one_is_gone(beside: bool) -> None:
    with meshes(3, beside) as opened, ThreadPoolExecutor(2) as pool:
        opened[2].close()

        def talk(rank: int) -> None:
            swap, incoming = start(opened[rank], rank, [1 - rank], 0, 10)
            swap.wait(LONG)
            assert torch.equal(incoming[1 - rank], said(1 - rank, rank, 0, 10))

        list(pool.map(talk, range(2)))
        opened.pop()


@BESIDE
def test_a_wait_that_is_over_too_soon_can_be_taken_up_again(beside: bool) -> None:
    with meshes(2, beside) as opened:
        swap, incoming = start(opened[0], 0, [1], 0, 1000)
        with pytest.raises(TimeoutError):
            swap.wait(timedelta(seconds=0.05))
        assert not swap.is_completed()
        other, _ = start(opened[1], 1, [0], 0, 1000)
        swap.wait(LONG)
        other.wait(LONG)
        assert torch.equal(incoming[1], said(1, 0, 0, 1000))


@BESIDE
def test_a_peer_that_is_gone_ends_all_that_is_on_its_way_and_all_that_is_started_later(beside: bool) -> None:
    with meshes(3, beside) as opened:
        swaps = [start(opened[0], 0, [1, 2], number, 1000)[0] for number in range(2)]
        opened.pop(1).close()
        for swap in swaps:
            with pytest.raises(WireError, match=r"the wire to rank 1: (the connection was closed|.*reset)"):
                swap.wait(LONG)
            assert swap.is_completed()
        with pytest.raises(WireError, match="the wire to rank 1"):
            start(opened[0], 0, [2], 2, 10)


@BESIDE
@pytest.mark.parametrize("numel", [9, 11])
def test_workers_that_say_different_things_are_told_so(numel: int, beside: bool) -> None:
    with meshes(2, beside) as opened:
        swap, _ = start(opened[0], 0, [1], 0, 10)
        start(opened[1], 1, [0], 0, numel)
        with pytest.raises(WireError, match=f"rank 1: message 1 of {numel} bytes came for message 1 of 10 bytes"):
            swap.wait(timedelta(seconds=2))  # one that is too short is seen at the end of a wait


def test_a_worker_that_does_not_call_is_named() -> None:
    store = PrefixStore("job", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    with pytest.raises(WireError, match=r"no wire to rank 1: it did not call within 0\.1 s"):
        Mesh(store, 0, [1], timeout=0.1, beside=True)
