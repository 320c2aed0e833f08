"""The live view in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# By name: the type, the help text, and the key of a rank's row in the status.
BY_RANK = {
    "laconic_step": ("gauge", "Optimizer steps so far.", "step"),
    "laconic_step_seconds": ("gauge", "Mean duration of a step over the last seconds.", "step_seconds"),
    "laconic_waiting_share": ("gauge", "Share of the last seconds spent waiting for other ranks.", "waiting_share"),
    "laconic_waited_seconds_total": ("counter", "Seconds spent waiting for other ranks.", "waited_seconds"),
    "laconic_overhead_seconds_total": ("counter", "Seconds of laconic's own computing.", "overhead_seconds"),
    "laconic_link_bytes_per_second": ("gauge", "Payload sent, over the last seconds.", "bytes_per_second"),
    "laconic_last_seen_seconds": ("gauge", "Seconds since the last report of the rank.", "last_seen_seconds"),
    "laconic_members": ("gauge", "Ranks that take part, as this rank knows it.", "members"),
}


def render(status: dict[str, Any]) -> str:
    """Returns the text for Prometheus, of a status as `Overview.status` returns it."""
    return "".join(f"{line}\n" for line in _lines(status))


def _lines(status: dict[str, Any]) -> Iterator[str]:
    yield from _head("laconic_job_info", "gauge", "The job; the value is always 1.")
    info = {"version": status["laconic"], "method": status["method"], "workers": status["size"]}
    yield f"laconic_job_info{_labels(info)} 1"
    rows = status["ranks"]
    yield from _head("laconic_up", "gauge", "1 if the rank trains and has reported within seconds, else 0.")
    for row in rows:
        yield f"laconic_up{_labels({'rank': row['rank']})} {int(row['state'] == 'training')}"
    for name, (kind, text, key) in BY_RANK.items():
        yield from _head(name, kind, text)
        for row in rows:
            if row["step"] is not None and row[key] is not None:  # it has reported, and has a value
                yield f"{name}{_labels({'rank': row['rank']})} {float(row[key])!r}"
    yield from _head("laconic_sent_bytes_total", "counter", "Payload bytes sent, by channel.")
    for row in rows:
        for channel, nbytes in row["nbytes"].items():
            yield f"laconic_sent_bytes_total{_labels({'rank': row['rank'], 'channel': channel})} {float(nbytes)!r}"
    yield from _head("laconic_last_error_info", "gauge", "The last warning or error of a rank; the value is always 1.")
    for row in rows:
        if row["error"]:
            yield f"laconic_last_error_info{_labels({'rank': row['rank'], 'error': row['error']})} 1"


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _labels(labels: dict[str, object]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
