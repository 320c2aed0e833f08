"""Links with delay, jitter and loss: a process relays the packets of TUN devices."""

import math
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest

from laconic.emulate import EmulationError, Host, Network, parse_links
from tests.emulate.test_network import PORT, answer, reach, start, transfer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces exist only on Linux")
DATAGRAMS = 1000
DATAGRAM_NBYTES = 14 + 20 + 8 + 4  # with the headers of Ethernet, IP and UDP
EARLIER = 4  # datagrams that are as long as the last packets of an earlier connection


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with ExitStack() as stack:
        try:
            links = parse_links("100mbit+20ms,20mbit+40ms~10ms,100mbit+20ms%10", workers=3)
            network = stack.enter_context(Network(links))
        except EmulationError as error:
            pytest.skip(str(error))
        yield network


def echo(host: Host, pipe: Connection) -> None:
    """Sends each byte back."""
    host.enter()
    with socket.create_server((host.address, PORT)) as server:
        pipe.send("ready")
        flow, _ = server.accept()
        with flow:
            while data := flow.recv(1):
                flow.sendall(data)


def round_trips(host: Host, target: str, pipe: Connection) -> None:
    host.enter()
    seconds = []
    with socket.create_connection((target, PORT), timeout=30) as flow:
        flow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(20):
            begin = time.monotonic()
            flow.sendall(b"!")
            assert flow.recv(1) == b"!"
            seconds.append(time.monotonic() - begin)
    pipe.send(seconds)


def count(host: Host, pipe: Connection) -> None:
    """Sends the numbers of the datagrams that arrive, in their order, until the last one or a pause."""
    host.enter()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as inbox:
        inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        inbox.bind((host.address, PORT))
        inbox.settimeout(30)
        pipe.send("ready")
        found = []
        try:
            while True:
                found.append(int(inbox.recv(100)))
                inbox.settimeout(2)
        except TimeoutError:
            pipe.send(found)


def post(host: Host, target: str, pipe: Connection) -> None:
    host.enter()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outbox:
        for number in range(DATAGRAMS):
            outbox.sendto(f"{number:04}".encode(), (target, PORT))
            time.sleep(2e-4)
    pipe.send("posted")


def posted(network: Network, source: int, target: int) -> tuple[list[int], int, int]:
    """Sends datagrams. Returns the numbers of those that a process has received, and how many the relay took and gave.

    On a busy machine the queues of the hosts overflow, before and behind the relay. The relay's counts do not depend on
    that; they may have some packets of earlier connections in them.
    """
    before = network.counters()
    process, pipe = start(count, network.hosts[target])
    assert pipe.recv() == "ready"
    assert answer(post, network.hosts[source], network.hosts[target].address) == "posted"
    found: list[int] = pipe.recv()
    process.join()
    after = network.counters()
    taken = after[source][0] - before[source][0]
    given = after[target][1] - before[target][1]
    assert len(found) <= given // DATAGRAM_NBYTES
    return found, taken // DATAGRAM_NBYTES, given // DATAGRAM_NBYTES


@pytest.mark.parametrize("ends", [(0, 2), (0, 1), (1, 2)])
def test_a_round_trip_takes_both_delays(network: Network, ends: tuple[int, int]) -> None:
    source, target = (network.hosts[i] for i in ends)
    process, pipe = start(echo, target)
    assert pipe.recv() == "ready"
    seconds = answer(round_trips, source, target.address)
    process.join()
    # (20 + 20)/2 ms each way without jitter; (20 + 40)/2 ms, and up to 5 ms less, with it.
    assert min(seconds) >= (50e-3 if 1 in ends else 40e-3)


def test_everything_arrives_although_packets_are_lost_and_the_counters_include_it(network: Network) -> None:
    before = network.counters()
    nbytes = 3_000_000  # about 330 packets: none is lost once in 10^7 runs
    assert transfer(network.hosts[0], network.hosts[2], nbytes) == (network.hosts[0].address, nbytes)
    sent, received = ([b[i] - a[i] for a, b in zip(before, network.counters(), strict=True)] for i in (0, 1))
    assert sent[0] > received[2] > nbytes
    assert max(sent[1], received[1]) < 200, "at most the end of an earlier connection"


def test_losses_have_their_probability(network: Network) -> None:
    """The mean of 0 and 10 %, to five standard deviations."""
    found, taken, given = posted(network, 0, 2)
    assert taken > DATAGRAMS / 2
    assert abs(given - 0.95 * taken) <= 5 * math.sqrt(taken * 0.95 * 0.05) + EARLIER
    assert found == sorted(found), "without jitter the order is kept"


def test_jitter_changes_the_order_and_loses_nothing(network: Network) -> None:
    found, taken, given = posted(network, 0, 1)
    assert taken > DATAGRAMS / 2
    assert abs(given - taken) <= EARLIER
    assert found != sorted(found)


def test_a_relayed_link_that_is_cut_and_healed(network: Network) -> None:
    network.cut(1)
    assert answer(reach, network.hosts[0], network.hosts[1].address) != 0
    network.heal(1)
    assert transfer(network.hosts[0], network.hosts[1], 1000) == (network.hosts[0].address, 1000)
