"""The process that carries packets between emulated hosts whose links have a delay, and shapes, delays and drops them.

Each host has a TUN device, whose packets this process reads and writes. A packet from host i to host j waits for its
turn on i's link, is on its way for half of i's and half of j's delay (so for the delay, if both are equal), and waits
for its turn on j's link. It is lost with the mean of both links' probabilities, or if too many bytes wait for i's or
j's link already.

It is run by its file path, as `holder.py` is, and ends when its standard input is closed. Protocol: the first argument
is a JSON list of links with the descriptors of their TUN devices; each line on standard input is "counters", or the
state of a link: {"host": 2, "state": "down"}. Each line gets one line of JSON as reply.
"""

import contextlib
import heapq
import json
import os
import random
import select
import sys
import time
from typing import Any

ETHERNET_NBYTES = 14  # of the header that a TUN device does not have, and that counters include
ADDRESS = slice(16, 20)  # of the target in an IPv4 packet
LARGEST_NBYTES = 1 << 16
AT_ONCE = 32  # packets of one host that are read before others have their turn


class Port:
    """The link of one host: when each of its directions is free again, and what has passed."""

    def __init__(self, link: dict[str, Any]) -> None:
        self.descriptor: int = link["descriptor"]
        self.address = bytes(map(int, link["address"].split(".")))
        self.rate: float = link["bytes_per_second"]
        self.half_delay: float = link["delay_seconds"] / 2
        self.half_jitter: float = link["jitter_seconds"] / 2
        self.half_loss: float = link["loss"] / 2
        self.queue: float = link["queue_nbytes"] / self.rate  # seconds
        self.free_up = self.free_down = 0.0
        self.is_up = True
        self.sent = self.received = 0


class Relay:
    def __init__(self, links: list[dict[str, Any]]) -> None:
        self.ports = [Port(link) for link in links]
        self._by_address = {port.address: port for port in self.ports}
        self._by_descriptor = {port.descriptor: port for port in self.ports}
        # (time, order, source, target, packet): its first bit reaches the target's link; with no source, its last bit
        # has passed that link.
        self._events: list[tuple[float, int, Port | None, Port, bytes]] = []
        self._order = 0
        self._random = random.Random(0)
        self._unfinished = b""

    def run(self) -> None:
        commands = sys.stdin.fileno()
        os.set_blocking(commands, False)
        while True:
            timeout = max(0.0, self._events[0][0] - time.monotonic()) if self._events else None
            ready, _, _ = select.select([commands, *self._by_descriptor], [], [], timeout)
            if commands in ready:
                ready.remove(commands)
                if not self._answer(commands):
                    return
            for descriptor in ready:
                self._read(self._by_descriptor[descriptor])
            self._deliver()

    def _read(self, port: Port) -> None:
        """Reads the packets that a host sends now."""
        for _ in range(AT_ONCE):
            try:
                packet = os.read(port.descriptor, LARGEST_NBYTES)
            except BlockingIOError:
                return
            now = time.monotonic()
            if port.free_up - now > port.queue:
                continue
            nbytes = len(packet) + ETHERNET_NBYTES
            port.sent += nbytes
            start = max(port.free_up, now)
            port.free_up = start + nbytes / port.rate
            target = self._by_address.get(packet[ADDRESS])
            if target is None or not (port.is_up and target.is_up):
                continue
            if self._random.random() < port.half_loss + target.half_loss:
                continue
            delay = port.half_delay + target.half_delay
            jitter = port.half_jitter + target.half_jitter
            if jitter:
                delay += self._random.uniform(-jitter, jitter)
            self._add(start + delay, port, target, packet)

    def _add(self, when: float, source: Port | None, target: Port, packet: bytes) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, source, target, packet))

    def _deliver(self) -> None:
        """Does everything whose time has come."""
        while self._events and self._events[0][0] <= time.monotonic():
            when, _, source, target, packet = heapq.heappop(self._events)
            nbytes = len(packet) + ETHERNET_NBYTES
            if source is not None:
                if target.free_down - when > target.queue:
                    continue
                target.free_down = max(target.free_down, when) + nbytes / target.rate
                self._add(max(target.free_down, when + nbytes / source.rate), None, target, packet)
            elif target.is_up:
                with contextlib.suppress(OSError):  # the host reads too slowly, or its device is down
                    os.write(target.descriptor, packet)
                    target.received += nbytes

    def _answer(self, commands: int) -> bool:
        """Answers the commands that have come; returns False at their end."""
        data = os.read(commands, LARGEST_NBYTES)
        if not data:
            return False
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            reply = None
            if request == "counters":
                reply = [(port.sent, port.received) for port in self.ports]
            else:
                self.ports[request["host"]].is_up = request["state"] == "up"
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()
        return True


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # packets that wait for this process are late; needs permission
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    Relay(json.loads(sys.argv[1])).run()
