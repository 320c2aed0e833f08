"""Figures with lines, as Vega-Lite specifications: a quantity over time, steps or bytes, with a label for each line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from laconic.bench.report_axes import Axis, spread_out
from laconic.bench.report_style import CHARACTER_PX, INK, Look, scale
from laconic.bench.summary import Curve

MAX_MARKERS = 60  # of one line; with more they merge into a thick line
LABEL_PX = 16
LABEL_CHARACTERS = 28  # longer names end in "…"; the legend and the table have them in full
Encoding = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One figure of the report.

    Args:
        id: Its name in the page and for `benchmarks/picture.py`.
        title: What it shows.
        note: How to read it.
        spec: Its Vega-Lite specification, without width.
        columns: The columns of its CSV file: the field of the dataset, and the column's name.
        alternatives: Other specifications of the same data, by the name of the button that shows them.
        size: "whole", "large", "small" or "half": its width on a wide page.
        folded: Whether it is shown only on request.
        table: The dataset that its CSV file holds.
    """

    id: str
    title: str
    note: str
    spec: dict[str, Any]
    columns: dict[str, str]
    alternatives: dict[str, dict[str, Any]] = field(default_factory=dict)
    size: str = "half"
    folded: bool = False
    table: str = "rows"


@dataclass(frozen=True)
class Line:
    """One line of a figure.

    Args:
        name: The contender.
        x: Its abscissas.
        curve: Its ordinates, by step.
        columns: More columns of the CSV file, by name.
        tip: Returns the text that the pointer shows at a point.
    """

    name: str
    x: Sequence[float | None]
    curve: Curve
    columns: dict[str, Sequence[float | None]]
    tip: Callable[[int], str]

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row of data per point whose numbers are finite. Rows with a tip are drawn with a marker."""
        rows: list[dict[str, Any]] = []
        indices: list[int] = []
        for i, step in enumerate(self.curve.steps):
            numbers = {
                "x": self.x[i],
                "value": self.curve.mean[i],
                "low": self.curve.low[i],
                "high": self.curve.high[i],
            }
            if all(number is not None and math.isfinite(number) for number in numbers.values()):
                numbers |= {key: column[i] for key, column in self.columns.items()}
                rows.append({"method": self.name, "step": step} | {key: short(value) for key, value in numbers.items()})
                indices.append(i)
        every = math.ceil(len(rows) / MAX_MARKERS)
        for k, (row, i) in enumerate(zip(rows, indices, strict=True)):
            if k % every == 0 or k == len(rows) - 1:
                row["tip"] = self.tip(i)
        return rows


def short(value: float | None) -> float | None:
    """Rounds to six digits, more than a figure can show; NaN and infinity become None, which is not drawn."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def line_spec(
    rows: list[dict[str, Any]],
    look_of: dict[str, Look],
    x: Axis,
    y: Axis,
    height: int,
    goal: tuple[float, str] | None = None,
    before: Sequence[dict[str, Any]] = (),
    thin: bool = False,
    interpolate: str = "linear",
    flat: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Returns a layered specification: bands over seeds, lines, markers where something was measured, and labels.

    Args:
        rows: The data, with the fields of `Line.rows`.
        look_of: The look of each contender.
        x: The horizontal axis.
        y: The vertical axis.
        height: The height of the plot in pixels.
        goal: A horizontal reference line and its text, or None.
        before: Layers behind the lines.
        thin: Whether lines are only drawn faintly, behind other marks.
        interpolate: "linear", or "step-before" for averages over the interval that ends at a point.
        flat: Contenders without a place on the x axis: a horizontal line at this value for each.
    """
    inside = [row for row in rows if x.low <= row["x"] <= x.high and not (y.log and row["low"] <= 0)]
    names = [name for name in look_of if any(row["method"] == name for row in inside) or name in (flat or {})]
    shown = {name: look_of[name] for name in names}
    at_x: Encoding = {"field": "x", **x.vega()}
    at_y: Encoding = {"field": "value", **y.vega()}
    colour: Encoding = {"field": "method", "type": "nominal", "scale": scale(shown, "colour"), "legend": None}
    dash: Encoding = {"field": "method", "type": "nominal", "scale": scale(shown, "dash"), "legend": None}
    shape: Encoding = {"field": "method", "type": "nominal", "scale": scale(shown, "shape"), "legend": None}
    line_look = {"strokeWidth": 1, "opacity": 0.45} if thin else {"strokeWidth": 2}
    layers: list[dict[str, Any]] = list(before)
    if not thin and any(row["low"] != row["high"] for row in inside):
        layers.append(
            {
                "mark": {"type": "area", "clip": True, "opacity": 0.16, "interpolate": interpolate},
                "encoding": {"x": at_x, "y": {**at_y, "field": "low"}, "y2": {"field": "high"}, "color": colour},
            }
        )
    layers.append(
        {
            "mark": {"type": "line", "clip": True, "interpolate": interpolate, **line_look},
            "encoding": {"x": at_x, "y": at_y, "color": colour, "strokeDash": dash},
        }
    )
    if goal is not None:
        layers += _goal_layers(goal, y)
    labels = _labels(inside, names, y, height, flat or {})
    layers += _label_layers(at_x, at_y, colour, dash, shape)
    layers.append(  # on top, so that the pointer finds them
        {
            "transform": [{"filter": "datum.tip"}],
            "mark": {"type": "point", "clip": True, "filled": True, "size": 12 if thin else 26, "opacity": 1},
            "encoding": {"x": at_x, "y": at_y, "color": colour, "shape": shape, "tooltip": {"field": "tip"}},
        }
    )
    return {
        "height": height,
        "padding": {"left": 4, "top": 8, "bottom": 4, "right": 4},
        "datasets": {"rows": inside, "labels": labels},
        "data": {"name": "rows"},
        "layer": layers,
    }


def _goal_layers(goal: tuple[float, str], y: Axis) -> list[dict[str, Any]]:
    value, text = goal
    at = {"datum": value, **y.vega()}
    halo = {"stroke": "#ffffff", "strokeWidth": 4, "strokeJoin": "round", "opacity": 0.85}
    look = {"type": "text", "align": "left", "baseline": "bottom", "dx": 6, "dy": -4, "fontWeight": 600, "text": text}
    nowhere: Encoding = {"values": [{}]}  # one row: the marks do not depend on data
    return [
        {"data": nowhere, "mark": {"type": "rule", "strokeDash": [4, 3], "color": INK}, "encoding": {"y": at}},
        {"data": nowhere, "mark": look | halo, "encoding": {"y": at, "x": {"value": 0}}},
        {"data": nowhere, "mark": look, "encoding": {"y": at, "x": {"value": 0}}},
    ]


def _labels(
    rows: list[dict[str, Any]], names: list[str], y: Axis, height: int, flat: dict[str, float]
) -> list[dict[str, Any]]:
    """Returns where each line ends, and where its label stands in the column at the right."""
    lasts = {row["method"]: row for row in sorted(rows, key=lambda row: float(row["x"]))}
    ends = {name: flat[name] if name in flat else float(lasts[name]["value"]) for name in names}
    values = {name: min(max(end, y.low), y.high) for name, end in ends.items()}
    places = spread_out([height * (1 - y.share(values[name])) for name in names], LABEL_PX, height)
    return [
        {
            "method": name,
            "x": None if name in flat else lasts[name]["x"],
            "value": values[name],
            "place": short(y.value(1 - place / height)),
        }
        for name, place in zip(names, places, strict=True)
    ]


def _label_layers(x: Encoding, y: Encoding, colour: Encoding, dash: Encoding, shape: Encoding) -> list[dict[str, Any]]:
    """Returns the labels: a faint line from the end of each line to the right, then its marker and name."""
    data = {"name": "labels"}
    place = {**y, "field": "place"}
    beyond = [{"value": {"expr": f"width + {dx}"}} for dx in (0, 14, 20)]
    faint = {"type": "rule", "opacity": 0.4, "strokeWidth": 1}
    return [
        {
            "name": "label-1",
            "data": data,
            "transform": [{"filter": "datum.x !== null"}],
            "mark": {**faint, "strokeDash": [1, 3]},
            "encoding": {"x": x, "x2": beyond[0], "y": y, "color": colour},
        },
        {
            "data": data,
            "transform": [{"filter": "datum.x === null"}],
            "mark": {"type": "rule", "strokeWidth": 1.6},
            "encoding": {"x": {"value": 0}, "x2": beyond[0], "y": y, "color": colour, "strokeDash": dash},
        },
        {
            "name": "label-2",
            "data": data,
            "mark": {**faint, "opacity": 0.7},
            "encoding": {"x": beyond[0], "x2": beyond[1], "y": y, "y2": {"field": "place"}, "color": colour},
        },
        {
            "name": "label-3",
            "data": data,
            "mark": {"type": "point", "filled": True, "size": 40, "opacity": 1},
            "encoding": {"x": beyond[2], "y": place, "color": colour, "shape": shape},
        },
        {
            "name": "label-4",
            "data": data,
            "mark": {
                "type": "text",
                "align": "left",
                "baseline": "middle",
                "dx": 8,
                "limit": LABEL_CHARACTERS * CHARACTER_PX,
            },
            "encoding": {"x": beyond[2], "y": place, "text": {"field": "method"}},
        },
    ]


def focused(y: Axis, rows: list[dict[str, Any]], goal: float | None, higher: bool) -> Axis | None:
    """Returns an axis for the last part of all lines, where they differ; None if that is most of the whole axis.

    Args:
        y: The axis that shows everything.
        rows: The data, with the fields of `Line.rows`.
        goal: A value that must be visible, or None.
        higher: Whether higher values are better.
    """
    lasts = list({row["method"]: row["value"] for row in rows}.values())  # rows are in the order of steps
    best, worst = (max(lasts), min(lasts)) if higher else (min(lasts), max(lasts))
    margin = max(1.5 * abs(best - worst), 0.15 * (y.high - y.low))
    goals = [] if goal is None else [goal]
    if higher:
        low, high = max(y.low, min([worst - margin, *goals])), max([*(row["high"] for row in rows), *goals])
    else:
        low, high = min([*(row["low"] for row in rows), *goals]), min(y.high, max([worst + margin, *goals]))
    slack = 0.04 * (high - low)
    zoomed = dataclasses.replace(y, low=max(y.low, low - slack), high=min(y.high, high + slack))
    return zoomed if not y.log and zoomed.high - zoomed.low < 0.75 * (y.high - y.low) else None
