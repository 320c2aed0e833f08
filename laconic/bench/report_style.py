"""Gives every contender of a report its colour, dash and marker, and all figures one style.

Colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart. Colour is never the only
difference: methods have solid lines, baselines dashed ones, and markers differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from laconic.bench.baselines import WITHOUT_COMMUNICATION
from laconic.bench.summary import Summary

INK, SOFT, LINE, GRID, GREY = "#1b1f24", "#57606a", "#c4cad2", "#e6e9ee", "#858d97"
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
METHOD_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
METHOD_SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-right")
BASELINE_COLOURS = (INK, SKY, ORANGE, PURPLE, GREEN)
BASELINE_SHAPES = ("square", "triangle-down", "diamond", "triangle-left", "cross")
METHOD_DASHES = ([1, 0], [10, 2], [7, 2, 2, 2])  # one for each round through the colours
BASELINE_DASHES = ([6, 3], [3, 2], [9, 3, 3, 3])
APART_DASHES = ([2, 3], [5, 2, 1, 2])
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
CHARACTER_PX = 6.7  # an average character at 12 px; names have few wide ones

DARK = {
    INK: "#eceff4",
    SOFT: "#a0abbd",
    LINE: "#4a5464",
    GRID: "#2a313c",
    GREY: "#98a2b1",
    BLUE: "#2f95dc",
    "#ffffff": "#171b22",
}
"""The colours that a dark page replaces; all others are legible on both."""


@dataclass(frozen=True)
class Look:
    """How one contender is drawn in all figures."""

    colour: str
    dash: list[int]
    shape: str


def looks(summaries: Sequence[Summary]) -> dict[str, Look]:
    """Returns the look of each contender, by name.

    Methods take the first colours, baselines black and the last colours, and training without communication is grey.
    """
    result: dict[str, Look] = {}
    methods = baselines = apart = 0
    for summary in summaries:
        if summary.method in WITHOUT_COMMUNICATION:
            result[summary.name] = Look(GREY, APART_DASHES[apart % 2], ("circle", "triangle-up")[apart % 2])
            apart += 1
        elif summary.is_baseline:
            result[summary.name] = Look(
                BASELINE_COLOURS[baselines % len(BASELINE_COLOURS)],
                BASELINE_DASHES[baselines % len(BASELINE_DASHES)],
                BASELINE_SHAPES[baselines % len(BASELINE_SHAPES)],
            )
            baselines += 1
        else:
            dash = METHOD_DASHES[methods // len(METHOD_COLOURS) % len(METHOD_DASHES)]
            shape = METHOD_SHAPES[methods % len(METHOD_SHAPES)]
            result[summary.name] = Look(METHOD_COLOURS[methods % len(METHOD_COLOURS)], dash, shape)
            methods += 1
    return result


def scale(look_of: dict[str, Look], key: str) -> dict[str, Any]:
    """Returns the Vega-Lite scale from names to colours, dashes or shapes (`key`)."""
    return {"domain": list(look_of), "range": [getattr(look, key) for look in look_of.values()]}


def config() -> dict[str, Any]:
    """Returns the Vega-Lite configuration of all figures."""
    axis = {
        "labelColor": SOFT,
        "labelFontSize": 12,
        "titleColor": SOFT,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "gridColor": GRID,
        "domainColor": LINE,
        "tickColor": LINE,
    }
    return {
        "font": FONT,
        "background": None,
        "view": {"stroke": None},
        "axis": axis,
        "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
        "axisX": {"grid": False, "labelOverlap": "greedy", "labelPadding": 4},
        "legend": {"labelColor": SOFT, "labelFontSize": 12, "title": None, "orient": "top", "symbolType": "square"},
        "text": {"fontSize": 12, "color": INK},
        "title": {"anchor": "start", "fontSize": 15, "fontWeight": 600, "color": INK, "offset": 14,
                  "subtitleColor": SOFT, "subtitleFontSize": 12, "subtitlePadding": 5, "frame": "bounds"},
    }  # fmt: skip


def dark_css(scope: str = "") -> str:
    """Returns rules that recolour a drawn figure for dark pages; they override the SVG's attributes.

    Args:
        scope: A CSS selector before each rule, such as "figure ".
    """
    rules = "".join(
        f'{scope}[{attribute}="{light}"]{{{attribute}:{dark}}}'
        for light, dark in DARK.items()
        for attribute in ("fill", "stroke")
    )
    return f"@media screen and (prefers-color-scheme:dark){{{rules}}}"


_TRIANGLE = "M0,-4L4,3.4H-4Z"
_SYMBOLS = {
    "circle": "M-3.6,0A3.6,3.6 0 1 1 3.6,0A3.6,3.6 0 1 1 -3.6,0Z",
    "square": "M-3.3,-3.3H3.3V3.3H-3.3Z",
    "diamond": "M0,-4.6L3.6,0L0,4.6L-3.6,0Z",
    "cross": "M-1.4,-4H1.4V-1.4H4V1.4H1.4V4H-1.4V1.4H-4V-1.4H-1.4Z",
    "triangle-up": _TRIANGLE,
}
_TURNS = {"triangle-right": 90, "triangle-down": 180, "triangle-left": 270}


def sample_html(look: Look) -> str:
    """Returns a short piece of a contender's line with its marker, as SVG."""
    shape = _SYMBOLS.get(look.shape, _TRIANGLE)
    dash = " ".join(map(str, look.dash))
    return (
        '<svg class="sample" viewBox="-16 -6 32 12" aria-hidden="true">'
        f'<path d="M-16 0H16" stroke="{look.colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        f'<path d="{shape}" fill="{look.colour}" transform="rotate({_TURNS.get(look.shape, 0)})"/></svg>'
    )
