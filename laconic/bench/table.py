"""The result of a comparison as a table, for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from laconic.bench.record import Record

Column = tuple[str, list[str]]


def by_name(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The runs of each way that ended well, over its seeds, in the order they were asked for."""
    grouped: dict[str, list[Record]] = {}
    for record in records:
        if record.status == "ok":
            grouped.setdefault(record.name, []).append(record)
    return grouped


def table(records: Sequence[Record], target: float | None) -> Table:
    """One row for each way: means over seeds, with the spread (standard deviation) of the metric."""
    grouped = by_name(records)
    baseline = _step_seconds(grouped["ddp"]) if "ddp" in grouped else None
    result = Table(title=_title(records))
    result.add_column("method", no_wrap=True)
    headers = ["ms a step", "compute", "waiting", "own work", "payload a step", "on the wire", records[0].metric]
    if target is not None:
        headers.insert(0, f"time to {target:g}")
    if baseline:
        headers.append("× DDP a step")
    for header in headers:
        result.add_column(header, justify="right")
    for name, runs in grouped.items():
        cells = [*_split(runs), _payload(runs), _card(runs), _final(runs)]
        if target is not None:
            cells.insert(0, _time_to(runs, target))
        if baseline:
            cells.append(f"{baseline / _step_seconds(runs):.1f}")
        result.add_row(name, *cells)
    for record in records:
        if record.status != "ok":
            result.add_row(f"{record.name} (seed {record.seed})", f"failed: {record.reason.strip().splitlines()[-1]}")
    return result


def _title(records: Sequence[Record]) -> str:
    first = records[0]
    link = "loopback" if first.link == "none" else f"links of {first.link}"
    seeds = len({record.seed for record in records})
    return (
        f"{first.task}: {first.parameters / 1e6:.2f} M parameters, {first.workers} workers, {link}, "
        f"{first.steps} steps, {seeds} seed{'s' if seeds > 1 else ''}"
    )


def _step_seconds(runs: list[Record]) -> float:
    return _mean([run.split.step for run in runs if run.split])


def _split(runs: list[Record]) -> list[str]:
    parts = []
    for part in ("step", "compute", "waiting", "method"):
        values = [getattr(run.split, part) for run in runs]
        parts.append("–" if None in values else f"{1e3 * _mean(values):.1f}")
    return parts


def _payload(runs: list[Record]) -> str:
    channels = sorted({channel for run in runs for channel in run.payload_nbytes_per_step}, reverse=True)
    means = {c: _mean([run.payload_nbytes_per_step.get(c, 0.0) for run in runs]) for c in channels}
    if set(means) <= {"foreground"}:
        return nbytes(means.get("foreground", 0.0))
    return " + ".join(f"{nbytes(value)} {channel[:4]}." for channel, value in means.items())


def _card(runs: list[Record]) -> str:
    values = [run.card_nbytes_per_step for run in runs]
    return "–" if None in values else nbytes(_mean([value or 0.0 for value in values]))


def _final(runs: list[Record]) -> str:
    values = [value for run in runs if (value := run.final()) is not None]
    spread = f" ± {_deviation(values):.4f}" if len(values) > 1 else ""
    return f"{_mean(values):.4f}{spread}"


def _time_to(runs: list[Record], target: float) -> str:
    reached = [point.seconds for run in runs if (point := run.first_at(target))]
    if not reached:
        return "not reached"
    some = "" if len(reached) == len(runs) else f" ({len(reached)} of {len(runs)})"
    return f"{_mean(reached):.1f} s{some}"


def nbytes(value: float) -> str:
    """Bytes for people: 1.40 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _deviation(values: list[float]) -> float:
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
