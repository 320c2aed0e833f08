"""Describes the link of a host, emulated or simulated: rate, delay, jitter and loss, and their text form."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from laconic.rules import check_number, check_text

GRAMMAR = (
    "RATE[+DELAY][~JITTER][%LOSS], as in 100mbit, 2.5gbit, 1gbit+50ms or 100mbit+25ms~5ms%0.1 "
    "(rate in kbit, mbit or gbit; one-way delay and jitter in ms or s; loss in percent)"
)
_NUMBER = r"\d+(?:\.\d+)?"
_PATTERN = re.compile(
    rf"(?P<rate>{_NUMBER})(?P<rate_unit>kbit|mbit|gbit)"
    rf"(?:\+(?P<delay>{_NUMBER})(?P<delay_unit>ms|s))?"
    rf"(?:~(?P<jitter>{_NUMBER})(?P<jitter_unit>ms|s))?"
    rf"(?:%(?P<loss>{_NUMBER})|\+(?P<former_loss>{_NUMBER})%)?"  # records of earlier versions have +1%
)
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """The cable between a host and the switch, the same in each direction.

    A message from one host to another crosses two links. Each contributes half of its delay and jitter, so between two
    hosts with the same link a message takes `delay_seconds` one way, and twice that for a round trip. The probability
    of a loss is the mean of both links'.

    Args:
        bits_per_second: The goodput of one TCP transfer, as a speed test measures it.
        delay_seconds: One way, to a host with the same link.
        loss: The fraction of packets that are lost.
        jitter_seconds: The most by which the delay of a packet differs from `delay_seconds`.

    Example:
        >>> Link(100_000_000, delay_seconds=0.025).loss
        0.0
    """

    bits_per_second: int
    delay_seconds: float = 0.0
    loss: float = 0.0
    jitter_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bits_per_second", "delay_seconds", "loss", "jitter_seconds"):
            check_number(name, getattr(self, name))
        self._check_rate()
        if not 0 <= self.delay_seconds <= 10:
            raise ValueError(f"a link's delay must be between 0 and 10 seconds, not {self.delay_seconds}")
        if not 0 <= self.jitter_seconds <= self.delay_seconds:
            raise ValueError(
                f"a link's jitter must be between 0 and its delay of {self.delay_seconds} seconds, "
                f"not {self.jitter_seconds}"
            )
        if not 0 <= self.loss < 1:
            raise ValueError(f"a link's loss must be at least 0 and less than 1 (100 %), not {self.loss!r}")

    def _check_rate(self) -> None:
        if not 1e3 <= self.bits_per_second <= 1e12:
            raise ValueError(f"a link's rate must be between 1kbit and 1000gbit, not {self.bits_per_second} bit/s")


L = TypeVar("L", bound=Link)


def parse_link(text: str, kind: Callable[..., L] = Link) -> L:  # type: ignore[assignment]
    """Returns the link that `RATE[+DELAY][~JITTER][%LOSS]` describes.

    Args:
        text: such as 100mbit+25ms~5ms%0.1.
        kind: the class of the link.

    Raises:
        ValueError: The text does not have this form, or a value is out of range.

    Example:
        >>> parse_link("100mbit+25ms~5ms%0.1")
        Link(bits_per_second=100000000, delay_seconds=0.025, loss=0.001, jitter_seconds=0.005)
    """
    check_text("a link", text, "100mbit")
    match = _PATTERN.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"a link must be written {GRAMMAR}, not {text!r}")

    def seconds(name: str) -> float:
        return float(match[name]) * _SECONDS[match[f"{name}_unit"]] if match[name] else 0.0

    try:
        return kind(
            bits_per_second=round(float(match["rate"]) * _BITS[match["rate_unit"]]),
            delay_seconds=seconds("delay"),
            loss=float(match["loss"] or match["former_loss"] or 0) / 100,
            jitter_seconds=seconds("jitter"),
        )
    except ValueError as error:
        raise ValueError(f"{error} (in {text!r})") from None


def parse_links(text: str, workers: int, kind: Callable[..., L] = Link) -> list[L]:  # type: ignore[assignment]
    """Returns one link per worker.

    Args:
        text: One link for all workers (`100mbit`), or one per worker in the order of ranks, separated by commas.
        workers: The number of workers.
        kind: the class of the links.

    Raises:
        ValueError: A link is not valid, or the number of links is neither 1 nor `workers`.

    Example:
        >>> [link.bits_per_second for link in parse_links("100mbit,1gbit", workers=2)]
        [100000000, 1000000000]
    """
    check_text("links", text, "100mbit,1gbit")
    links = [parse_link(part, kind) for part in text.split(",")]
    if len(links) == 1:
        return links * workers
    if len(links) != workers:
        raise ValueError(
            f"give one link for all workers, or one for each of the {workers} workers, not {len(links)}: {text!r}"
        )
    return links
