"""One self-contained page for people: what a comparison found, its charts, its figures, and how to repeat it.

The charts are drawn by `report.js`, some hundreds of lines of our own: the page stays small, opens at once, and one
legend rules all charts.
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

COLOURS = {True: 5, False: 8}  # how many report.css has for peers, for methods


def write_report(records: Sequence[Record], path: Path, target: float | None = None) -> None:
    """Write the page. Whoever reads `path` meanwhile sees the old page or the new one, never a part."""
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
    """The page as text."""
    if not records:
        raise ValueError("a report needs at least one run, not 0")
    for key in ("task", "metric", "higher_is_better"):
        values = {getattr(record, key) for record in records}
        if len(values) > 1:
            raise ValueError(f"the runs of one report must have the same {key}, not {sorted(map(str, values))}")
    summaries = summarize(records)
    colours = colour_classes(summaries)
    news = headline(summaries, target)
    script = _part("report.js")
    return Template(_part("report.html")).substitute(
        policy=_policy(script),
        title=escape(f"laconic: {news.sentence}"),
        css=_part("report.css"),
        date=escape(max(record.date for record in records)),
        headline=escape(_unbroken(news.sentence)),
        details="".join(f'<p class="detail">{escape(_unbroken(detail))}</p>' for detail in news.details),
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
    """A class of report.css for each name: vivid for methods, muted for peers."""
    seen = {True: 0, False: 0}
    classes = {}
    for summary in summaries:
        kind = summary.is_peer
        classes[summary.name] = f"{'peer' if kind else 'method'}-{seen[kind] % COLOURS[kind]}"
        seen[kind] += 1
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
        "ways": [_way_data(summary, metric, colours[summary.name], target) for summary in summaries if summary.runs],
    }


def _way_data(summary: Summary, metric: str, colour: str, target: float | None) -> dict[str, Any]:
    curve = summary.curve(lambda point: point.values[metric])
    split = summary.split
    cost = None if target is None else summary.to_target(target)
    return {
        "name": summary.name,
        "peer": summary.is_peer,
        "colour": colour,
        "metric": {
            **_columns(curve),
            "seconds": _at(curve, summary.curve(lambda point: point.seconds)),
            "payload": _at(curve, summary.curve(lambda point: point.payload_nbytes)),
        },
        "loss": _columns(summary.loss_curve()),
        "own": {key: _columns(own) for key, own in summary.method_curves().items()},
        "split": split and {key: _short(value) for key, value in vars(split).items()},
        "payload": {channel: _short(nbytes) for channel, nbytes in summary.payload_nbytes_per_step.items()},
        "target": cost
        and {
            "seconds": _short(cost.seconds),
            "payload": _short(cost.payload_nbytes),
            "step": _short(cost.step),
            "reached": cost.reached,
            "seeds": cost.seeds,
        },
        "card": _short(summary.card_nbytes_per_step),
    }


def _columns(curve: Curve) -> dict[str, Any]:
    return {
        "step": curve.steps,
        "mean": [_short(value) for value in curve.mean],
        "low": [_short(value) for value in curve.low],
        "high": [_short(value) for value in curve.high],
    }


def _at(curve: Curve, other: Curve) -> list[float | None]:
    """The other curve's means at the steps of the first."""
    means = dict(zip(other.steps, other.mean, strict=True))
    return [_short(means.get(step)) for step in curve.steps]


def _short(value: float | None) -> float | None:
    """Six digits are more than a screen shows; what is not finite has no place on one."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _policy(script: str) -> str:
    """The page may run its own script and style, and load nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _part(name: str) -> str:
    return files("laconic.bench").joinpath(name).read_text(encoding="utf-8")


def _facts(records: Sequence[Record]) -> list[str]:
    some = records[0]
    seeds = len({record.seed for record in records})
    return [
        some.task,
        f"{number_text(some.parameters / 1e6)} M parameters"
        if some.parameters >= 1e5
        else f"{some.parameters:,} parameters",
        f"{some.workers} workers",
        link_text(some.link),
        *([] if some.rho is None else [f"ρ = {number_text(some.rho)}"]),
        f"{some.steps:,} steps",
        f"{seeds} seeds" if seeds > 1 else "1 seed",
    ]


def _warnings(records: Sequence[Record], summaries: Sequence[Summary]) -> list[str]:
    """What makes the comparison less than fair or less than whole."""
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
    ways = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text or 'no settings')}</dd></div>"
        for name, text in {r.name: _settings_text(r.settings) for r in records}.items()
    )
    return (
        f'<h3>The command</h3>{commands}<dl class="setup">{listed}</dl>'
        f'<details><summary>Settings of each way</summary><dl class="setup">{ways}</dl></details>'
    )


def _unbroken(sentence: str) -> str:
    """No line ends between a number and its unit."""
    return re.sub(r"(?<=\d) (?=(?:%|[µm]?s|[kMGT]?B|min|h|[kMG]bit/s)(?!\w))", "\u00a0", sentence)


def _settings_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def _distinct(records: Sequence[Record], text: Callable[[Record], str]) -> list[str]:
    return list(dict.fromkeys(text(record) for record in records))
