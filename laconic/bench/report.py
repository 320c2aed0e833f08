"""Writes the report of a comparison as one self-contained HTML page: result, charts, figures, and how to repeat it.

`report.js` draws the charts without a charting library, so the page is small, loads nothing from the network, and one
legend controls all charts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from laconic.bench.headline import headline
from laconic.bench.record import Record
from laconic.bench.report_table import failures_html, table_html
from laconic.bench.summary import Curve, Summary, summarize
from laconic.bench.units import is_share, labelled_metric_text, link_text, metric_name, number_text
from laconic.version import __version__

COLOURS = {True: 6, False: 8}  # the number of colours in report.css for baselines and for methods


def write_report(records: Sequence[Record], path: Path, target: float | None = None) -> None:
    """Writes the report to `path`, atomically: a reader sees the old page or the new one.

    Args:
        records: The runs of the comparison; at least one.
        path: The HTML file.
        target: A value of the task's metric, or None.
    """
    page = render(records, target)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def render(records: Sequence[Record], target: float | None = None) -> str:
    """Returns the report as HTML.

    Raises:
        ValueError: There are no runs, or the runs are of different tasks.
    """
    if not records:
        raise ValueError("a report needs at least one run, not 0")
    for key in ("task", "metric", "higher_is_better"):
        values = {getattr(record, key) for record in records}
        if len(values) > 1:
            raise ValueError(f"the runs of one report must have the same {key}, not {sorted(map(str, values))}")
    summaries = summarize(records)
    colours = colour_classes(summaries)
    result = headline(summaries, target)
    script = _asset("report.js")
    return Template(_asset("report.html")).substitute(
        policy=_policy(script),
        title=escape(f"laconic: {result.sentence}"),
        css=_asset("report.css"),
        date=escape(max(record.date for record in records)),
        headline=escape(_join_units(result.sentence)),
        details="".join(f'<p class="detail">{escape(_join_units(detail))}</p>' for detail in result.details),
        facts="".join(f"<li>{escape(fact)}</li>" for fact in _facts(records)),
        warnings="".join(f'<p class="warning">{escape(text)}</p>' for text in _warnings(records, summaries)),
        table=table_html(summaries, target, colours),
        failures=failures_html(records),
        setup=_setup_html(records, target),
        version=escape(__version__),
        data=_json(_chart_data(records, summaries, colours, target)),
        script=script,
    )


def colour_classes(summaries: Sequence[Summary]) -> dict[str, str]:
    """Returns the CSS class of each contender: vivid colours for methods, muted ones for baselines."""
    seen = {True: 0, False: 0}
    classes = {}
    for summary in summaries:
        baseline = summary.is_baseline
        classes[summary.name] = f"{'baseline' if baseline else 'method'}-{seen[baseline] % COLOURS[baseline]}"
        seen[baseline] += 1
    return classes


def _chart_data(
    records: Sequence[Record], summaries: Sequence[Summary], colours: dict[str, str], target: float | None
) -> dict[str, Any]:
    metric = records[0].metric
    return {
        "metric": metric_name(metric),
        "share": is_share(metric),
        "higher": records[0].higher_is_better,
        "target": target,
        "targetText": None if target is None else labelled_metric_text(metric, target),
        "seeds": max(len(summary.runs) for summary in summaries),
        "methods": [
            _method_data(summary, metric, colours[summary.name], target) for summary in summaries if summary.runs
        ],
    }


def _method_data(summary: Summary, metric: str, colour: str, target: float | None) -> dict[str, Any]:
    curve = summary.curve(lambda point: point.values[metric])
    time = summary.step_time
    cost = None if target is None else summary.to_target(target)
    return {
        "name": summary.name,
        "baseline": summary.is_baseline,
        "colour": colour,
        "metric": {
            **_columns(curve),
            "seconds": _at(curve, summary.curve(lambda point: point.seconds)),
            "payload": _at(curve, summary.curve(lambda point: point.payload_nbytes)),
        },
        "loss": _columns(summary.loss_curve()),
        "metrics": {key: _columns(metrics) for key, metrics in summary.method_curves().items()},
        "stepTime": time and {key: _short(value) for key, value in vars(time).items()},
        "payload": {channel: _short(nbytes) for channel, nbytes in summary.payload_nbytes_per_step.items()},
        "target": cost
        and {
            "seconds": _short(cost.seconds),
            "payload": _short(cost.payload_nbytes),
            "step": _short(cost.step),
            "reached": cost.reached,
            "seeds": cost.seeds,
        },
        "nic": _short(summary.nic_nbytes_per_step),
    }


def _columns(curve: Curve) -> dict[str, Any]:
    return {
        "step": curve.steps,
        "mean": [_short(value) for value in curve.mean],
        "low": [_short(value) for value in curve.low],
        "high": [_short(value) for value in curve.high],
    }


def _at(curve: Curve, other: Curve) -> list[float | None]:
    """Returns the means of `other` at the steps of `curve`."""
    means = dict(zip(other.steps, other.mean, strict=True))
    return [_short(means.get(step)) for step in curve.steps]


def _short(value: float | None) -> float | None:
    """Rounds to six digits, more than a chart can show; NaN and infinity become None, which is not drawn."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _policy(script: str) -> str:
    """Returns a Content-Security-Policy that allows the page its own script and style, and no requests."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _asset(name: str) -> str:
    return files("laconic.bench").joinpath(name).read_text(encoding="utf-8")


def _facts(records: Sequence[Record]) -> list[str]:
    first = records[0]
    seeds = len({record.seed for record in records})
    return [
        first.task,
        f"{number_text(first.parameters / 1e6)} M parameters"
        if first.parameters >= 1e5
        else f"{first.parameters:,} parameters",
        f"{first.workers} workers",
        link_text(first.link),
        *([] if first.rho is None else [f"ρ = {number_text(first.rho)}"]),
        f"{first.steps:,} steps",
        f"{seeds} seeds" if seeds > 1 else "1 seed",
    ]


def _warnings(records: Sequence[Record], summaries: Sequence[Summary]) -> list[str]:
    """Returns what makes the comparison unfair or incomplete: failed runs, different settings, NaN, no curves."""
    texts = []
    failed = sum(record.status != "ok" for record in records)
    if failed:
        texts.append(f"{failed} of {len(records)} runs failed: the reasons are below the table.")
    for key in ("workers", "link", "steps", "parameters", "task_settings", "machine"):
        values = list(dict.fromkeys(_settings_text(getattr(record, key)) for record in records))
        if len(values) > 1:
            texts.append(f"These runs differ in {key.replace('_', ' ')}: {'; '.join(values)}.")
    texts += [
        f"{record.name}, seed {record.seed}: at some step its {metric_name(record.metric)} is not finite."
        for record in records
        if not all(math.isfinite(point.values[record.metric]) for point in record.points)
    ]
    texts += [
        f"The seeds of {summary.name} have no evaluated step in common, so it has no curve."
        for summary in summaries
        if any(run.points for run in summary.runs) and not summary.curve(lambda point: point.seconds).steps
    ]
    return texts


def _setup_html(records: Sequence[Record], target: float | None) -> str:
    def joined(text: Callable[[Record], str]) -> str:
        return "; ".join(_distinct(records, text))

    rows = {
        "Task": joined(lambda r: r.task),
        "Task settings": joined(lambda r: _settings_text(r.task_settings)) or "defaults",
        "Target": "none given" if target is None else labelled_metric_text(records[0].metric, target),
        "Parameters": joined(lambda r: f"{r.parameters:,}"),
        "Workers": joined(lambda r: str(r.workers)),
        "Link": joined(lambda r: link_text(r.link) if r.link == "none" else f"{link_text(r.link)} ({r.link})"),
        "ρ (all-reduce / compute)": joined(lambda r: "not set" if r.rho is None else number_text(r.rho)),
        "Steps": joined(lambda r: f"{r.steps:,}"),
        "Seeds": ", ".join(_distinct(records, lambda r: str(r.seed))),
        "Date": joined(lambda r: r.date),
        "Machine": joined(lambda r: r.machine),
        "Versions": joined(lambda r: _settings_text(r.versions)),
    }
    listed = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in rows.items())
    commands = "".join(
        f'<div class="command"><pre tabindex="0"><code>{escape(command)}</code></pre>'
        '<button type="button" class="copy">Copy</button></div>'
        for command in _distinct(records, lambda r: r.command)
    )
    settings = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text or 'no settings')}</dd></div>"
        for name, text in {r.name: _settings_text(r.settings) for r in records}.items()
    )
    return (
        f'<h3>The command</h3>{commands}<dl class="setup">{listed}</dl>'
        f'<details><summary>Settings of each method</summary><dl class="setup">{settings}</dl></details>'
    )


def _join_units(sentence: str) -> str:
    """Puts a no-break space between each number and its unit, so that no line breaks there."""
    return re.sub(r"(?<=\d) (?=(?:%|[µm]?s|[kMGT]?B|min|h|[kMG]bit/s)(?!\w))", "\u00a0", sentence)


def _settings_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def _distinct(records: Sequence[Record], text: Callable[[Record], str]) -> list[str]:
    return list(dict.fromkeys(text(record) for record in records))
