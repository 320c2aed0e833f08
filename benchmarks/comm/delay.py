"""Measures round-trip time, goodput and loss of emulated links with delay.

    python benchmarks/comm/delay.py 10mbit+5ms 100mbit+25ms 500mbit+25ms 100mbit+25ms%1

Per link, between two emulated hosts: the smallest, median and largest of 40 round trips of one byte; the goodput of one
TCP transfer of `--seconds`, without its first third; the share of 20,000 datagrams of 100 bytes that is lost; and the
CPU time of the process that relays packets.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

from laconic.emulate import Host, Network, parse_links

PORT, DATAGRAMS = 5000, 20_000
context = multiprocessing.get_context("forkserver")


def serve(host: Host, pipe: Connection) -> None:
    """Echoes bytes, then receives a transfer and sends its goodput, then counts datagrams."""
    host.enter()
    inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    inbox.bind((host.address, PORT))
    with socket.create_server((host.address, PORT)) as server:
        pipe.send("ready")
        flow, _ = server.accept()
        flow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := flow.recv(1):
            flow.sendall(data)
        flow, _ = server.accept()
        marks, nbytes = [], 0
        while data := flow.recv(1 << 20):
            nbytes += len(data)
            marks.append((time.monotonic(), nbytes))
    first = next(mark for mark in marks if mark[0] > marks[0][0] + (marks[-1][0] - marks[0][0]) / 3)
    pipe.send((marks[-1][1] - first[1]) * 8e-6 / (marks[-1][0] - first[0]))
    inbox.settimeout(3)
    count = 0
    try:
        while inbox.recv(200):
            count += 1
    except TimeoutError:
        pipe.send(count)


def measure(host: Host, target: str, seconds: float, pipe: Connection) -> None:
    host.enter()
    trips = []
    with socket.create_connection((target, PORT)) as flow:
        flow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(40):
            start = time.monotonic()
            flow.sendall(b"!")
            flow.recv(1)
            trips.append(1e3 * (time.monotonic() - start))
    with socket.create_connection((target, PORT)) as flow:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            flow.sendall(bytes(1 << 18))
    pipe.send(trips)
    pipe.recv()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outbox:
        for _ in range(DATAGRAMS):
            outbox.sendto(bytes(100), (target, PORT))
            time.sleep(1.5e-4)


def relay_seconds(holder: int) -> float:
    """Returns the CPU time of the holder's children."""
    children = Path(f"/proc/{holder}/task/{holder}/children").read_text().split()
    ticks = (Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13] for child in children)
    return sum(int(tick) for pair in ticks for tick in pair) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("links", nargs="+")
    parser.add_argument("--seconds", type=float, default=9.0)
    options = parser.parse_args()
    context.set_forkserver_preload(["laconic.emulate"])
    print("| link | round trip, ms: least, median, most | goodput, Mbit/s | lost, % | CPU of the relay, s |")
    print("|---|---|---|---|---|")
    for link in options.links:
        with Network(parse_links(link, 2)) as network:
            source, target = network.hosts
            pipes = [context.Pipe() for _ in range(2)]
            server = context.Process(target=serve, args=(target, pipes[0][1]), daemon=True)
            server.start()
            pipes[0][0].recv()
            arguments = (source, target.address, options.seconds, pipes[1][1])
            client = context.Process(target=measure, args=arguments, daemon=True)
            client.start()
            trips, goodput = pipes[1][0].recv(), pipes[0][0].recv()
            pipes[1][0].send("go on")
            lost = 100 * (1 - pipes[0][0].recv() / DATAGRAMS)
            assert network._holder is not None
            figures = f"{min(trips):.2f}, {statistics.median(trips):.2f}, {max(trips):.2f} | {goodput:.1f} | {lost:.2f}"
            print(f"| {link} | {figures} | {relay_seconds(network._holder.pid):.2f} |", flush=True)
            client.join()
            server.join()


if __name__ == "__main__":
    main()
