"""Writes the report of a comparison as one self-contained HTML page: result, charts, figures, and how to repeat it.

`report.js` draws the figures with the copy of Vega-Lite that the page embeds. The page loads nothing from the network.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from laconic.bench.baselines import WITHOUT_COMMUNICATION
from laconic.bench.headline import headline
from laconic.bench.record import Record
from laconic.bench.report_figures import figures_of, provenance
from laconic.bench.report_lines import Figure
from laconic.bench.report_style import Look, config, dark_css, looks, sample_html
from laconic.bench.report_table import failures_html, table_data, table_html
from laconic.bench.summary import Summary, summarize
from laconic.bench.units import labelled_metric_text, link_text, metric_name, number_text
from laconic.version import __version__


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


def check_same_task(records: Sequence[Record]) -> None:
    """Checks that runs can be in one report.

    Raises:
        ValueError: There are no runs, or the runs are of different tasks.
    """
    if not records:
        raise ValueError("a report needs at least one run, not 0")
    for key in ("task", "metric", "higher_is_better"):
        values = {getattr(record, key) for record in records}
        if len(values) > 1:
            raise ValueError(f"the runs of one report must have the same {key}, not {sorted(map(str, values))}")


def render(records: Sequence[Record], target: float | None = None) -> str:
    """Returns the report as HTML.

    Raises:
        ValueError: There are no runs, or the runs are of different tasks.
    """
    check_same_task(records)
    summaries = summarize(records)
    ran = sorted((s for s in summaries if s.runs), key=lambda s: (s.method in WITHOUT_COMMUNICATION, s.is_baseline))
    look_of = {summary.name: looks(summaries)[summary.name] for summary in ran}
    figures = figures_of(summaries, target)
    result = headline(summaries, target)
    scripts = {"vega": _asset("vendor/vega.min.js"), "script": _asset("report.js")}
    return Template(_asset("report.html")).substitute(
        scripts,
        policy=_policy(scripts.values()),
        title=escape(f"laconic: {result.sentence}"),
        css=_asset("report.css") + dark_css(":is(.plot, .sample) "),
        date=escape(_minute(max(record.date for record in records))),
        headline=escape(_join_units(result.sentence)),
        details="".join(f'<p class="detail">{escape(_join_units(detail))}</p>' for detail in result.details),
        facts="".join(f"<li>{escape(fact)}</li>" for fact in _facts(records)),
        warnings="".join(f'<p class="warning">{escape(text)}</p>' for text in _warnings(records, summaries)),
        legend=_legend_html(look_of),
        figures=_figures_html(figures, provenance(records), look_of),
        table=table_html(summaries, target, look_of),
        failures=failures_html(records),
        setup=_setup_html(records, target),
        version=escape(__version__),
        licences=escape(_asset("vendor/LICENSES.txt")),
        data=_json(_data(figures, summaries, target)),
    )


def _figure_html(figure: Figure, source: str, look_of: dict[str, Look]) -> str:
    names = [row["method"] for row in figure.spec["datasets"].get("labels", [])]  # rows of bars are named in the figure
    items = "".join(f'<li data-name="{escape(n)}">{sample_html(look_of[n])}{escape(n)}</li>' for n in names)
    keys = f'<ul class="keys">{items}</ul>' if names else ""
    return (
        f'<figure id="{figure.id}" class="{figure.size}"><figcaption><h2>{escape(figure.title)}</h2>'
        f'<div class="options"></div><p class="note">{escape(figure.note)}</p></figcaption>'
        f'<div class="plot"></div>{keys}<p class="source">{escape(source)}</p></figure>'
    )


def _figures_html(figures: Sequence[Figure], source: str, look_of: dict[str, Look]) -> str:
    """Returns the empty frames of all figures, those of the methods' own metrics folded away."""
    shown = "".join(_figure_html(figure, source, look_of) for figure in figures if not figure.folded)
    folded = "".join(_figure_html(figure, source, look_of) for figure in figures if figure.folded)
    if folded:
        shown += (
            '<details class="internals whole"><summary>What the methods report of themselves</summary>'
            f'<div class="charts">{folded}</div></details>'
        )
    return shown


def _legend_html(look_of: dict[str, Look]) -> str:
    buttons = "".join(
        f'<button type="button" data-name="{escape(name)}" aria-pressed="true" '
        f'title="click: show or hide; double click: only this one">{sample_html(look)}{escape(name)}</button>'
        for name, look in look_of.items()
    )
    return buttons + '<button type="button" class="all" hidden>show all</button>'


def _data(figures: Sequence[Figure], summaries: Sequence[Summary], target: float | None) -> dict[str, Any]:
    """Returns what `report.js` reads. Alternatives of a figure hold only the datasets that differ."""
    listed = []
    for figure in figures:
        entry = dataclasses.asdict(figure)
        for other in entry["alternatives"].values():
            shared = entry["spec"]["datasets"]
            other["datasets"] = {key: rows for key, rows in other["datasets"].items() if rows != shared.get(key)}
        listed.append(entry)
    return {"figures": {"config": config(), "list": listed}, "table": table_data(summaries, target)}


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _policy(scripts: Iterable[str]) -> str:
    """Returns a Content-Security-Policy that allows the page its own scripts and style, and no requests."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"


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
        "Date": " to ".join(sorted({_minute(min(r.date for r in records)), _minute(max(r.date for r in records))})),
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


def _minute(date: str) -> str:
    """Returns an ISO date and time without seconds and time zone, which is UTC."""
    return date[:16].replace("T", " ")


def _settings_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def _distinct(records: Sequence[Record], text: Callable[[Record], str]) -> list[str]:
    return list(dict.fromkeys(text(record) for record in records))
