"""Shows the result of a comparison as a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from laconic.bench.headline import REFERENCE, headline, reached_without_communication
from laconic.bench.record import Record
from laconic.bench.summary import Summary, summarize
from laconic.bench.units import ABSENT, link_text, metric_text, nbytes_text, number_text, seconds_text


def table(records: Sequence[Record], target: float | None) -> Table:
    """Returns a table with one row per contender: means over seeds, and the standard deviation of the metric.

    The result in words stands below it. A target that workers reach without communication shows no speed-up.

    Args:
        records: The runs of the comparison.
        target: A value of the metric; if given, the table has a column with the time to reach it, and is sorted by it.
    """
    summaries = summarize(records)
    if target is not None:
        summaries.sort(key=lambda summary: summary.rank(target))
    metric = records[0].metric
    ddp = next((s.step_time for s in summaries if s.method == REFERENCE and s.step_time is not None), None)
    if target is not None and reached_without_communication(summaries, target) is not None:
        ddp = None
    words = headline(summaries, target)
    result = Table(
        title=title_text(records), caption=" ".join([words.sentence, *words.details]), caption_justify="left"
    )
    result.add_column("method", no_wrap=True)
    headers = ["ms/step", "compute", "waiting", "overhead", "payload/step", "NIC bytes/step", metric]
    if target is not None:
        headers.insert(0, f"time to {metric_text(metric, target)}")
    if ddp is not None:
        headers.append("speed-up per step")
    for header in headers:
        result.add_column(header, justify="right")
    for summary in summaries:
        if summary.step_time is None:
            continue
        cells = [
            *_milliseconds(summary),
            _payload(summary),
            nbytes_text(summary.nic_nbytes_per_step),
            final_text(summary),
        ]
        if target is not None:
            cells.insert(0, _time_to(summary, target))
        if ddp is not None:
            cells.append(number_text(ddp.total / summary.step_time.total))
        result.add_row(summary.name, *cells)
    for record in (record for summary in summaries for record in summary.failed):
        result.add_row(f"{record.name} (seed {record.seed})", f"failed: {record.reason.strip().splitlines()[-1]}")
    return result


def title_text(records: Sequence[Record]) -> str:
    """Returns the conditions of a comparison in one line."""
    first = records[0]
    link = link_text(first.link) + ("" if first.link == "none" else " links")
    seeds = len({record.seed for record in records})
    return (
        f"{first.task}: {number_text(first.parameters / 1e6)} M parameters, {first.workers} workers, {link}, "
        f"{first.steps} steps, {seeds} seed{'s' if seeds > 1 else ''}"
    )


def _milliseconds(summary: Summary) -> list[str]:
    time = summary.step_time
    assert time is not None
    parts = (time.total, time.compute, time.waiting, time.overhead)
    return [ABSENT if part is None else f"{1e3 * part:.1f}" for part in parts]


def _payload(summary: Summary) -> str:
    by_channel = summary.payload_nbytes_per_step
    if set(by_channel) <= {"foreground"}:
        return nbytes_text(by_channel.get("foreground", 0.0))
    return " + ".join(f"{nbytes_text(value)} {channel[:4]}." for channel, value in by_channel.items())


def final_text(summary: Summary) -> str:
    """Returns the final metric: mean and standard deviation over seeds."""
    final, metric = summary.final, summary.runs[0].metric
    if final is None:
        return ABSENT
    deviation = "" if final.deviation is None else f" ± {metric_text(metric, final.deviation, digits=2)}"
    return metric_text(metric, final.mean) + deviation


def _time_to(summary: Summary, target: float) -> str:
    reached = summary.to_target(target)
    if reached is None:
        return "not reached"
    return seconds_text(reached.seconds) + ("" if reached.by_all else f" ({reached.reached} of {reached.seeds} seeds)")
