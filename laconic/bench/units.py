"""Numbers as people read them: 34.1 ms, 11.2 MB, 100 Mbit/s, 85 %."""

from __future__ import annotations

import math
import re

ABSENT = "–"
_RATES = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}


def number_text(value: float, digits: int = 3) -> str:
    """At most so many significant digits, no trailing zeros, no exponent where a person would write none."""
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
    """Powers of 1000, as networks are rated."""
    if nbytes is None:
        return ABSENT
    for unit in ("B", "kB", "MB", "GB"):
        if not abs(nbytes) >= 999.5:
            return f"{number_text(nbytes)} {unit}"
        nbytes /= 1000
    return f"{number_text(nbytes)} TB"


def is_share(metric: str) -> bool:
    """Whether the metric is a part of 1, shown in per cent."""
    return metric == "accuracy"


def metric_text(metric: str, value: float | None, digits: int = 3) -> str:
    """The value alone, for under a heading that names the metric."""
    if value is None:
        return ABSENT
    if is_share(metric) and math.isfinite(value):
        return f"{number_text(100 * value, digits)} %"
    return number_text(value, digits)


def named_metric_text(metric: str, value: float) -> str:
    """The value in a sentence: `85 %`, `BLEU 27.3`, `an excess loss of 0.01`."""
    text = metric_text(metric, value)
    if is_share(metric):
        return text
    if metric == "bleu":
        return f"BLEU {text}"
    words = metric.replace("_", " ")
    return f"{'an' if words[:1] in 'aeiou' else 'a'} {words} of {text}"


def labelled_metric_text(metric: str, value: float) -> str:
    """The value in a label: `85 %`, `loss 0.6`."""
    text = metric_text(metric, value)
    return text if is_share(metric) else f"{metric_name(metric)} {text}"


def metric_name(metric: str) -> str:
    return "BLEU" if metric == "bleu" else metric.replace("_", " ")


def link_text(link: str) -> str:
    """`100mbit,10mbit+20ms+1%` as `100 Mbit/s, 10 Mbit/s with 20 ms delay and 1 % loss`; equal links once."""
    if link == "none":
        return "loopback"
    parts = [_one_link_text(part.strip()) for part in link.split(",")]
    return parts[0] if len(set(parts)) == 1 else ", ".join(parts)


def _one_link_text(text: str) -> str:
    rate, *extras = text.split("+")
    match = re.fullmatch(r"([\d.]+)(kbit|mbit|gbit)", rate.lower())
    if match is None:
        return text
    words = [f"{extra[:-1]} % loss" if extra.endswith("%") else f"{_spaced(extra)} delay" for extra in extras]
    return f"{number_text(float(match[1]))} {_RATES[match[2]]}" + (f" with {' and '.join(words)}" if words else "")


def _spaced(quantity: str) -> str:
    return re.sub(r"(?<=\d)(?=[a-z])", " ", quantity)
