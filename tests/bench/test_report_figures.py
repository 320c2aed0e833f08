"""The figures of the report as specifications: what they show, for given runs."""

from __future__ import annotations

import itertools
import json
import math
import re
from typing import Any

import pytest

from laconic.bench.record import Point, Record
from laconic.bench.report_axes import Axis, axis, linear_ticks, log_ticks, spread_out
from laconic.bench.report_figures import figures_of, provenance
from laconic.bench.report_lines import LABEL_CHARACTERS, Figure, focused
from laconic.bench.report_style import looks
from laconic.bench.summary import summarize
from tests.bench.synthetic import SHAPES, comparison, failed, run


def figures(records: list[Record], target: float | None = 0.85) -> dict[str, Figure]:
    return {figure.id: figure for figure in figures_of(summarize(records), target)}


def rows(figure: Figure, name: str | None = None, data: str = "rows") -> list[dict[str, Any]]:
    return [row for row in figure.spec["datasets"][data] if name in (None, row["method"])]


def test_all_figures_of_a_comparison() -> None:
    drawn = figures(comparison())
    assert [name for name in drawn if not drawn[name].folded] == [
        "metric-seconds", "to-target", "metric-bytes", "metric-steps", "link-use", "train-loss", "step-time",
        "step-bytes", "waiting",
    ]  # fmt: skip
    assert "to-target" not in figures(comparison(), None)
    assert figures([failed(record, "died") for record in comparison()]) == {}


def test_specifications_are_json_without_nan() -> None:
    records = comparison()
    for point in records[3].points[20:]:
        point.values["accuracy"] = math.nan
        point.seconds = math.inf
    for figure in figures(records).values():
        content = [figure.spec, figure.alternatives]
        assert json.loads(json.dumps(content, allow_nan=False)) == json.loads(json.dumps(content))


def titles(spec: Any) -> list[Any]:
    """Returns the titles of all axes of a specification."""
    if isinstance(spec, dict):
        own = [spec["axis"]["title"]] if spec.get("axis") else []
        return own + [title for value in spec.values() for title in titles(value)]
    return [title for value in spec for title in titles(value)] if isinstance(spec, list) else []


def test_every_axis_has_a_title_with_its_unit() -> None:
    for figure in figures(comparison()).values():
        for spec in (figure.spec, *figure.alternatives.values()):
            found = set(titles(spec["layer"]))
            assert found
            assert all(found), figure.id
    assert "training time without evaluation (s)" in titles(figures(comparison())["metric-seconds"].spec["layer"])
    assert "accuracy (%)" in titles(figures(comparison())["metric-steps"].spec["layer"])


def test_contenders_differ_in_more_than_colour() -> None:
    """Also with more methods and baselines than there are colours."""
    records = [run(shape, seed=0, steps=20) for shape in SHAPES]
    for i in range(16):
        records.append(run(SHAPES[(0, 1, 4, 5, 6, 7)[i % 6]], seed=0, steps=20))
        records[-1].name += f"+setting={i}"
    by_name = looks(summarize(records))
    assert len({(look.colour, tuple(look.dash), look.shape) for look in by_name.values()}) == 24
    dashes: dict[bool, set[tuple[int, ...]]] = {record.is_baseline: set() for record in records}
    for record in records:
        dashes[record.is_baseline].add(tuple(by_name[record.name].dash))
    assert not dashes[True] & dashes[False], "a baseline never has the line of a method"


def test_markers_are_where_something_was_measured() -> None:
    records = [run(SHAPES[0], seed, steps=100) for seed in (0, 1)]
    marked = [row["step"] for row in rows(figures(records)["metric-steps"], "ddp") if "tip" in row]
    assert marked == [point.step for point in records[0].points]


def test_bars_are_sorted_and_show_the_spread_over_seeds() -> None:
    bars = rows(figures(comparison())["to-target"])
    reached = [row for row in bars if row["value"] is not None]
    assert [row["value"] for row in reached] == sorted(row["value"] for row in reached)
    assert [row["text"] for row in bars[len(reached) :]] == ["not reached"] * 2  # none and none_averaged
    assert all(row["low"] < row["value"] < row["high"] for row in reached)
    times = [row["total"] for row in rows(figures(comparison())["step-time"])]
    assert times == sorted(times)


def test_a_target_that_needs_no_communication_is_marked_in_the_figure() -> None:
    assert "none reaches this target" in figures(comparison(), 0.6)["to-target"].note
    assert "reaches this target" not in figures(comparison(), 0.85)["to-target"].note


def test_the_pareto_plot() -> None:
    figure = figures(comparison())["metric-bytes"]
    front = figure.spec["datasets"]["front"]
    assert [point["x"] for point in front] == sorted(point["x"] for point in front)
    assert [point["value"] for point in front] == sorted(point["value"] for point in front)
    for final in figure.spec["datasets"]["finals"]:
        assert any(point["x"] <= final["x"] and point["value"] >= final["value"] for point in front)
    labels = {row["method"]: row for row in rows(figure, data="labels")}
    assert labels["none"]["x"] is None, "0 bytes have no place on a logarithmic axis: a horizontal line"
    assert labels["ddp"]["x"] is not None


def test_the_use_of_the_link_is_bytes_over_seconds() -> None:
    record = run(SHAPES[0], seed=0)
    times = ((10, 1.0, 5e6), (20, 3.0, 6e6), (30, 3.5, 6e6))
    record.points = [Point(step, seconds, 0.0, nic, {"loss": 1.0, "accuracy": 0.5}) for step, seconds, nic in times]
    figure = figures([record])["link-use"]
    assert [row["value"] for row in rows(figure)] == [40e6, 4e6, 0.0]
    assert "full rate of the link" in json.dumps(figure.spec)
    assert "background traffic" not in figure.note
    for point in record.points:
        point.nic_nbytes = point.nic_nbytes and 10 * point.nic_nbytes
    assert "background traffic went on" in figures([record])["link-use"].note
    record.link = "none"
    assert "full rate of the link" not in json.dumps(figures([record])["link-use"].spec)


def test_waiting_is_shown_for_each_worker() -> None:
    record = run(SHAPES[5], seed=0)
    figure = figures([record])["waiting"]
    expected = [pytest.approx(time.waiting, rel=1e-5) for time in record.worker_step_times]
    assert [(row["rank"], row["value"]) for row in rows(figure, data="points")] == list(enumerate(expected))
    assert "(rank 2)" in rows(figure)[0]["text"]
    record.worker_step_times = []  # of an older schema
    assert "waiting" not in figures([record])


def test_internals_are_folded_and_only_shown_if_they_vary() -> None:
    folded = {figure.title: figure for figure in figures(comparison()).values() if figure.folded}
    assert sorted(folded) == ["Period", "Residual norm", "Variance"]
    assert {row["method"] for row in rows(folded["Period"])} == {"adpsgd"}, "the period of divisible is constant"


def test_every_figure_says_how_it_was_measured() -> None:
    record = run(SHAPES[0], seed=0)
    assert provenance([record]) == "Measured with real processes on an emulated network, 100 Mbit/s"
    record.link = "none"
    assert provenance([record]) == "Measured with real processes on loopback"


@pytest.mark.parametrize("higher", [True, False])
def test_a_close_up_shows_the_end_of_all_lines_and_the_target(higher: bool) -> None:
    sign = 1 if higher else -1
    data: list[dict[str, Any]] = [
        {"method": name, "value": sign * value, "low": sign * value, "high": sign * value}
        for name, end in (("a", 0.88), ("b", 0.85))
        for value in (0.1, 0.5, end)
    ]
    whole = axis("", "count", [row["value"] for row in data], log=False)
    close = focused(whole, data, sign * 0.84, higher)
    assert close is not None
    assert all(close.low < sign * value < close.high for value in (0.88, 0.85, 0.84))
    assert not close.low < sign * 0.1 < close.high
    assert focused(whole, data, sign * 0.1, higher) is None


@pytest.mark.parametrize("places", [[], [5.0], [5.0] * 8, [0.0, 100.0, 100.0, 99.0], [50.0, 10.0, 12.0, 300.0]])
def test_labels_do_not_overlap(places: list[float]) -> None:
    moved = spread_out(places, distance=10, end=100)
    assert all(-1e-9 <= place <= 100 + 1e-9 for place in moved)
    ordered = sorted(moved)
    assert all(b - a >= 10 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert sorted(range(len(places)), key=lambda i: (places[i], moved[i])) == sorted(
        range(len(places)), key=lambda i: moved[i]
    )


def test_too_many_labels_share_the_room() -> None:
    assert sorted(spread_out([1.0, 1.0, 1.0], distance=10, end=10)) == [0.0, 5.0, 10.0]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 7e-5), (1e-9, 1e9), (3.0, 3.1), (-5.0, 5.0), (95.0, 1e7)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    scales = [linear_ticks(low, high, 1.0)] + ([log_ticks(low, high, 1.0)] if low > 0 and high > 2 * low else [])
    for ticks in scales:
        assert 2 <= len(ticks) <= 9
        assert ticks == sorted(set(ticks))
        assert all(low - 1e-9 * abs(high) <= tick <= high * (1 + 1e-9) for tick in ticks)


def test_an_axis_and_its_inverse() -> None:
    for one in (Axis("", "count", 2.0, 8.0), Axis("", "bytes", 1e3, 1e9, log=True)):
        assert one.value(one.share(5e3)) == pytest.approx(5e3)
        assert (one.share(one.low), one.share(one.high)) == (0, 1)
    label = Axis("sent", "bytes", 1e3, 1e9, log=True).vega()["axis"]["labelExpr"]
    assert re.findall(r"'( .B)'", label) == [" TB", " GB", " MB", " kB"]


def test_the_readme_picture_is_the_same_figure() -> None:
    pytest.importorskip("vl_convert", reason="needs vl-convert-python: pip install laconic[docs]")
    svg = pytest.importorskip("benchmarks.picture", reason="needs the repository").svg

    records = comparison()
    drawn = svg(figures(records)["metric-seconds"], records, width=860)
    for text in ("Measured with real processes on an emulated network, 100 Mbit/s.", "accuracy (%)", "none_averaged"):
        assert text in drawn
    assert "prefers-color-scheme:dark" in drawn


def test_pictures_have_names_that_fit() -> None:
    picture = pytest.importorskip("benchmarks.picture", reason="needs the repository")
    NAMES, renamed = picture.NAMES, picture.renamed
    assert max(map(len, NAMES.values())) <= LABEL_CHARACTERS
    assert len(set(NAMES.values())) == len(NAMES)
    records = renamed(comparison(), NAMES | {"local_sgd+period=8": "LocalSGD"})
    names = {label["method"] for label in figures(records)["metric-seconds"].spec["datasets"]["labels"]}
    assert {"PowerSGD", "LocalSGD", "ADPSGD", "none: one worker alone"} <= names
    assert "efficient_adam+bits=4" in names, "a contender without a name of its own keeps that of its runs"
    with pytest.raises(ValueError, match="ddp and powersgd are both called 'one'"):
        renamed(comparison(), {"ddp": "one", "powersgd": "one"})
