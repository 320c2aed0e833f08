"""TCP over emulated links: goodput of one flow and of several at once, and round-trip times meanwhile (as root).

    python benchmarks/comm/goodput.py [--seconds 2] [--repeats 5] [--congestion cubic bbr]

prints the tables of goodput.md.
"""

import argparse
import multiprocessing
import selectors
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from laconic.emulate import Host, Link, Network, parse_links

WARM_UP_SECONDS = 1.0
BULK_PORT, PING_PORT = 4000, 4001
TOLERANCE = 0.05
fork = multiprocessing.get_context("fork")


@dataclass
class Measured:
    goodput: list[float]  # bit/s of each flow, in the order of receivers
    retransmitted: int  # TCP segments, of all flows
    round_trips: list[float]  # seconds, of small messages sent while the flows run


def receive(host: Host, senders: int, seconds: float, result: Connection) -> None:
    host.enter()
    server = socket.create_server((host.address, BULK_PORT), backlog=senders)
    result.send("ready")
    selector = selectors.DefaultSelector()
    for flow in range(senders):
        selector.register(server.accept()[0], selectors.EVENT_READ, flow)
    received = [0] * senders
    buffer = bytearray(1 << 20)
    start = time.monotonic() + WARM_UP_SECONDS
    end = start + seconds
    while (now := time.monotonic()) < end:
        for key, _ in selector.select(timeout=end - now):
            nbytes = key.fileobj.recv_into(buffer)
            received[key.data] += nbytes if time.monotonic() >= start else 0
    result.send([8 * nbytes / (time.monotonic() - start) for nbytes in received])


def send(host: Host, target: str, congestion: str, result: Connection) -> None:
    """Sends until the receiver closes, and reports the number of retransmitted segments."""
    host.enter()
    retransmitted = 0
    with socket.socket() as flow:
        flow.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        flow.connect((target, BULK_PORT))
        data = bytes(1 << 18)
        try:
            while True:
                flow.sendall(data)
                information = flow.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                (retransmitted,) = struct.unpack_from("I", information, 100)  # tcpi_total_retrans
        except (ConnectionResetError, BrokenPipeError):
            result.send(retransmitted)


def echo(host: Host, result: Connection) -> None:
    host.enter()
    server = socket.create_server((host.address, PING_PORT))
    result.send("ready")
    flow, _ = server.accept()
    while message := flow.recv(64):
        flow.sendall(message)


def ping(host: Host, target: str, seconds: float, result: Connection) -> None:
    host.enter()
    with socket.create_connection((target, PING_PORT)) as flow:
        start = time.monotonic() + WARM_UP_SECONDS
        trips = []
        while (begin := time.monotonic()) < start + seconds:
            flow.sendall(bytes(64))
            flow.recv(64)
            if begin > start:
                trips.append(time.monotonic() - begin)
            time.sleep(0.01)  # the pause between two pings
    result.send(trips)


def start(work: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    parent_end, child_end = fork.Pipe()
    process = fork.Process(target=work, args=(*arguments, child_end))
    process.start()
    child_end.close()
    return process, parent_end


def measure(links: Sequence[Link], flows: Sequence[tuple[int, int]], args: Any, congestion: str) -> Measured:
    """Runs all `flows` (from host, to host) at once; with several flows, also pings along the first one."""
    with Network(links) as network:
        hosts = network.hosts
        receivers = []
        for target in sorted({target for _, target in flows}):
            senders = sum(other == target for _, other in flows)
            receivers.append(start(receive, hosts[target], senders, args.seconds))
        echoes = [start(echo, hosts[flows[0][1]])] if len(flows) > 1 else []
        for _, pipe in receivers + echoes:
            assert pipe.recv() == "ready"
        pings = [start(ping, hosts[flows[0][0]], hosts[flows[0][1]].address, args.seconds) for _ in echoes]
        sources = [start(send, hosts[source], hosts[target].address, congestion) for source, target in flows]
        measured = Measured(
            goodput=[rate for _, pipe in receivers for rate in pipe.recv()],
            retransmitted=sum(pipe.recv() for _, pipe in sources),
            round_trips=[seconds for _, pipe in pings for seconds in pipe.recv()],
        )
        for process, _ in receivers + echoes + pings + sources:
            process.join()
    return measured


def table_of_single_flows(args: Any) -> bool:
    print("| link | congestion | goodput, Mbit/s (median) | / rate | lowest – highest | within 5 % |")
    print("|---|---|---|---|---|---|")
    all_within = True
    for rate in ("10mbit", "30mbit", "100mbit", "300mbit", "1gbit"):
        for congestion in args.congestion:
            links = parse_links(rate, workers=2)
            configured = links[0].bits_per_second
            rates = [measure(links, [(0, 1)], args, congestion).goodput[0] for _ in range(args.repeats)]
            low, middle, high = (f(rates) / configured for f in (min, statistics.median, max))
            within = abs(middle - 1) <= TOLERANCE
            all_within &= within
            row = (
                f"{middle * configured / 1e6:.2f} | {middle:.3f} | {low:.3f} – {high:.3f} | {'yes' if within else 'NO'}"
            )
            print(f"| {rate} | {congestion} | {row} |", flush=True)
    return all_within


def table_of_patterns(args: Any) -> None:
    patterns = {
        "both ways": ("{0}", 2, [(0, 1), (1, 0)]),
        "ring of 4": ("{0}", 4, [(0, 1), (1, 2), (2, 3), (3, 0)]),
        "4 into 1": ("{0}", 5, [(1, 0), (2, 0), (3, 0), (4, 0)]),
        "2 fast into 1": ("{0},1gbit,1gbit", 3, [(1, 0), (2, 0)]),
    }
    print(
        "| link | pattern | congestion | into a host / rate | by flow | retransmitted | round trip, ms: median | max |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for rate in ("10mbit", "100mbit", "1gbit"):
        for name, (text, hosts, flows) in patterns.items():
            for congestion in args.congestion:
                links = parse_links(text.format(rate), workers=hosts)
                measured = measure(links, flows, args, congestion)
                shares = [flow / links[0].bits_per_second for flow in measured.goodput]
                total = sum(shares) / len({target for _, target in flows})
                by_flow = " ".join(f"{share:.2f}" for share in shares)
                trips = [1e3 * seconds for seconds in measured.round_trips]
                delay = f"{statistics.median(trips):.1f} | {max(trips):.1f}"
                row = f"{total:.3f} | {by_flow} | {measured.retransmitted} | {delay}"
                print(f"| {rate} | {name} | {congestion} | {row} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="measured seconds, after a second of warm-up")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each single flow")
    parser.add_argument("--congestion", nargs="+", default=["cubic", "bbr"], help="TCP congestion control algorithms")
    args = parser.parse_args()
    all_within = table_of_single_flows(args)
    print()
    table_of_patterns(args)
    if not all_within:
        raise SystemExit("the median goodput of a single flow differs from the configured rate by more than 5 %")


if __name__ == "__main__":
    main()
