"""Renders the figures of a comparison as an HTML table, and failed runs as a list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from laconic.bench.headline import REFERENCE, factor_text, reached_without_communication
from laconic.bench.record import Record
from laconic.bench.report_style import Look, sample_html
from laconic.bench.summary import Spread, Summary
from laconic.bench.units import (
    ABSENT,
    is_share,
    labelled_metric_text,
    metric_name,
    metric_text,
    nbytes_text,
    number_text,
    seconds_text,
)


def table_html(summaries: Sequence[Summary], target: float | None, look_of: dict[str, Look]) -> str:
    """Returns a table with one row per contender.

    Args:
        summaries: One per contender.
        target: A value of the metric, or None.
        look_of: The look of each contender, by name.
    """
    ran = [summary for summary in summaries if summary.runs]
    if target is not None:
        ran.sort(key=lambda summary: summary.rank(target))
    if not ran:
        return '<p class="note">All runs failed.</p>'
    first = ran[0].runs[0]
    channels = list(dict.fromkeys(channel for summary in ran for channel in summary.payload_nbytes_per_step))
    channels = channels or ["foreground"]
    reference = next((summary for summary in ran if summary.method == REFERENCE), None)
    trivial = target is not None and reached_without_communication(ran, target) is not None
    if trivial:
        reference = None  # a speed-up to a target that needs no communication would mislead
    to_target = [] if target is None else ["time", "bytes", "steps"]
    goal = "" if target is None else f"to {labelled_metric_text(first.metric, target)}"
    groups = [
        (goal, to_target),
        ("over DDP", ["speed-up"]),
        (metric_name(first.metric), ["final"]),
        ("time per step", ["total", "compute", "waiting", "overhead"]),
        ("bytes per step", [*channels, "NIC"]),
        ("memory", ["peak"]),
    ]
    head = "".join(f'<th colspan="{len(c)}" scope="colgroup">{escape(g)}</th>' for g, c in groups if c)
    columns = "".join(
        f'<th scope="col"{" class=first" if i == 0 else ""}>{escape(c)}</th>'
        for _, cs in groups
        for i, c in enumerate(cs)
    )
    rows = "".join(_row_html(s, target, reference, channels, look_of[s.name], [len(c) for _, c in groups]) for s in ran)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="All figures"><table><thead>'
        f'<tr><th rowspan="2" scope="col">method</th>{head}</tr><tr>{columns}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        '<button type="button" class="save save-table">CSV of this table</button>'
        f'<p class="note">{escape(_note(target, trivial))}</p>'
    )


def table_data(summaries: Sequence[Summary], target: float | None) -> dict[str, Any]:
    """Returns the numbers of the table for its CSV file: column names, and one row per contender."""
    rows = []
    for s in (summary for summary in summaries if summary.runs):
        cost = None if target is None else s.to_target(target)
        time, metric = s.step_time, s.runs[0].metric
        row: dict[str, Any] = {"method": s.name, "seeds": len(s.runs), "failed": len(s.failed)}
        if target is not None:
            row |= {"target": target, "seeds_at_target": cost.reached if cost else 0}
            row |= {
                "seconds_to_target": cost and cost.seconds,
                "payload_nbytes_to_target": cost and cost.payload_nbytes,
            }
            row |= {"steps_to_target": cost and cost.step}
        row |= {f"final_{metric}": s.final and s.final.mean, f"final_{metric}_deviation": s.final and s.final.deviation}
        row |= {f"{part}_seconds_per_step": time and getattr(time, part)
                for part in ("total", "compute", "waiting", "overhead")}  # fmt: skip
        row |= {f"{channel}_nbytes_per_step": nbytes for channel, nbytes in s.payload_nbytes_per_step.items()}
        row |= {"nic_nbytes_per_step": s.nic_nbytes_per_step, "peak_memory_nbytes": s.peak_memory_nbytes}
        rows.append({key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()})
    return {"columns": {key: key for row in rows for key in row}, "rows": rows}


def _row_html(
    summary: Summary,
    target: float | None,
    reference: Summary | None,
    channels: list[str],
    look: Look,
    widths: list[int],
) -> str:
    cells = [
        *([] if target is None else _target_cells(summary, target)),
        _speed_up(summary, reference, target),
        _spread_text(summary.runs[0].metric, summary.final),
        *_step_time_cells(summary),
        *(nbytes_text(summary.payload_nbytes_per_step.get(channel)) for channel in channels),
        nbytes_text(summary.nic_nbytes_per_step),
        nbytes_text(summary.peak_memory_nbytes),
    ]
    firsts = {sum(widths[:i]) for i in range(len(widths))}
    filled = "".join(f"<td{' class=first' if i in firsts else ''}>{escape(cell)}</td>" for i, cell in enumerate(cells))
    name = escape(summary.name)
    breakable = name.replace("+", "<wbr>+").replace("=", "=<wbr>")
    seeds = len(summary.runs) + len(summary.failed)
    few = f'<span class="few">{len(summary.runs)} of {seeds} seeds</span>' if summary.failed else ""
    return f'<tr data-name="{name}"><th scope="row">{sample_html(look)}{breakable}{few}</th>{filled}</tr>'


def _target_cells(summary: Summary, target: float) -> list[str]:
    cost = summary.to_target(target)
    if cost is None:
        return ["not reached", ABSENT, ABSENT]
    share = "" if cost.by_all else f" ({cost.reached} of {cost.seeds})"
    return [seconds_text(cost.seconds) + share, nbytes_text(cost.payload_nbytes), number_text(cost.step)]


def _speed_up(summary: Summary, reference: Summary | None, target: float | None) -> str:
    """Returns the speed-up over DDP: in time to the target, or per step if there is no target."""
    if reference is None:
        return ABSENT
    if target is None:
        own, ddp = summary.step_time, reference.step_time
        return factor_text(ddp.total / own.total) if own and ddp and own.total else ABSENT
    cost, against = summary.to_target(target), reference.to_target(target)
    if cost is None or against is None or not (cost.by_all and against.by_all) or not cost.seconds:
        return ABSENT
    return factor_text(against.seconds / cost.seconds)


def _step_time_cells(summary: Summary) -> list[str]:
    time = summary.step_time
    if time is None:
        return [ABSENT] * 4
    return [seconds_text(part) for part in (time.total, time.compute, time.waiting, time.overhead)]


def _spread_text(metric: str, value: Spread | None) -> str:
    if value is None:
        return ABSENT
    if value.deviation is None or not math.isfinite(value.deviation):
        return metric_text(metric, value.mean)
    if is_share(metric):
        return f"{100 * value.mean:.1f} ± {100 * value.deviation:.1f} %"
    return f"{metric_text(metric, value.mean)} ± {metric_text(metric, value.deviation, digits=2)}"


def _note(target: float | None, trivial: bool) -> str:
    speed_up = "Speed-up is in time to the target."
    if target is None:
        speed_up = "Speed-up is in time per step, because no target was given."
    if trivial:
        speed_up = "No speed-up is shown: the target is reached without communication."
    return (
        f"Means over seeds; ± is the standard deviation over seeds. {speed_up} Bytes are sent by one worker: the "
        "payload by channel, and what its network interface (NIC) counted. Parts of a step that were not measured "
        f"are shown as {ABSENT}. Overhead is the method’s work on the training thread. Memory is the largest peak of "
        "all workers."
    )


def failures_html(records: Sequence[Record]) -> str:
    """Returns the list of failed runs with their reasons; empty if no run failed."""
    failed = [record for record in records if record.status != "ok"]
    if not failed:
        return ""
    items = "".join(
        f"<li><strong>{escape(record.name)}</strong>, seed {record.seed}: "
        f"<span>{escape(record.reason or 'no reason was recorded')}</span></li>"
        for record in failed
    )
    return f'<h3>Runs that failed</h3><ul class="failures">{items}</ul>'
