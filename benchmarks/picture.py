"""Draws a figure of a report as an SVG file, for README and docs, from the same specification as the report's page.

    python benchmarks/picture.py runs/slow docs/picture.svg
    python benchmarks/picture.py runs/slow docs/pareto.svg --figure metric-bytes --target 0.85
    python benchmarks/picture.py runs/slow docs/picture.svg --name ddp "PyTorch's DDP" --note "DDP is off the chart."

Contenders have the names of `NAMES` below, or those given by `--name`; others keep the names of their runs.

Needs vl-convert-python (`pip install laconic[docs]`), which holds Vega-Lite and needs no browser and no network. The
file has no background and adapts its colours to dark pages.
"""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from laconic.bench.join import common_target, join_runs
from laconic.bench.record import Record
from laconic.bench.report_figures import figures_of, provenance
from laconic.bench.report_lines import Figure
from laconic.bench.report_style import config, dark_css
from laconic.bench.summary import summarize
from laconic.bench.units import number_text

VEGA_LITE = "6.4"  # the version in laconic/bench/vendor
WIDEST_CHARACTER_PX = 7.6  # on average in 12 px, for the widest of the fonts that a reader may have (DejaVu Sans)
NAMES = {
    "allreduce": "AllReduce",
    "a2cid2": "A2CiD2",
    "adpsgd": "ADPSGD",
    "ddp": "DDP",
    "ddp_fp16": "DDP, fp16 hook",
    "demo": "DeMo",
    "diloco": "DiLoCo(32)",
    "diloco+period=8+fragments=4+delay=2+compressor=uniform:4": "DiLoCo, streaming, 4 bits",
    "diloco+period=6+outer_lr=2.5+outer_momentum=0+fragments=2+delay=2+mixing=steps+decay=0.95"
    "+compressor=topk:0.0234375:bits=1": "DiLoCo, sparse",
    "divisible": "Divisible",
    "efficient_adam": "EfficientAdam",
    "local_sgd": "LocalSGD(8)",
    "local_sgd+compressor=uniform:4": "LocalSGD(8), 4 bits",
    "none": "none: one worker alone",
    "none_averaged": "never communicate, averaged",
    "post_local_sgd": "post-local SGD",
    "powersgd": "PowerSGD",
    "qsgd": "QSGD, 8 bits",
    "sparseloco": "SparseLoCo",
    "sparseloco+period=8+kept=128+outer_lr=2.5": "SparseLoCo, outer rate 2.5",
    "torchft_diloco": "torchft's DiLoCo",
}
"""What a picture calls contenders, by the names of their runs: labels have room for 28 characters."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the --out folder of laconic compare")
    parser.add_argument("out", type=Path, help="the SVG file")
    parser.add_argument("--figure", default="metric-seconds", help="the figure's name")
    parser.add_argument("--target", type=float, help="a value of the metric; by default that of the runs")
    parser.add_argument("--width", type=int, default=860, help="in pixels")
    parser.add_argument(
        "--name", nargs=2, action="append", default=[], metavar=("RUN", "LABEL"), help="the label of a contender"
    )
    parser.add_argument("--note", default="", help="a sentence below the title, after how it was measured")
    arguments = parser.parse_args()
    records = renamed(join_runs([arguments.runs]), NAMES | dict(arguments.name))
    target = common_target(records) if arguments.target is None else arguments.target
    figures = {figure.id: figure for figure in figures_of(summarize(records), target)}
    if arguments.figure not in figures:
        parser.error(f"there is no figure {arguments.figure!r}; there are: {', '.join(figures)}")
    arguments.out.write_text(svg(figures[arguments.figure], records, arguments.width, arguments.note))


def renamed(records: Sequence[Record], names: Mapping[str, str]) -> list[Record]:
    """Returns the runs under the names that a picture shows.

    Raises:
        ValueError: Two contenders would have one name, and their runs would be drawn as one.
    """
    labels: dict[str, str] = {}
    for run in dict.fromkeys(record.name for record in records):
        label = names.get(run, run)
        if label in labels:
            raise ValueError(f"{labels[label]} and {run} are both called {label!r}: give one of them --name RUN LABEL")
        labels[label] = run
    return [dataclasses.replace(record, name=names.get(record.name, record.name)) for record in records]


def svg(figure: Figure, records: list[Record], width: int, note: str = "") -> str:
    """Returns a figure as SVG, with a title, what was trained, how it was measured, and a note."""
    import vl_convert

    first = records[0]
    trained = f"{first.task}, {number_text(first.parameters / 1e6)} M parameters, {first.workers} workers"
    notes = [f"{trained}. {provenance(records)}.", f"{figure.note} {note}".strip()]
    subtitle = [line for note in notes for line in textwrap.wrap(note, round(width / WIDEST_CHARACTER_PX))]
    fit = {"width": width, "autosize": {"type": "fit-x", "contains": "padding"}}
    fit |= {"padding": figure.spec["padding"] | {"right": 40}}  # for fonts wider than the one that vl-convert measures
    spec = figure.spec | fit | {"title": {"text": figure.title, "subtitle": subtitle}, "config": config()}
    drawn: str = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
    start = drawn.index(">") + 1
    return f"{drawn[:start]}<style>{dark_css()}</style>{drawn[start:]}\n"


if __name__ == "__main__":
    main()
