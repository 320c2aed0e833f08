"""Tests wires over loopback, between threads of this process."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from laconic.comm import reception, wire
from laconic.comm.store import JobStore
from laconic.comm.wire import Connector, Wire, WireError, own_address
from laconic.launch import open_store


@pytest.fixture
def store() -> Iterator[JobStore]:
    store = JobStore(open_store("127.0.0.1", 0), "this process", timeout=20)
    yield store
    store.close()


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
    """Tensors below, at and far above the low-water mark and the kernel's buffers, one after the other on one wire."""
    mark = wire.BATCH_NBYTES // 4
    numels = [0, 1, mark - 1, mark, mark + 1, 3, 5_000_000, 2]

    def sendrecv(wire: Wire, own: int) -> None:
        for i, numel in enumerate(numels):
            received = torch.empty(numel, dtype=dtype)
            wire.sendrecv(vector(numel, dtype, seed=2 * i + own), received)
            assert torch.equal(received, vector(numel, dtype, seed=2 * i + 1 - own))

    one, other = (Wire(end, timeout=20) for end in sockets)
    both(lambda: sendrecv(one, 0), lambda: sendrecv(other, 1))


def test_the_ends_may_send_different_lengths(sockets: tuple[socket.socket, socket.socket]) -> None:
    long, short = vector(2_000_000), vector(3)
    got_long, got_short = torch.empty_like(long), torch.empty_like(short)
    one, other = (Wire(end, timeout=20) for end in sockets)
    both(lambda: one.sendrecv(long, got_short), lambda: other.sendrecv(short, got_long))
    assert torch.equal(got_long, long)
    assert torch.equal(got_short, short)


@pytest.mark.parametrize("numel", [3, 2_000_000])
def test_silence_raises_after_the_time_out(sockets: tuple[socket.socket, socket.socket], numel: int) -> None:
    with pytest.raises(WireError, match=r"nothing moved for 0\.2 s"):
        Wire(sockets[0], timeout=0.2).sendrecv(vector(numel), torch.empty(numel))


def test_a_trickle_is_no_silence(sockets: tuple[socket.socket, socket.socket]) -> None:
    """Less arrives within a time-out than the low-water mark, yet the other end is alive."""
    one, other = Wire(sockets[0], timeout=3.0), sockets[1]
    sent, received = vector(100_000), torch.empty(100_000)
    stream = sent.view(torch.uint8).numpy().tobytes()

    def trickle() -> None:
        pause = threading.Event()
        for start in range(0, len(stream), 80_000):
            other.sendall(stream[start : start + 80_000])
            pause.wait(0.8)

    both(lambda: one.sendrecv(torch.empty(0), received), trickle)
    assert torch.equal(received, sent)


@pytest.mark.parametrize("after", [0, 4, 400_000])
def test_an_end_that_closes_is_noticed_at_once(sockets: tuple[socket.socket, socket.socket], after: int) -> None:
    one, other = Wire(sockets[0], timeout=600), sockets[1]

    def leave() -> None:
        other.sendall(bytes(after))
        other.close()

    def sendrecv() -> None:
        with pytest.raises(WireError, match=r"the connection was closed|reset|[Bb]roken pipe"):
            one.sendrecv(vector(1_000_000), torch.empty(1_000_000))

    both(sendrecv, leave)


def exchange(connector: Connector, peer: int, number: float) -> float:
    """Sends a number over a new wire. Returns the peer's."""
    new, received = connector.connect(peer), torch.empty(1)
    new.sendrecv(torch.tensor([number]), received)
    new.close()
    return received.item()


def connectors(store: JobStore, ranks: list[int], timeout: float = 20) -> list[Connector]:
    return [Connector(store.prefixed("wires"), rank, timeout) for rank in ranks]


def test_three_workers_find_each_other_in_any_order(store: JobStore) -> None:
    """Rank 2 connects while rank 0 waits for rank 1: it is not rejected, and the wires are not mixed up."""
    zero, one, two = connectors(store, [0, 1, 2])

    def first() -> None:
        assert exchange(zero, 1, 10.0) == 1.0
        assert exchange(zero, 2, 20.0) == 2.0

    def second() -> None:
        assert exchange(one, 0, 1.0) == 10.0
        received = torch.empty(1)
        early.sendrecv(torch.tensor([2.0]), received)
        assert received.item() == 20.0

    early = two.connect(0)
    both(first, second)
    early.close()
    for connector in (zero, one, two):
        connector.close()


def test_all_lower_ranks_are_looked_up_in_one_call(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And called before the first answers: with a delay, a call of the store for each would be round trips."""
    opened = connectors(store, [0, 1, 2, 3])
    calls: list[object] = []
    original = store._caller.call

    def counted(function: Callable[..., object], seconds: float = 0.0) -> object:
        calls.append(function)
        return original(function, seconds)

    monkeypatch.setattr(store._caller, "call", counted)
    wires = opened[3].connect_all([0, 1, 2])
    assert len(calls) == 2  # are all there, and where?
    for peer, new in wires.items():
        other, received = opened[peer].connect(3), torch.empty(1)
        both(
            functools.partial(other.sendrecv, torch.tensor([float(peer)]), torch.empty(1)),
            functools.partial(new.sendrecv, torch.tensor([3.0]), received),
        )
        assert received.item() == peer
        other.close()
        new.close()
    for connector in opened:
        connector.close()


def test_lower_and_higher_ranks_are_connected(store: JobStore) -> None:
    zero, one, two = connectors(store, [0, 1, 2])
    early = two.connect(1)
    wires = one.connect_all([0, 2])
    assert sorted(wires) == [0, 2]
    for wire_ in (*wires.values(), early):
        wire_.close()
    for connector in (zero, one, two):
        connector.close()


def test_of_many_peers_the_one_that_refuses_is_named_and_the_others_are_closed(store: JobStore) -> None:
    zero, one, two, three = connectors(store, [0, 1, 2, 3], timeout=5)
    one.close()
    early = three.connect(2)
    with pytest.raises(WireError, match=r"no connection to rank 1: .*refused"):
        two.connect_all([0, 1, 3])
    found: list[tuple[int, int, socket.socket]] = []
    while not found:
        found = zero._reception.welcome(5.0)
    ((rank, _, connection),) = found
    connection.settimeout(5.0)
    assert (rank, connection.recv(1)) == (2, b"")
    connection.close()
    for connector in (zero, two, three):
        connector.close()
    early.close()


def test_a_rank_that_does_not_say_where_it_listens_is_named(store: JobStore) -> None:
    zero, two = connectors(store, [0, 2], timeout=0.2)
    with pytest.raises(WireError, match=r"no connection to rank 1: it did not say where it listens within 0\.2 s"):
        two.connect_all([0, 1])
    for connector in (zero, two):
        connector.close()


def test_connections_without_the_token_are_closed(store: JobStore) -> None:
    zero, one = connectors(store, [0, 1])
    where = zero._reception._listener.getsockname()
    with socket.create_connection(where) as silent, socket.create_connection(where) as liar:
        liar.sendall(reception._HELLO.pack(b"0" * 32, 1, 0))
        both(lambda: exchange(zero, 1, 1.0), lambda: exchange(one, 0, 2.0))
        assert liar.recv(1) == b""
        zero.close()
        assert silent.recv(1) == b""
    one.close()


def test_strangers_do_not_delay_a_start(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them are silent, or stop in the middle, than may be heard at once. One after another would take hours."""
    monkeypatch.setattr(reception, "HELLO_SECONDS", 1000.0)
    monkeypatch.setattr(reception, "STRANGERS", 50)
    zero, one = connectors(store, [0, 1])
    where = zero._reception._listener.getsockname()
    strangers = [socket.create_connection(where) for _ in range(100)]
    for stranger in strangers[::2]:
        stranger.sendall(b"GET / HTTP/1.1")
    both(lambda: exchange(zero, 1, 1.0), lambda: exchange(one, 0, 2.0))
    assert len(zero._reception._strangers) <= 50
    for stranger in strangers:
        stranger.close()
    zero.close()
    one.close()


def test_a_stranger_is_closed_after_a_while(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "HELLO_SECONDS", 0.1)
    (zero,) = connectors(store, [0], timeout=0.5)
    with socket.create_connection(zero._reception._listener.getsockname()) as stranger:
        with pytest.raises(WireError, match="did not connect"):
            zero.connect(1)
        stranger.settimeout(20)
        assert stranger.recv(1) == b""
    zero.close()


def test_a_rank_that_does_not_connect_or_is_gone(store: JobStore) -> None:
    zero, one = connectors(store, [0, 1], timeout=0.2)
    with pytest.raises(WireError, match=r"it did not connect within 0\.2 s"):
        zero.connect(1)
    zero.close()
    with pytest.raises(WireError, match="refused"):
        one.connect(0)
    one.close()


def test_the_address_is_that_of_the_named_interface_or_of_the_one_that_leads_to_the_store(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_address(store.address) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert own_address(store.address) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(ValueError, match="a network interface with an IPv4 address, not 'eth77'"):
        own_address(store.address)
