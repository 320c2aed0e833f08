"""What a link can do, how a user writes it (`100mbit`, `10mbit+20ms+1%`), and what its shaper's buckets hold."""

import re
from dataclasses import dataclass
from math import ceil

MAX_HOSTS = 64
FRAME_NBYTES = 1514  # a full Ethernet frame, as the shaper counts it
PAYLOAD_NBYTES = 1448  # and what TCP carries in it

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
    """One host's cable to the switch: the same rate, delay and loss in each direction.

    The rate is what one TCP transfer gets, as a speed test would show it; with headers 4.6 % more pass on the wire.
    """

    bits_per_second: int
    delay_seconds: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 1e6 <= self.bits_per_second <= 1e10:
            raise ValueError(f"a link's rate must be between 1mbit and 10gbit, not {self.bits_per_second} bit/s")
        if not 0 <= self.delay_seconds <= 10:
            raise ValueError(f"a link's delay must be between 0 and 10 seconds, not {self.delay_seconds}")
        if not 0 <= self.loss < 1:
            raise ValueError(f"a link's loss must be at least 0 and less than 100 %, not {self.loss:.6g}")

    @property
    def needs_netem(self) -> bool:
        return self.delay_seconds > 0 or self.loss > 0

    @property
    def frame_bytes_per_second(self) -> int:
        """The rate with all headers, as the shaper counts it."""
        return round(self.bits_per_second / 8 * FRAME_NBYTES / PAYLOAD_NBYTES)

    @property
    def burst_nbytes(self) -> int:
        """What may pass at once after a pause: a millisecond's worth, to bridge the kernel's late timers.

        A message shorter than this is not slowed at all, so no more than the timers need.
        """
        return max(2 * FRAME_NBYTES, self._nbytes_in(1e-3))

    @property
    def queue_nbytes(self) -> int:
        """What may wait before frames are dropped: 25 ms, but enough frames for a few senders to start at once."""
        return max(64 * FRAME_NBYTES, self._nbytes_in(25e-3))

    @property
    def frames_per_segment(self) -> int:
        """How many frames TCP may hand over as one: more spare the processor, but wait, and are lost, together."""
        if self.loss > 0:
            return 1
        return max(1, min(43, self.burst_nbytes // (2 * FRAME_NBYTES)))  # 43 frames are the kernel's usual 64 KiB

    @property
    def delayed_frames(self) -> int:
        """What the delay line holds at the full rate, with small frames in mind."""
        return 1000 + 4 * ceil(self._nbytes_in(self.delay_seconds) / FRAME_NBYTES)

    def _nbytes_in(self, seconds: float) -> int:
        return ceil(self.frame_bytes_per_second * seconds)


def parse_link(text: str) -> Link:
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
    """One link for all workers (`100mbit`) or one for each, in the order of ranks (`100mbit,100mbit,10mbit,1gbit`)."""
    check_count(workers, "workers on an emulated network")
    links = [parse_link(part) for part in text.split(",")]
    if len(links) == 1:
        return links * workers
    if len(links) != workers:
        raise ValueError(
            f"links must be one for all or one for each of the {workers} workers, not {len(links)}: {text!r}"
        )
    return links


def check_count(count: int, what: str) -> None:
    if not 1 <= count <= MAX_HOSTS:
        raise ValueError(f"{what} must be between 1 and {MAX_HOSTS}, not {count}")
