"""Formats numbers with units for people: 34.1 ms, 11.2 MB, 100 Mbit/s, 85 %."""

from __future__ import annotations

import math
import re

ABSENT = "–"
_RATES = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}


def number_text(value: float, digits: int = 3) -> str:
    """Formats a number with at most `digits` significant digits, and an exponent only below 1e-4 or from 1e7 on.

    Example:
        >>> number_text(1234567), number_text(0.00001234)
        ('1,234,567', '1.23e-5')
    """
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if not -4 <= exponent < 7:
        mantissa, power = f"{value:.{digits - 1}e}".split("e")
        return f"{float(mantissa):g}e{int(power)}"
    text = f"{value:,.{max(0, digits - 1 - exponent)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds_text(seconds: float | None) -> str:
    """Formats a duration in µs, ms, s, minutes or hours.

    Example:
        >>> seconds_text(0.0341), seconds_text(620)
        ('34.1 ms', '10 min 20 s')
    """
    if seconds is None:
        return ABSENT
    if not math.isfinite(seconds) or seconds == 0:
        return f"{number_text(seconds)} s"
    if seconds < 0.9995e-3:
        return f"{number_text(seconds * 1e6)} µs"
    if seconds < 0.9995:
        return f"{number_text(seconds * 1e3)} ms"
    if seconds < 599.5:
        return f"{number_text(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def nbytes_text(nbytes: float | None) -> str:
    """Formats a number of bytes, in powers of 1000, like network rates.

    Example:
        >>> nbytes_text(11_200_000)
        '11.2 MB'
    """
    if nbytes is None:
        return ABSENT
    for unit in ("B", "kB", "MB", "GB"):
        if not abs(nbytes) >= 999.5:
            return f"{number_text(nbytes)} {unit}"
        nbytes /= 1000
    return f"{number_text(nbytes)} TB"


def is_share(metric: str) -> bool:
    """Returns whether the metric is a fraction of 1, which is shown in per cent."""
    return metric == "accuracy"


def metric_text(metric: str, value: float | None, digits: int = 3) -> str:
    """Formats a value without the metric's name, for example below a heading that names it."""
    if value is None:
        return ABSENT
    if is_share(metric) and math.isfinite(value):
        return f"{number_text(100 * value, digits)} %"
    return number_text(value, digits)


def named_metric_text(metric: str, value: float) -> str:
    """Formats a value for a sentence: `85 %`, `BLEU 27.3`, `an excess loss of 0.01`."""
    text = metric_text(metric, value)
    if is_share(metric):
        return text
    if metric == "bleu":
        return f"BLEU {text}"
    words = metric.replace("_", " ")
    return f"{'an' if words[:1] in 'aeiou' else 'a'} {words} of {text}"


def labelled_metric_text(metric: str, value: float) -> str:
    """Formats a value for a label: `85 %`, `loss 0.6`."""
    text = metric_text(metric, value)
    return text if is_share(metric) else f"{metric_name(metric)} {text}"


def metric_name(metric: str) -> str:
    """Returns the metric's name for people: `BLEU`, `excess loss`."""
    return "BLEU" if metric == "bleu" else metric.replace("_", " ")


# Before the link in a record of simulated workers. All texts about links are made from it, so all say "simulated".
SIMULATED = "simulated "


def is_simulated(link: str) -> bool:
    """Returns whether a record's link is a simulated one.

    Example:
        >>> is_simulated("simulated 1gbit+50ms"), is_simulated("1gbit")
        (True, False)
    """
    return link.startswith(SIMULATED)


def link_text(link: str) -> str:
    """Formats the links of all hosts; equal links are written once.

    Example:
        >>> link_text("100mbit,10mbit+20ms%1")
        '100 Mbit/s, 10 Mbit/s with 20 ms delay and 1 % loss'
        >>> link_text("simulated 1gbit+50ms~5ms")
        'simulated 1 Gbit/s with 50 ms delay and 5 ms jitter'
    """
    if link == "none":
        return "loopback"
    if is_simulated(link):
        return f"simulated {link_text(link.removeprefix(SIMULATED))}"
    parts = [_one_link_text(part.strip()) for part in link.split(",")]
    return parts[0] if len(set(parts)) == 1 else ", ".join(parts)


_LINK = re.compile(r"([\d.]+)(kbit|mbit|gbit)(?:\+([\d.]+(?:ms|s)))?(?:~([\d.]+(?:ms|s)))?(?:%([\d.]+)|\+([\d.]+)%)?")


def _one_link_text(text: str) -> str:
    match = _LINK.fullmatch(text.lower())
    if match is None:
        return text
    rate, unit, delay, jitter, *losses = match.groups()
    loss = losses[0] or losses[1]
    words = [f"{_spaced(delay)} delay"] if delay else []
    words += [f"{_spaced(jitter)} jitter"] if jitter else []
    words += [f"{loss} % loss"] if loss else []
    return f"{number_text(float(rate))} {_RATES[unit]}" + (f" with {' and '.join(words)}" if words else "")


def _spaced(quantity: str) -> str:
    return re.sub(r"(?<=\d)(?=[a-z])", " ", quantity)
