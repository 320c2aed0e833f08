"""Wires over loopback, between threads of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from laconic.comm import wire
from laconic.comm.wire import Switchboard, Wire, WireError, own_address


@pytest.fixture
def store() -> Store:
    return PrefixStore("job", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def both(one: Callable[[], object], other: Callable[[], object]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(one), pool.submit(other)]:
            future.result(timeout=30)


def vector(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_both_ends_have_what_the_other_sent(sockets: tuple[socket.socket, socket.socket], dtype: torch.dtype) -> None:
    """Below, at and far above the low-water mark and the kernel's buffers, one after the other on the same wire."""
    mark = wire.BATCH_NBYTES // 4
    numels = [0, 1, mark - 1, mark, mark + 1, 3, 5_000_000, 2]

    def talk(wire: Wire, own: int) -> None:
        for i, numel in enumerate(numels):
            received = torch.empty(numel, dtype=dtype)
            wire.swap(vector(numel, dtype, seed=2 * i + own), received)
            assert torch.equal(received, vector(numel, dtype, seed=2 * i + 1 - own))

    one, other = (Wire(end, timeout=20) for end in sockets)
    both(lambda: talk(one, 0), lambda: talk(other, 1))


def test_ends_may_send_unlike_lengths(sockets: tuple[socket.socket, socket.socket]) -> None:
    long, short = vector(2_000_000), vector(3)
    got_long, got_short = torch.empty_like(long), torch.empty_like(short)
    one, other = (Wire(end, timeout=20) for end in sockets)
    both(lambda: one.swap(long, got_short), lambda: other.swap(short, got_long))
    assert torch.equal(got_long, long)
    assert torch.equal(got_short, short)


@pytest.mark.parametrize("numel", [3, 2_000_000])
def test_silence_raises_after_the_time_out(sockets: tuple[socket.socket, socket.socket], numel: int) -> None:
    with pytest.raises(WireError, match=r"nothing moved for 0\.2 s"):
        Wire(sockets[0], timeout=0.2).swap(vector(numel), torch.empty(numel))


def test_what_comes_drop_by_drop_is_no_silence(sockets: tuple[socket.socket, socket.socket]) -> None:
    """Too little to reach the low-water mark within a time-out, yet the other end lives."""
    one, other = Wire(sockets[0], timeout=3.0), sockets[1]
    sent, received = vector(100_000), torch.empty(100_000)
    stream = sent.view(torch.uint8).numpy().tobytes()

    def drip() -> None:
        pause = threading.Event()
        for start in range(0, len(stream), 80_000):
            other.sendall(stream[start : start + 80_000])
            pause.wait(0.8)

    both(lambda: one.swap(torch.empty(0), received), drip)
    assert torch.equal(received, sent)


@pytest.mark.parametrize("after", [0, 4, 400_000])
def test_an_end_that_goes_is_noticed_at_once(sockets: tuple[socket.socket, socket.socket], after: int) -> None:
    one, other = Wire(sockets[0], timeout=600), sockets[1]

    def go() -> None:
        other.sendall(bytes(after))
        other.close()

    def swap() -> None:
        with pytest.raises(WireError, match=r"the connection was closed|reset|[Bb]roken pipe"):
            one.swap(vector(1_000_000), torch.empty(1_000_000))

    both(swap, go)


def say(board: Switchboard, peer: int, number: float) -> float:
    """Over a new wire: what the peer said."""
    line, received = board.connect(peer), torch.empty(1)
    line.swap(torch.tensor([number]), received)
    line.close()
    return received.item()


def boards(store: Store, ranks: list[int], timeout: float = 20) -> list[Switchboard]:
    return [Switchboard(PrefixStore("board", store), rank, timeout) for rank in ranks]


def test_three_workers_find_each_other_in_any_order(store: Store) -> None:
    """Rank 2 calls rank 0 while that waits for rank 1: it is not turned away, and the wires are not mixed up."""
    zero, one, two = boards(store, [0, 1, 2])

    def first() -> None:
        assert say(zero, 1, 10.0) == 1.0
        assert say(zero, 2, 20.0) == 2.0

    def second() -> None:
        assert say(one, 0, 1.0) == 10.0
        received = torch.empty(1)
        early.swap(torch.tensor([2.0]), received)
        assert received.item() == 20.0

    early = two.connect(0)
    both(first, second)
    early.close()
    for board in (zero, one, two):
        board.close()


def test_strangers_are_turned_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HELLO_SECONDS", 1.0)
    zero, one = boards(store, [0, 1])
    where = zero._listener.getsockname()
    with socket.create_connection(where), socket.create_connection(where) as liar:
        liar.sendall(wire._HELLO.pack(b"0" * 32, 1))
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(say, zero, 1, 1.0), pool.submit(say, one, 0, 2.0)]
            assert [future.result(timeout=30) for future in futures] == [2.0, 1.0]
        assert liar.recv(1) == b""
    zero.close()
    one.close()


def test_who_does_not_call_or_is_gone(store: Store) -> None:
    zero, one = boards(store, [0, 1], timeout=0.2)
    with pytest.raises(WireError, match=r"it did not call within 0\.2 s"):
        zero.connect(1)
    zero.close()
    with pytest.raises(WireError, match="refused"):
        one.connect(0)
    one.close()


def test_the_address_is_the_interfaces_or_that_by_which_the_store_is_reached(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_address(store) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert own_address(store) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(ValueError, match="a network interface with an IPv4 address, not 'eth77'"):
        own_address(store)
