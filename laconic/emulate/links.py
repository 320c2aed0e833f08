"""The links of emulated hosts: the parameters of what shapes them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import laconic.link

MAX_HOSTS = 64
ETHERNET_NBYTES = 14  # the header of a frame
HEADERS_NBYTES = 52  # of IP and TCP, in each packet
MTU, JUMBO_MTU = 1500, 9000
JUMBO_RATE = 50_000_000  # bit/s from which on relayed packets are large: each costs the relay time
LEAST_QUEUE = 64  # frames
MAX_RELAYED_RATE = 1_000_000_000  # bit/s


@dataclass(frozen=True)
class Link(laconic.link.Link):
    """The cable between an emulated host and the switch, with the same rate, delay and loss in each direction.

    The kernel shapes links that have only a rate. Links with a delay, jitter or losses are relayed by a process of
    laconic. With headers, 4.6 % more bits than `bits_per_second` pass the link (0.7 % with the large packets of fast
    relayed links).

    Example:
        >>> Link(100_000_000).frame_bytes_per_second  # 12.5 MB/s plus headers
        13069751
    """

    def _check_rate(self) -> None:
        if not 1e6 <= self.bits_per_second <= 1e10:
            raise ValueError(f"a link's rate must be between 1mbit and 10gbit, not {self.bits_per_second} bit/s")
        if self.is_relayed and self.bits_per_second > MAX_RELAYED_RATE:
            raise ValueError(
                f"an emulated link with delay, jitter or loss must have a rate of at most 1gbit, not "
                f"{self.bits_per_second} bit/s: a process relays each packet"
            )

    @property
    def is_relayed(self) -> bool:
        return self.delay_seconds > 0 or self.loss > 0

    @property
    def mtu(self) -> int:
        return JUMBO_MTU if self.is_relayed and self.bits_per_second >= JUMBO_RATE else MTU

    @property
    def frame_bytes_per_second(self) -> int:
        """The rate in bytes per second with all headers, as the shaper counts it."""
        share = (self.mtu - HEADERS_NBYTES) / (self.mtu + ETHERNET_NBYTES)
        return round(self.bits_per_second / 8 / share)

    @property
    def burst_nbytes(self) -> int:
        """The bytes that may pass unshaped after a pause: 1 ms at full rate, because the kernel's timers may be late.

        Messages shorter than this are not slowed down at all, so it is no larger than the timers need.
        """
        return max(2 * self._frame, self._nbytes_in(1e-3))

    @property
    def queue_nbytes(self) -> int:
        """The bytes that may queue before frames are dropped: 25 ms or a round trip at full rate, at least 64 frames.

        With fewer frames, several senders that start at once would lose most of their first window. With less than a
        round trip, TCP would not reach the rate.
        """
        return max(LEAST_QUEUE * (MTU + ETHERNET_NBYTES), self._nbytes_in(max(25e-3, 2 * self.delay_seconds)))

    @property
    def frames_per_segment(self) -> int:
        """The number of frames that TCP may pass on as one segment.

        Larger segments cost less CPU time, but all frames of a segment wait together.
        """
        return max(1, min(43, self.burst_nbytes // (2 * self._frame)))  # 43 frames are 64 KiB, the kernel's default

    @property
    def _frame(self) -> int:
        return self.mtu + ETHERNET_NBYTES

    def _nbytes_in(self, seconds: float) -> int:
        return ceil(self.frame_bytes_per_second * seconds)


def parse_links(text: str, workers: int) -> list[Link]:
    """Returns one emulated link per worker; the text is as in `laconic.link.parse_links`.

    Raises:
        ValueError: A link is not valid, or the number of links is neither 1 nor `workers`.

    Example:
        >>> [link.bits_per_second for link in parse_links("100mbit,1gbit", workers=2)]
        [100000000, 1000000000]
    """
    check_hosts(workers, "workers on an emulated network")
    return laconic.link.parse_links(text, workers, Link)


def check_hosts(count: int, what: str) -> None:
    """Raises ValueError unless `count` is between 1 and MAX_HOSTS."""
    if type(count) is not int or not 1 <= count <= MAX_HOSTS:
        raise ValueError(f"{what} must be between 1 and {MAX_HOSTS}, not {count!r}")
