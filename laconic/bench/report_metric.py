"""Figures of the metric, as Vega-Lite specifications: over time, steps and bytes, and the time to the target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from laconic.bench.baselines import WITHOUT_COMMUNICATION
from laconic.bench.headline import reached_without_communication
from laconic.bench.report_axes import LOG_RATIO, Axis, axis
from laconic.bench.report_lines import Figure, Line, focused, line_spec, short
from laconic.bench.report_rows import bar_spec
from laconic.bench.report_style import INK, Look, looks, scale
from laconic.bench.summary import Curve, Summary
from laconic.bench.units import (
    is_share,
    labelled_metric_text,
    metric_name,
    metric_text,
    nbytes_text,
    number_text,
    seconds_text,
)

HEIGHT = 340


@dataclass(frozen=True)
class Comparison:
    """What all figures of a report are drawn from.

    Args:
        ran: The contenders with at least one run that did not fail; methods last, because they are drawn on top.
        looks: The look of each contender.
        target: A value of the metric, or None.
    """

    ran: list[Summary]
    looks: dict[str, Look]
    target: float | None

    @classmethod
    def of(cls, summaries: Sequence[Summary], target: float | None) -> Comparison:
        ran = sorted((summary for summary in summaries if summary.runs), key=lambda summary: not summary.is_baseline)
        return cls(ran, looks(summaries), target)

    @property
    def metric(self) -> str:
        return self.ran[0].runs[0].metric

    @property
    def higher_is_better(self) -> bool:
        return self.ran[0].runs[0].higher_is_better

    @property
    def several_seeds(self) -> bool:
        return max(len(summary.runs) for summary in self.ran) > 1

    @property
    def apart(self) -> list[Summary]:
        """The baselines without communication."""
        return [summary for summary in self.ran if summary.method in WITHOUT_COMMUNICATION]

    @property
    def communicating(self) -> list[Summary]:
        return [summary for summary in self.ran if summary.method not in WITHOUT_COMMUNICATION]

    def bands(self) -> str:
        """Returns how to read the bands around lines."""
        return " Line: mean over seeds; band: lowest to highest seed." if self.several_seeds else ""


def metric_over_time(c: Comparison) -> Figure | None:
    """Returns the metric over training time."""
    note = "On held-out data, for the mean of all workers’ models (none: the model of one worker)." + c.bands()
    lines = _metric_lines(c, c.ran, "seconds")
    rows = [row for line in lines for row in line.rows()]
    if not rows:
        return None
    x = time_axis(rows)
    size, height = ("whole", HEIGHT) if c.target is None else ("large", HEIGHT + 60)
    return _metric_figure(c, "metric-seconds", f"{_title(c)} over training time", note, rows, x, size, height)


def metric_over_steps(c: Comparison) -> Figure | None:
    """Returns the metric over training steps."""
    rows = [row for line in _metric_lines(c, c.ran, "step") for row in line.rows()]
    if not rows:
        return None
    x = axis("training steps", "count", [row["x"] for row in rows], zero=True, log=False)
    note = "What each step is worth, whatever it costs." + c.bands()
    return _metric_figure(c, "metric-steps", f"{_title(c)} over steps", note, rows, x, "half", HEIGHT)


def time_axis(rows: list[dict[str, Any]]) -> Axis:
    """Returns the axis of training time, logarithmic if one contender takes much longer than another."""
    ends = [row["x"] for row in {row["method"]: row for row in rows}.values()]
    log = max(ends) >= LOG_RATIO * min(ends) > 0
    shown = [row["x"] for row in rows if row["x"] > 0 or not log]
    return axis("training time without evaluation", "seconds", shown, zero=True, log=log)


def _metric_figure(
    c: Comparison, id: str, title: str, note: str, rows: list[dict[str, Any]], x: Axis, size: str, height: int
) -> Figure:
    whole = _metric_axis(c, rows)
    close = focused(whole, rows, c.target, c.higher_is_better)
    specs = [line_spec(rows, c.looks, x, y, height, _goal(c)) for y in (close, whole) if y is not None]
    alternatives = {"whole range": specs[1]} if close is not None else {}
    return Figure(id, title, note, specs[0], _columns(c), alternatives, size)


def metric_over_bytes(c: Comparison) -> Figure | None:
    """Returns the Pareto plot: final metric against bytes, the way there, and the best for every number of bytes."""
    lines = _metric_lines(c, c.communicating, "payload_nbytes")
    rows = [row for line in lines for row in line.rows() if row["x"] > 0]
    if not rows:
        return None
    finals = list({row["method"]: row for row in rows}.values())
    flat = {s.name: s.final.mean for s in c.apart if s.final is not None and math.isfinite(s.final.mean)}
    x = axis("payload sent by one worker", "bytes", [row["x"] for row in rows], log=True)
    levels = [{"method": name, "value": value, "low": value, "high": value} for name, value in flat.items()]
    whole = _metric_axis(c, [*rows, *levels])
    y = focused(whole, [*rows, *levels], c.target, c.higher_is_better) or whole
    at_x, at_y = {"field": "x", **x.vega()}, {"field": "value", **y.vega()}
    colour = {"field": "method", "type": "nominal", "scale": scale(c.looks, "colour"), "legend": None}
    shape = {"field": "method", "type": "nominal", "scale": scale(c.looks, "shape"), "legend": None}
    front = {
        "data": {"name": "front"},
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 9, "opacity": 0.13, "color": INK,
                 "clip": True, "strokeCap": "round"},
        "encoding": {"x": at_x, "y": at_y, "order": {"field": "x"}},
    }  # fmt: skip
    spec = line_spec(rows, c.looks, x, y, HEIGHT, _goal(c), [front], thin=True, flat=flat)
    spec["layer"] += [
        {
            "data": {"name": "finals"},
            "mark": {"type": "rule", "strokeWidth": 2, "clip": True},
            "encoding": {"x": at_x, "y": {**at_y, "field": "low"}, "y2": {"field": "high"}, "color": colour},
        },
        {
            "data": {"name": "finals"},
            "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1, "clip": True},
            "encoding": {"x": at_x, "y": at_y, "color": colour, "shape": shape, "tooltip": {"field": "tip"}},
        },
    ]
    spec["datasets"] |= {"finals": finals, "front": pareto_front(finals, c.higher_is_better)}
    note = (
        "Large markers: after the last step. Thin lines: the way there. Shaded: nothing is better with fewer bytes."
        + (" Vertical bars: lowest to highest seed." if c.several_seeds else "")
        + (" Horizontal lines: training without communication." if flat else "")
    )
    return Figure("metric-bytes", f"{_title(c)} against bytes sent", note, spec, _columns(c))


def pareto_front(finals: list[dict[str, Any]], higher_is_better: bool) -> list[dict[str, Any]]:
    """Returns the points, by rising x, whose value no point with a smaller or equal x reaches.

    Example:
        >>> points = [{"x": 1, "value": 0.8}, {"x": 2, "value": 0.7}, {"x": 3, "value": 0.9}]
        >>> pareto_front(points, higher_is_better=True)
        [{'x': 1, 'value': 0.8}, {'x': 3, 'value': 0.9}]
    """
    sign = 1 if higher_is_better else -1
    front: list[dict[str, Any]] = []
    for row in sorted(finals, key=lambda row: (row["x"], -sign * row["value"])):
        if not front or sign * row["value"] > sign * front[-1]["value"]:
            front.append({"x": row["x"], "value": row["value"]})
    return front


def time_to_target(c: Comparison) -> Figure | None:
    """Returns the time to the target as sorted bars, or None if there is no target."""
    if c.target is None:
        return None
    target = c.target
    rows = [_target_row(summary, target) for summary in sorted(c.ran, key=lambda summary: summary.rank(target))]
    highs = [row["high"] for row in rows if row["high"] is not None]
    x = axis("training time", "seconds", [0.0, *highs], zero=True, log=False)
    note = "Until the first evaluation that is at least that good."
    if c.several_seeds:
        note += " Bar: mean over seeds; line: fastest to slowest seed."
    trivial = reached_without_communication(c.ran, c.target)
    if trivial is not None:
        note = f"{trivial.name} reaches this target: these times do not show what communication buys. {note}"
    columns = {
        "method": "method",
        "value": "seconds",
        "low": "seconds_fastest_seed",
        "high": "seconds_slowest_seed",
        "step": "step",
        "bytes": "payload_nbytes",
        "reached": "seeds_at_target",
        "seeds": "seeds",
    }
    title = f"Time to {labelled_metric_text(c.metric, c.target)}"
    return Figure("to-target", title, note, bar_spec(rows, c.looks, x), columns, size="small")


def _target_row(summary: Summary, target: float) -> dict[str, Any]:
    cost = summary.to_target(target)
    row: dict[str, Any] = {"method": summary.name, "seeds": len(summary.runs)}
    if cost is None:
        row |= dict.fromkeys(("value", "low", "high", "step", "bytes"))
        return row | {"reached": 0, "text": "not reached", "tip": f"{summary.name}\nnot reached"}
    row |= {"value": short(cost.seconds), "low": short(cost.lowest_seconds), "high": short(cost.highest_seconds)}
    row |= {"step": short(cost.step), "bytes": short(cost.payload_nbytes), "reached": cost.reached}
    few = "" if cost.by_all else f" ({cost.reached} of {cost.seeds} seeds)"
    tip = [
        summary.name,
        f"{seconds_text(cost.seconds)} ({seconds_text(cost.lowest_seconds)} to {seconds_text(cost.highest_seconds)})",
        f"{number_text(cost.step)} steps",
        f"{nbytes_text(cost.payload_nbytes)} sent by one worker",
    ]
    return row | {"text": seconds_text(cost.seconds) + few, "tip": "\n".join(tip)}


def _metric_lines(c: Comparison, summaries: Sequence[Summary], over: str) -> list[Line]:
    lines = []
    for summary in summaries:
        curve = summary.curve(lambda point: point.values[c.metric])
        seconds = values_at(curve, summary.curve(lambda point: point.seconds))
        nbytes = values_at(curve, summary.curve(lambda point: point.payload_nbytes))
        steps: list[float | None] = [float(step) for step in curve.steps]
        x = {"seconds": seconds, "payload_nbytes": nbytes, "step": steps}[over]
        tip = _tip(summary.name, c.metric, curve, seconds, nbytes)
        lines.append(Line(summary.name, x, curve, {"seconds": seconds, "bytes": nbytes}, tip))
    return lines


def values_at(curve: Curve, other: Curve) -> list[float | None]:
    """Returns the means of `other` at the steps of `curve`."""
    means = dict(zip(other.steps, other.mean, strict=True))
    return [means.get(step) for step in curve.steps]


def _tip(
    name: str, metric: str, curve: Curve, seconds: Sequence[float | None], nbytes: Sequence[float | None]
) -> Callable[[int], str]:
    def text(i: int) -> str:
        value = f"{metric_name(metric)} {metric_text(metric, curve.mean[i])}"
        if curve.low[i] != curve.high[i]:
            value += f" ({metric_text(metric, curve.low[i])} to {metric_text(metric, curve.high[i])})"
        return f"{name}\n{value}\n{seconds_text(seconds[i])}, {curve.steps[i]:,} steps\n{nbytes_text(nbytes[i])} sent"

    return text


def _metric_axis(c: Comparison, rows: list[dict[str, Any]]) -> Axis:
    values = [row[key] for row in rows for key in ("low", "high")] + ([] if c.target is None else [c.target])
    if is_share(c.metric):
        return axis(metric_name(c.metric), "share", values, log=False)
    return axis(metric_name(c.metric), "count", values)


def _goal(c: Comparison) -> tuple[float, str] | None:
    return None if c.target is None else (c.target, f"target {labelled_metric_text(c.metric, c.target)}")


def _title(c: Comparison) -> str:
    name = metric_name(c.metric)
    return name[0].upper() + name[1:]


def _columns(c: Comparison) -> dict[str, str]:
    """Returns the columns of the CSV file."""
    names = {"method": "method", "step": "step", "seconds": "seconds", "bytes": "payload_nbytes", "value": c.metric}
    return names | {"low": f"{c.metric}_lowest_seed", "high": f"{c.metric}_highest_seed"}
