"""The README's picture: the metric over seconds, from the runs of a comparison.

python benchmarks/picture.py runs/compare/runs.jsonl docs/picture.svg
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from laconic.bench.record import Record, RunsFile
from laconic.bench.summary import Summary, summarize
from laconic.bench.units import link_text, metric_name

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 400, 56, 150, 44, 44
COLOURS = ["#d1495b", "#00798c", "#edae49", "#5f4bb6", "#30a14e", "#c05299", "#3a7ca5", "#8d6a9f"]
GREY = "#8b949e"


def main(runs: Path, out: Path) -> None:
    records = RunsFile(runs.parent).read()
    summaries = [s for s in summarize(records) if s.runs and s.method not in ("none", "none_averaged")]
    first = records[0]
    curves = {s.name: points(s) for s in summaries}
    seconds = [x for curve in curves.values() for x, _ in curve]
    values = [y for curve in curves.values() for _, y in curve]
    low, high = math.log10(min(seconds)), math.log10(max(seconds))
    bottom, top = max(min(values), max(values) - 0.35), max(values) + 0.01

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low) / (high - low)
        up = (max(y, bottom) - bottom) / (top - bottom)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="22" class="title">{escape(title(first))}</text>']
    for x in ticks(low, high):
        at, _ = place(x, bottom)
        parts.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" class="grid"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g} s</text>')
    for i in range(5):
        y = bottom + (top - bottom) * i / 4
        _, at = place(10**low, y)
        parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{100 * y:.0f} %</text>')
    colours = iter(COLOURS)
    ends: list[tuple[float, str, str]] = []
    for summary in summaries:
        colour = GREY if summary.is_baseline else next(colours)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curves[summary.name]))
        parts.append(
            f'<polyline points="{line}" stroke="{colour}" class="{"baseline" if summary.is_baseline else "own"}"/>'
        )
        x, y = place(*curves[summary.name][-1])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        ends.append((x, summary.name, colour))
    # The legend, fastest first: that is where lines end from left to right.
    for i, (_, name, colour) in enumerate(sorted(ends)):
        y = TOP + 8 + 20 * i
        parts.append(f'<line x1="{WIDTH - RIGHT + 14}" y1="{y}" x2="{WIDTH - RIGHT + 34}" y2="{y}" stroke="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 40}" y="{y + 4}">{escape(name)}</text>')
    style = (
        "text{font:12px system-ui,sans-serif;fill:#57606a}.title{font-size:14px;font-weight:600}"
        ".grid{stroke:#8b949e;stroke-opacity:.25}polyline{fill:none}.own{stroke-width:2.5}.baseline{stroke-width:1.5}"
        "line{stroke-width:2.5}.grid{stroke-width:1}@media(prefers-color-scheme:dark){text{fill:#c9d1d9}}"
    )
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><style>{style}</style>'
        + "".join(parts)
        + "</svg>\n"
    )


def title(record: Record) -> str:
    return (
        f"Test {metric_name(record.metric)} over training time: {record.task}, "
        f"{record.parameters / 1e6:.2f} M parameters, {record.workers} hosts, {link_text(record.link)}"
    )


def points(summary: Summary) -> list[tuple[float, float]]:
    runs = summary.runs
    metric = runs[0].metric
    return [
        (sum(p.seconds for p in column) / len(column), sum(p.values[metric] for p in column) / len(column))
        for column in zip(*(run.points for run in runs), strict=True)
    ]


def ticks(low: float, high: float) -> list[float]:
    marks = [m * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for m in (1, 3)]
    return [mark for mark in marks if low <= math.log10(mark) <= high]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
