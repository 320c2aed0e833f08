"""Describes links: rate, delay and loss, their text form (`100mbit`, `10mbit+20ms+1%`), and the shaper's parameters."""

import re
from dataclasses import dataclass
from math import ceil

from laconic.rules import check_number, check_text

MAX_HOSTS = 64
FRAME_NBYTES = 1514  # a full Ethernet frame, as the shaper counts it
PAYLOAD_NBYTES = 1448  # the TCP payload of a full frame

_GRAMMAR = "RATE[+DELAY][+LOSS], as in 100mbit, 2.5gbit or 10mbit+20ms+1%"
_PATTERN = re.compile(
    r"(?P<rate>\d+(\.\d+)?)(?P<rate_unit>kbit|mbit|gbit)"
    r"(\+(?P<delay>\d+(\.\d+)?)(?P<delay_unit>ms|s))?"
    r"(\+(?P<loss>\d+(\.\d+)?)%)?"
)
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """The cable between a host and the switch, with the same rate, delay and loss in each direction.

    Args:
        bits_per_second: The goodput of one TCP transfer, as a speed test measures it. With headers, 4.6 % more bits
            pass the link.
        delay_seconds: The delay of each frame.
        loss: The fraction of frames that are lost.

    Example:
        >>> Link(100_000_000).frame_bytes_per_second  # 12.5 MB/s plus headers
        13069751
    """

    bits_per_second: int
    delay_seconds: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bits_per_second", "delay_seconds", "loss"):
            check_number(name, getattr(self, name))
        if not 1e6 <= self.bits_per_second <= 1e10:
            raise ValueError(f"a link's rate must be between 1mbit and 10gbit, not {self.bits_per_second} bit/s")
        if not 0 <= self.delay_seconds <= 10:
            raise ValueError(f"a link's delay must be between 0 and 10 seconds, not {self.delay_seconds}")
        if not 0 <= self.loss < 1:
            raise ValueError(f"a link's loss must be at least 0 and less than 1 (100 %), not {self.loss!r}")

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
    """Returns the link that `RATE[+DELAY][+LOSS]` describes.

    Raises:
        ValueError: The text does not have this form, or a value is out of range.

    Example:
        >>> parse_link("10mbit+20ms+1%")
        Link(bits_per_second=10000000, delay_seconds=0.02, loss=0.01)
    """
    check_text("a link", text, "100mbit")
    match = _PATTERN.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"a link must be written {_GRAMMAR}, not {text!r}")
    try:
        return Link(
            bits_per_second=round(float(match["rate"]) * _BITS[match["rate_unit"]]),
            delay_seconds=float(match["delay"]) * _SECONDS[match["delay_unit"]] if match["delay"] else 0.0,
            loss=float(match["loss"]) / 100 if match["loss"] else 0.0,
        )
    except ValueError as error:
        raise ValueError(f"{error} (in {text!r})") from None


def parse_links(text: str, workers: int) -> list[Link]:
    """Returns one link per worker.

    Args:
        text: One link for all workers (`100mbit`), or one per worker in the order of ranks, separated by commas.
        workers: The number of workers.

    Raises:
        ValueError: A link is not valid, or the number of links is neither 1 nor `workers`.

    Example:
        >>> [link.bits_per_second for link in parse_links("100mbit,1gbit", workers=2)]
        [100000000, 1000000000]
    """
    check_hosts(workers, "workers on an emulated network")
    check_text("links", text, "100mbit,1gbit")
    links = [parse_link(part) for part in text.split(",")]
    if len(links) == 1:
        return links * workers
    if len(links) != workers:
        raise ValueError(
            f"give one link for all workers, or one for each of the {workers} workers, not {len(links)}: {text!r}"
        )
    return links


def check_hosts(count: int, what: str) -> None:
    """Raises ValueError unless `count` is between 1 and MAX_HOSTS."""
    if type(count) is not int or not 1 <= count <= MAX_HOSTS:
        raise ValueError(f"{what} must be between 1 and {MAX_HOSTS}, not {count!r}")
