"""Figures with one row per contender, as Vega-Lite specifications: sorted bars and dots, each with its name and value.

The name stands above the bar and the value at the right end of the row, so both fit on any width.
"""

from __future__ import annotations

from typing import Any

from laconic.bench.report_axes import Axis
from laconic.bench.report_style import GREY, INK, LINE, ORANGE, SKY, VERMILLION, Look, scale

ROW_PX = 42
PARTS = {"compute": SKY, "overhead": ORANGE, "waiting": VERMILLION, "not measured": GREY}
"""The parts of a step and their colours."""


def bar_spec(rows: list[dict[str, Any]], look_of: dict[str, Look], x: Axis) -> dict[str, Any]:
    """Returns bars from 0 to `value`, with error bars from `low` to `high`.

    Args:
        rows: Sorted; with the fields method, value, low, high, text and tip. A value of None has no bar.
        look_of: The look of each contender.
        x: The horizontal axis, linear from 0.
    """
    y = _y(rows)
    at_x = {"field": "value", **x.vega()}
    layers = [
        {
            "mark": {"type": "bar", "height": 14, "yOffset": 8, "cornerRadiusEnd": 2, "opacity": 0.85},
            "encoding": {"x": at_x, "y": y, "color": _colour(rows, look_of), "tooltip": {"field": "tip"}},
        }
    ]
    if any(row["low"] != row["high"] for row in rows):
        layers += _range_layers(at_x, y, "low", "high")
    return _spec(rows, layers)


def dot_spec(
    rows: list[dict[str, Any]], points: list[dict[str, Any]], look_of: dict[str, Look], x: Axis
) -> dict[str, Any]:
    """Returns one or more dots in each row, joined by a line; suits a logarithmic axis, where bars would mislead.

    Args:
        rows: Sorted; with the fields method and text.
        points: The dots; with the fields method, value, kind and tip.
        look_of: The look of each contender.
        x: The horizontal axis.
    """
    y = _y(rows)
    at_x = {"field": "value", **x.vega()}
    kinds = list(dict.fromkeys(point["kind"] for point in points))
    shape = {
        "field": "kind",
        "type": "nominal",
        "scale": {"domain": kinds, "range": ["circle", "diamond", "square"][: len(kinds)]},
        "legend": {"symbolFillColor": "transparent"} if len(kinds) > 1 else None,
    }
    data = {"name": "points"}
    layers = [
        {"mark": {"type": "rule", "color": LINE, "yOffset": 8, "y2Offset": 8}, "encoding": {"y": y}},
        {
            "data": data,
            "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.5, "yOffset": 8, "y2Offset": 8},
            "encoding": {
                "x": {**at_x, "aggregate": "min"},
                "x2": {"field": "value", "aggregate": "max"},
                "y": y,
                "color": _colour(rows, look_of),
            },
        },
        {
            "data": data,
            "mark": {"type": "point", "filled": True, "size": 75, "opacity": 0.85, "yOffset": 8},
            "encoding": {
                "x": at_x,
                "y": y,
                "color": _colour(rows, look_of),
                "shape": shape,
                "tooltip": {"field": "tip"},
            },
        },
    ]
    return _spec(rows, layers) | {"datasets": {"rows": rows, "points": points}}


def stack_spec(rows: list[dict[str, Any]], parts: list[dict[str, Any]], x: Axis, field: str) -> dict[str, Any]:
    """Returns bars made of the parts of a step.

    Args:
        rows: Sorted; with the fields method and text.
        parts: The parts; with the fields method, part, start and end (named by `field`: "seconds" or "share") and tip.
        x: The horizontal axis.
        field: "seconds" for absolute bars, "share" for bars of equal length.
    """
    used = {name: colour for name, colour in PARTS.items() if any(part["part"] == name for part in parts)}
    layer = {
        "data": {"name": "parts"},
        "mark": {"type": "bar", "height": 14, "yOffset": 8},
        "encoding": {
            "x": {"field": f"{field}_start", **x.vega()},
            "x2": {"field": f"{field}_end"},
            "y": _y(rows),
            "color": {
                "field": "part",
                "type": "nominal",
                "scale": {"domain": list(used), "range": list(used.values())},
                "legend": {},
            },
            "tooltip": {"field": "tip"},
        },
    }
    return _spec(rows, [layer]) | {"datasets": {"rows": rows, "parts": parts}}


def _spec(rows: list[dict[str, Any]], layers: list[dict[str, Any]]) -> dict[str, Any]:
    y = _y(rows)
    text = {"type": "text", "baseline": "bottom", "dy": -4}
    names = [
        {
            "mark": {**text, "align": "left", "fontWeight": 600, "limit": {"expr": "width - 110"}},
            "encoding": {"x": {"value": 0}, "y": y, "text": {"field": "method"}},
        },
        {
            "mark": {**text, "align": "right"},
            "encoding": {"x": {"value": "width"}, "y": y, "text": {"field": "text"}},
        },
    ]
    return {
        "height": {"step": ROW_PX},
        "padding": {"left": 4, "top": 4, "bottom": 4, "right": 8},
        "datasets": {"rows": rows},
        "data": {"name": "rows"},
        "layer": [*layers, *names],
    }


def _y(rows: list[dict[str, Any]]) -> dict[str, Any]:
    order = [row["method"] for row in rows]
    return {"field": "method", "type": "nominal", "axis": None, "sort": order, "scale": {"padding": 0.1}}


def _colour(rows: list[dict[str, Any]], look_of: dict[str, Look]) -> dict[str, Any]:
    shown = {row["method"]: look_of[row["method"]] for row in rows}
    return {"field": "method", "type": "nominal", "scale": scale(shown, "colour"), "legend": None}


def _range_layers(x: dict[str, Any], y: dict[str, Any], low: str, high: str) -> list[dict[str, Any]]:
    """Returns error bars with caps."""
    ends: list[dict[str, Any]] = [
        {
            "mark": {"type": "tick", "height": 9, "thickness": 1.5, "yOffset": 8, "color": INK},
            "encoding": {"x": {**x, "field": end}, "y": y},
        }
        for end in (low, high)
    ]
    rule = {
        "mark": {"type": "rule", "strokeWidth": 1.5, "yOffset": 8, "y2Offset": 8, "color": INK},
        "encoding": {"x": {**x, "field": low}, "x2": {"field": high}, "y": y},
    }
    return [rule, *ends]
