"""Scales and axes of the report's figures: domains, ticks and units that fit the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LOG_RATIO = 10  # values that differ by this factor are drawn on a logarithmic scale
_UNITS: dict[str, list[tuple[float, str, float]]] = {  # size, name, and the largest value from which the unit is used
    "seconds": [(1e-6, "µs", 0), (1e-3, "ms", 1e-3), (1, "s", 1), (60, "min", 600), (3600, "h", 10800)],
    "bytes": [(1, "B", 0), (1e3, "kB", 1e3), (1e6, "MB", 1e6), (1e9, "GB", 1e9), (1e12, "TB", 1e12)],
    "bits": [(1, "bit/s", 0), (1e3, "kbit/s", 1e3), (1e6, "Mbit/s", 1e6), (1e9, "Gbit/s", 1e9)],
    "share": [(0.01, "%", 0)],
    "count": [(1, "", 0)],
}


@dataclass(frozen=True)
class Axis:
    """One axis of a figure.

    Args:
        title: The quantity, without its unit.
        kind: "seconds", "bytes", "bits", "share" or "count".
        low: The start of the domain.
        high: Its end.
        log: Whether the scale is logarithmic.
    """

    title: str
    kind: str
    low: float
    high: float
    log: bool = False

    def unit(self) -> tuple[float, str]:
        """Returns the size and the name of the unit that suits the largest value."""
        size, name, _ = [u for u in _UNITS[self.kind] if max(abs(self.high), abs(self.low)) >= u[2]][-1]
        return size, name

    def vega(self) -> dict[str, Any]:
        """Returns the type, scale and axis of a Vega-Lite encoding."""
        size, name = self.unit()
        ticks = log_ticks(self.low, self.high, size) if self.log else linear_ticks(self.low, self.high, size)
        text = f"format(datum.value / {size!r}, ',~r')"
        title = f"{self.title} ({name})" if name else self.title
        if self.log and self.kind == "bytes":  # such a scale often spans kB to GB
            parts = [
                f"datum.value >= {s!r} ? format(datum.value / {s!r}, '~r') + ' {n}'" for s, n, _ in _UNITS["bytes"]
            ]
            text, title = " : ".join([*reversed(parts), "'0 B'"]), self.title
        scale: dict[str, Any] = {"domain": [self.low, self.high], "nice": False}
        return {
            "type": "quantitative",
            "scale": scale | ({"type": "log"} if self.log else {"zero": False}),
            "axis": {"title": title, "values": ticks, "labelExpr": text},
        }

    def share(self, value: float) -> float:
        """Returns where a value lies between the start (0) and the end (1) of the domain."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def value(self, share: float) -> float:
        """Returns the value at a share of the domain: the inverse of `share`."""
        if self.log:
            return self.low * math.exp(share * math.log(self.high / self.low))
        return self.low + share * (self.high - self.low)


def axis(title: str, kind: str, values: Iterable[float], zero: bool = False, log: bool | None = None) -> Axis:
    """Returns an axis that shows all values.

    Args:
        title: The quantity, without its unit.
        kind: "seconds", "bytes", "bits", "share" or "count".
        values: At least one number.
        zero: Whether a linear axis starts at 0.
        log: Whether the scale is logarithmic; by default it is if the values are positive and differ by much.
    """
    known = list(values)
    low, high = min(known), max(known)
    if log is None:
        log = low > 0 and high >= LOG_RATIO * low
    if log:
        positive = [value for value in known if value > 0]
        ratio = (high / min(positive)) ** 0.03 if positive else 1
        return Axis(title, kind, min(positive) / max(ratio, 1.05), high * max(ratio, 1.05), log=True)
    if zero:
        return Axis(title, kind, min(0.0, low), high * 1.02 or 1.0)
    slack = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    top = max(1.0, high) if kind == "share" else math.inf
    return Axis(title, kind, max(0.0, low - slack) if low >= 0 else low - slack, min(high + slack, top))


def linear_ticks(low: float, high: float, size: float, wanted: int = 6) -> list[float]:
    """Returns round numbers of the unit `size` between low and high.

    Example:
        >>> linear_ticks(0, 100, 1), linear_ticks(0, 300, 60)
        ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [0.0, 60.0, 120.0, 180.0, 240.0, 300.0])
    """
    rough = (high - low) / size / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999) * power
    first, last = math.ceil(low / size / step - 1e-9), math.floor(high / size / step + 1e-9)
    return [float(f"{k * step * size:.12g}") for k in range(first, last + 1)]


def log_ticks(low: float, high: float, size: float, wanted: int = 8) -> list[float]:
    """Returns round numbers of the unit `size` between low and high, for a logarithmic axis.

    Example:
        >>> log_ticks(0.5, 30, 1), log_ticks(240, 290, 1)
        ([0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0], [240.0, 260.0, 280.0])
    """
    exponents = range(math.floor(math.log10(low / size)), math.ceil(math.log10(high / size)) + 1)
    ticks: list[float] = []
    for mantissas in ((1, 1.5, 2, 3, 5, 7), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{m * 10.0**e * size:.12g}") for e in exponents for m in mantissas]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) < 2:
            return linear_ticks(low, high, size, wanted=4)
        if len(ticks) <= wanted:
            return ticks
    return ticks[:: math.ceil(len(ticks) / wanted)]


def spread_out(places: Sequence[float], distance: float, end: float) -> list[float]:
    """Moves places between 0 and `end` apart, so that labels there do not overlap; their order stays.

    Args:
        places: Positions, for example in pixels.
        distance: The least distance of two places; smaller if there is no room for it.
        end: The largest place.

    Example:
        >>> spread_out([10, 50, 50], distance=10, end=60)
        [10.0, 45.0, 55.0]
    """
    if len(places) > 1:
        distance = min(distance, end / (len(places) - 1))
    groups: list[tuple[float, list[int]]] = []  # the centre of each group of touching labels, and their numbers
    for i in sorted(range(len(places)), key=lambda i: places[i]):
        groups.append((_inside(places[i], 0, end), [i]))
        while len(groups) > 1 and _top(groups[-1], distance) - _bottom(groups[-2], distance) < distance - 1e-9:
            members = groups[-2][1] + groups[-1][1]
            half = distance * (len(members) - 1) / 2
            centre = sum(places[k] for k in members) / len(members)
            groups[-2:] = [(_inside(centre, half, end - half), members)]
    result = [0.0] * len(places)
    for group in groups:
        for k, i in enumerate(group[1]):
            result[i] = _top(group, distance) + k * distance
    return result


def _inside(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _top(group: tuple[float, list[int]], distance: float) -> float:
    return group[0] - distance * (len(group[1]) - 1) / 2


def _bottom(group: tuple[float, list[int]], distance: float) -> float:
    return group[0] + distance * (len(group[1]) - 1) / 2
