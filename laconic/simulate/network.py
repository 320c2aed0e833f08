"""Simulated hosts on one switch: how long messages take.

A host's link carries its messages in each direction at 90 % of its rate, shared evenly among the messages that are
under way. Beyond that, each round of messages takes half of the delay of both links that it crosses. A connection that
loses packets, or whose window is short, is also limited by its round-trip time. The switch itself is as fast as it must
be.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laconic.comm.plan import Rounds
from laconic.link import Link, parse_link
from laconic.rules import check_number

if TYPE_CHECKING:
    from laconic.simulate.engine import Engine

SEGMENT_NBYTES = 1448  # the TCP payload of a full frame
# Throughput of one TCP connection with random loss p: MSS / RTT · √(3/2) / √p (Mathis, Semke, Mahdavi, Ott, 1997).
LOSS_CONSTANT = math.sqrt(1.5)
# The share of a link's rate that the messages of collectives reach. A rate is the goodput of one long transfer; here
# acknowledgements share the link with messages in the other direction, and links are idle for moments between messages.
# Calibrated on emulated links in one setting, and tested on others: benchmarks/simulate/results.md.
EFFICIENCY = 0.9


@dataclass(frozen=True)
class Host:
    """The link of one simulated host.

    Args:
        link: rate, delay, jitter and loss, as text or as a `Link`; of both directions, unless `down` is given.
        down: the rate of the direction to the host, as in "100mbit".
        window: bytes that one connection may have in flight; by default as many as it takes.

    Example:
        >>> host = Host("10mbit+25ms", down="100mbit", window=65536)
        >>> host.up_rate, host.down_rate, host.delay
        (1250000.0, 12500000.0, 0.025)
    """

    link: str | Link
    down: str | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.link, str):
            object.__setattr__(self, "link", parse_link(self.link))
        elif not isinstance(self.link, Link):
            raise ValueError(f'link must be a text such as "100mbit+25ms" or a Link, not {self.link!r}')
        if self.down is not None:
            parse_link(self.down)
        if self.window is not None:
            check_number("window (bytes in flight)", self.window, least=SEGMENT_NBYTES)

    @property
    def _link(self) -> Link:
        assert isinstance(self.link, Link)
        return self.link

    @property
    def up_rate(self) -> float:
        """Bytes per second that the host can send."""
        return self._link.bits_per_second / 8

    @property
    def down_rate(self) -> float:
        """Bytes per second that the host can receive."""
        return self.up_rate if self.down is None else parse_link(self.down).bits_per_second / 8

    @property
    def delay(self) -> float:
        """Seconds of one direction."""
        return self._link.delay_seconds

    @property
    def jitter(self) -> float:
        """The most seconds by which `delay` varies."""
        return self._link.jitter_seconds

    @property
    def loss(self) -> float:
        """The fraction of packets that are lost."""
        return self._link.loss


class Port:
    """One direction of a link. The messages under way share its rate evenly.

    `_served` counts the bytes that each of the messages has been served since the port was last idle, so a message ends
    when that reaches its start plus its length.
    """

    def __init__(self, engine: Engine, rate: float) -> None:
        self._engine, self._rate = engine, rate
        self._served, self._updated, self._version, self._count = 0.0, 0.0, 0, 0
        self._ends: list[tuple[float, int, Callable[[], None]]] = []

    def send(self, nbytes: float, done: Callable[[], None]) -> None:
        """Calls `done` when so many bytes have passed."""
        self._advance()
        self._count += 1
        heapq.heappush(self._ends, (self._served + nbytes, self._count, done))
        self._plan()

    def _advance(self) -> None:
        if self._ends:
            self._served += (self._engine.now - self._updated) * self._rate / len(self._ends)
        self._updated = self._engine.now

    def _plan(self) -> None:
        self._version += 1
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._served)
            self._engine.at(self._engine.now + left * len(self._ends) / self._rate, self._finish, self._version)

    def _finish(self, version: int) -> None:
        if version != self._version:
            return  # another message has come since
        self._advance()
        self._served = max(self._served, self._ends[0][0])
        finished = []
        while self._ends and self._ends[0][0] <= self._served + 1e-6:
            finished.append(heapq.heappop(self._ends)[2])
        if not self._ends:
            self._served = 0.0
        self._plan()
        for done in finished:
            done()


@dataclass
class Network:
    """All hosts.

    Args:
        engine: the clock.
        hosts: one for each worker.
        seed: of the jitter.
    """

    engine: Engine
    hosts: Sequence[Host]
    seed: int = 0
    _up: list[Port] = field(init=False)
    _down: list[Port] = field(init=False)

    def __post_init__(self) -> None:
        self._up = [Port(self.engine, EFFICIENCY * host.up_rate) for host in self.hosts]
        self._down = [Port(self.engine, EFFICIENCY * host.down_rate) for host in self.hosts]
        self._random = random.Random(f"network {self.seed}")

    def carry(
        self,
        traffic: Mapping[int, tuple[float, float]],
        rounds: Rounds,
        connections: int,
        done: Callable[[], None],
    ) -> None:
        """Carries the messages of one operation, and calls `done` when all of them have arrived.

        Args:
            traffic: the bytes that each rank sends and receives.
            rounds: of messages that wait for each other, some of them while bytes are sent.
            connections: to how many others a rank sends at the same time.
            done: called at the end.
        """
        ranks, started = list(traffic), self.engine.now
        most = max((sent for sent, _ in traffic.values()), default=0.0)
        slowest = self._connection_rate(ranks)
        earliest = self.engine.now + (most / max(1, connections) / slowest if slowest < math.inf else 0.0)
        left = 1

        def passed() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                sent, delay = max(self.engine.now, earliest), self._path_delay(ranks)
                hidden = rounds.hidden * (sent - started) / delay if delay else 0.0
                hidden = min(hidden, rounds.count - rounds.least)  # in rounds
                left_over = self.latency(ranks, rounds.count - int(hidden)) - hidden % 1 * delay
                self.engine.at(sent + max(0.0, left_over), done)

        for rank, (sent, received) in traffic.items():
            for port, nbytes in ((self._up[rank], sent), (self._down[rank], received)):
                if nbytes > 0:
                    left += 1
                    port.send(nbytes, passed)
        passed()

    def latency(self, ranks: Sequence[int], rounds: int) -> float:
        """Returns the seconds of several rounds between hosts, in each of which all wait for the last message."""
        if len(ranks) < 2 or rounds == 0:
            return 0.0
        jitter = max(self.hosts[rank].jitter for rank in ranks)
        seconds = rounds * self._path_delay(ranks)
        if jitter:
            # The largest of n uniform numbers is distributed as the n-th root of one.
            for _ in range(rounds):
                seconds += jitter * (2 * self._random.random() ** (1 / len(ranks)) - 1)
        return max(0.0, seconds)

    def _connection_rate(self, ranks: Sequence[int]) -> float:
        """Returns the bytes per second that loss and window allow one connection between these hosts."""
        hosts = [self.hosts[rank] for rank in ranks]
        round_trip = 2 * self._path_delay(ranks)
        if round_trip == 0:
            return math.inf
        window = min((host.window for host in hosts if host.window is not None), default=math.inf)
        loss = sum(heapq.nlargest(2, (host.loss for host in hosts))) / 2
        limit = SEGMENT_NBYTES * LOSS_CONSTANT / math.sqrt(loss) if loss else math.inf
        return min(window, limit) / round_trip

    def _path_delay(self, ranks: Sequence[int]) -> float:
        """Returns the seconds of the longest path between two of these hosts."""
        return sum(heapq.nlargest(2, (self.hosts[rank].delay for rank in ranks))) / 2 if len(ranks) > 1 else 0.0
