"""The links of an emulated network: their text form is that of `laconic.link`, and the shaper's parameters are here."""

from dataclasses import dataclass
from math import ceil

from laconic import link

MAX_HOSTS = 64
FRAME_NBYTES = 1514  # a full Ethernet frame, as the shaper counts it
PAYLOAD_NBYTES = 1448  # the TCP payload of a full frame


@dataclass(frozen=True)
class Link(link.Link):
    """The cable between a host and the switch, with the same rate, delay and loss in each direction.

    Args:
        bits_per_second: The goodput of one TCP transfer, as a speed test measures it. With headers, 4.6 % more bits
            pass the link.
        delay_seconds: The delay of each frame.
        loss: The fraction of frames that are lost.
        jitter_seconds: Must be 0: only simulated links have jitter.

    Example:
        >>> Link(100_000_000).frame_bytes_per_second  # 12.5 MB/s plus headers
        13069751
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jitter_seconds:
            raise ValueError(f"an emulated link must have no jitter, not {self.jitter_seconds} s: leave out '~'")

    def _check_rate(self) -> None:
        if not 1e6 <= self.bits_per_second <= 1e10:
            raise ValueError(f"a link's rate must be between 1mbit and 10gbit, not {self.bits_per_second} bit/s")

    @property
    def needs_netem(self) -> bool:
        return self.delay_seconds > 0 or self.loss > 0

    @property
    def frame_bytes_per_second(self) -> int:
        """The rate in bytes per second with all headers, as the shaper counts it."""
        return round(self.bits_per_second / 8 * FRAME_NBYTES / PAYLOAD_NBYTES)

    @property
    def burst_nbytes(self) -> int:
        """The bytes that may pass unshaped after a pause: 1 ms at full rate, because the kernel's timers may be late.

        Messages shorter than this are not slowed down at all, so it is no larger than the timers need.
        """
        return max(2 * FRAME_NBYTES, self._nbytes_in(1e-3))

    @property
    def queue_nbytes(self) -> int:
        """The bytes that may queue before frames are dropped: 25 ms at full rate, but at least 64 frames.

        With fewer frames, several senders that start at once would lose most of their first window.
        """
        return max(64 * FRAME_NBYTES, self._nbytes_in(25e-3))

    @property
    def frames_per_segment(self) -> int:
        """The number of frames that TCP may pass on as one segment.

        Larger segments cost less CPU time, but all frames of a segment wait, and are lost, together.
        """
        if self.loss > 0:
            return 1
        return max(1, min(43, self.burst_nbytes // (2 * FRAME_NBYTES)))  # 43 frames are 64 KiB, the kernel's default

    @property
    def delayed_frames(self) -> int:
        """The capacity of the delay queue in frames: four times the full rate, because frames may be small."""
        return 1000 + 4 * ceil(self._nbytes_in(self.delay_seconds) / FRAME_NBYTES)

    def _nbytes_in(self, seconds: float) -> int:
        return ceil(self.frame_bytes_per_second * seconds)


def parse_link(text: str) -> Link:
    """Returns the link that a text describes, as `laconic.link.parse_link` does.

    Example:
        >>> parse_link("10mbit+20ms%1").loss
        0.01
    """
    return link.parse_link(text, Link)


def parse_links(text: str, workers: int) -> list[Link]:
    """Returns one link per worker, as `laconic.link.parse_links` does, for at most 64 workers.

    Example:
        >>> [link.bits_per_second for link in parse_links("100mbit,1gbit", workers=2)]
        [100000000, 1000000000]
    """
    check_hosts(workers, "workers on an emulated network")
    return link.parse_links(text, workers, Link)


def check_hosts(count: int, what: str) -> None:
    """Raises ValueError unless `count` is between 1 and MAX_HOSTS."""
    if type(count) is not int or not 1 <= count <= MAX_HOSTS:
        raise ValueError(f"{what} must be between 1 and {MAX_HOSTS}, not {count!r}")
