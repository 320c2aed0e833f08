"""The report's page in a real browser: offline, wide and narrow, light and dark, printed, saved."""

from __future__ import annotations

import csv
import io
import math
import re
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from laconic.bench.record import Record
from laconic.bench.report import write_report
from laconic.bench.summary import summarize
from tests.bench import chromium
from tests.bench.synthetic import SHAPES, comparison, failed
from tests.bench.test_report import HOSTILE, runs_of

NAMES = [shape.name for shape in SHAPES]
COMMUNICATING = [name for name in NAMES if not name.startswith("none")]


def show(
    browser: chromium.Chromium, directory: Path, records: list[Record], target: float | None = 0.85, **look: Any
) -> chromium.Page:
    path = directory / "index.html"
    write_report(records, path, target)
    page = browser.open(path.as_uri(), **look)
    wait_until(page, "document.documentElement.dataset.drawn === 'yes'")
    return page


def wait_until(page: chromium.Page, condition: str) -> None:
    deadline = time.monotonic() + chromium.TIMEOUT_SECONDS
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"the page never came to: {condition}; {page.problems()}"


def drawn(page: chromium.Page) -> dict[str, list[str]]:
    """Returns, for each figure, the names that are visible: as labels of lines, names of rows, or keys below."""
    found = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#charts figure')].map(f => [f.id, [...new Set("
        "[...f.querySelectorAll('svg.marks text, .keys li')].filter(e => e.getBoundingClientRect().height > 5)"
        ".map(e => e.textContent))]]))"
    )
    return {id: [name for name in NAMES if name in texts] for id, texts in found.items()}


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Texts of a figure that stick out of its drawing, and pairs of texts that overlap. The text of a target is drawn twice,
# the first time as its white outline.
CLIPPED = """[...document.querySelectorAll('svg.marks text')].filter(e => {
  const own = e.getBoundingClientRect(), all = e.closest('svg').getBoundingClientRect();
  return own.width && (own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 1
    || own.bottom > all.bottom + 1 || own.left < 0 || own.right > innerWidth);
}).map(e => e.closest('figure').id + ': ' + e.textContent)"""
OVERLAPPING = """[...document.querySelectorAll('svg.marks')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].filter(e => getComputedStyle(e).opacity > 0)
    .map(e => [e.textContent, e.getBoundingClientRect()]).filter(([_, box]) => box.width);
  return texts.flatMap(([a, p], i) => texts.slice(i + 1).filter(([b, q]) => a !== b && p.left < q.right - 2
    && q.left < p.right - 2 && p.top < q.bottom - 3 && q.top < p.bottom - 3)
    .map(([b]) => svg.closest('figure').id + ': ' + a + ' / ' + b));
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_page_works_at_each_width(browser: chromium.Chromium, tmp_path: Path, width: int, scheme: str) -> None:
    page = show(browser, tmp_path, comparison(), width=width, scheme=scheme)
    figures = drawn(page)
    everywhere = {
        "metric-seconds",
        "to-target",
        "metric-bytes",
        "metric-steps",
        "step-time",
        "step-bytes",
        "train-loss",
    }
    assert {id for id, names in figures.items() if names == NAMES} == everywhere
    assert figures["link-use"] == COMMUNICATING
    assert figures["waiting"] == [name for name in COMMUNICATING if name != "powersgd"]  # it does not measure that
    assert page.evaluate(OVERFLOW) == 0
    assert page.evaluate(CLIPPED) == []
    assert page.evaluate(OVERLAPPING) == []
    background, text = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor,"
        "getComputedStyle(document.querySelector('#metric-seconds .mark-text.role-axis-label text')).fill]"
    )
    assert (brightness(background) > 382) == (scheme == "light")
    assert (brightness(text) > 382) == (scheme == "dark")
    sources = page.evaluate("[...document.querySelectorAll('figure')].map(f => f.querySelector('.source').textContent)")
    assert set(sources) == {"Measured with real processes on an emulated network, 100 Mbit/s"}
    assert page.problems() == []
    assert page.requests() == [(tmp_path / "index.html").as_uri()]
    page.close()


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_the_legend_controls_all_figures(browser: chromium.Chromium, tmp_path: Path) -> None:
    page = show(browser, tmp_path, comparison())
    before = drawn(page)
    button = ".legend [data-name=adpsgd]"
    page.click(button)
    assert page.evaluate(f"document.querySelector('{button}').getAttribute('aria-pressed')") == "false"
    assert drawn(page) == {id: [name for name in names if name != "adpsgd"] for id, names in before.items()}
    page.click(button)
    assert drawn(page) == before
    for k in range(len(NAMES)):
        page.click(f".legend button:nth-child({k + 1})")
    assert not any(drawn(page).values())
    page.click(".legend .all")
    assert drawn(page) == before
    assert page.problems() == []
    page.close()


def test_internals_are_drawn_when_they_are_unfolded(browser: chromium.Chromium, tmp_path: Path) -> None:
    page = show(browser, tmp_path, comparison())
    internals = {id for id in drawn(page) if id.startswith("internal-")}
    assert len(internals) == 3
    assert not any(drawn(page)[id] for id in internals)
    page.click(".internals summary")
    wait_until(page, "document.querySelectorAll('.internals svg.marks').length === 3")
    assert sorted(drawn(page)[id] for id in internals) == [["adpsgd"], ["adpsgd"], ["divisible+ratio=1024"]]
    assert page.evaluate(CLIPPED) == []
    assert page.problems() == []
    page.close()


def test_a_figure_can_show_its_whole_range(browser: chromium.Chromium, tmp_path: Path) -> None:
    page = show(browser, tmp_path, comparison())
    labels = "[...document.querySelectorAll('#metric-seconds .role-axis-label text')].map(t => t.textContent)"
    assert "20" not in page.evaluate(labels)[-8:]
    page.click("#metric-seconds .option")
    assert "20" in page.evaluate(labels)[-8:]
    page.click("#metric-seconds .option")
    assert "20" not in page.evaluate(labels)[-8:]
    page.resize(400)
    assert page.evaluate("document.querySelector('#metric-seconds svg').getBoundingClientRect().width") < 400
    assert page.problems() == []
    page.close()


def test_the_pointer_shows_values(browser: chromium.Chromium, tmp_path: Path) -> None:
    page = show(browser, tmp_path, comparison())
    x, y = page.evaluate(
        "(() => { const marks = [...document.querySelectorAll('#metric-seconds .mark-symbol path')];"
        "const last = marks.find(e => e.__data__.datum.method === 'ddp' && e.__data__.datum.step === 400);"
        "const b = last.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    page.move_to(x, y)
    tip = page.evaluate("document.querySelector('.tip').innerText")
    assert tip.startswith("ddp\naccuracy 88.")
    assert "400 steps" in tip
    page.move_to(2, 2)
    assert page.evaluate("document.querySelector('.tip')") is None
    page.close()


def saved(browser: chromium.Chromium, page: chromium.Page, selector: str, path: Path) -> str:
    """Clicks a button and returns the text of the file that the page saves."""
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(path.parent))
    page.click(selector)
    deadline = time.monotonic() + chromium.TIMEOUT_SECONDS
    while not (path.exists() and path.stat().st_size):  # it is there, and empty, before it is written
        assert time.monotonic() < deadline, f"the page did not save {path.name}; {page.problems()}"
        time.sleep(0.05)
    return path.read_bytes().decode()


def test_figures_and_table_are_saved(browser: chromium.Chromium, tmp_path: Path) -> None:
    records = comparison()
    for record in records:
        if record.name == "adpsgd":
            record.name = 'a "quoted", name'
    page = show(browser, tmp_path, records)
    text = saved(browser, page, "#metric-seconds .save", tmp_path / "metric-seconds.csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == [
        "method", "step", "seconds", "payload_nbytes", "accuracy", "accuracy_lowest_seed", "accuracy_highest_seed",
    ]  # fmt: skip
    for summary in summarize(records):
        curve = summary.curve(lambda point: point.values["accuracy"])
        own = [row for row in rows if row["method"] == summary.name and int(row["step"]) > 0]
        assert [int(row["step"]) for row in own] == curve.steps[1:]  # seconds 0: not on a logarithmic axis
        assert [float(row["accuracy"]) for row in own] == pytest.approx(curve.mean[1:], rel=1e-5)
        assert [float(row["accuracy_lowest_seed"]) for row in own] == pytest.approx(curve.low[1:], rel=1e-5)
    table = saved(browser, page, ".save-table", tmp_path / "laconic.csv")
    figures = {row["method"]: row for row in csv.DictReader(io.StringIO(table))}
    assert list(figures) == [summary.name for summary in summarize(records)]
    assert figures["none"]["seconds_to_target"] == ""
    assert float(figures["ddp"]["total_seconds_per_step"]) == pytest.approx(1.038, rel=0.05)
    waits = saved(browser, page, "#waiting .save", tmp_path / "waiting.csv")
    assert waits.startswith("method,rank,waiting_seconds\r\nddp,0,0.8")
    drawing = saved(browser, page, "#to-target .save:last-child", tmp_path / "to-target.svg")
    assert xml.etree.ElementTree.fromstring(drawing).tag.endswith("svg")
    assert page.problems() == []
    page.close()


def test_the_page_prints_on_white_with_labels(browser: chromium.Chromium, tmp_path: Path) -> None:
    page = show(browser, tmp_path, comparison(), scheme="dark", width=760)
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    page.call("Emulation.setEmulatedMedia", media="print", features=[dark])
    assert brightness(page.evaluate("getComputedStyle(document.body).backgroundColor")) > 700
    fill = "getComputedStyle(document.querySelector('#metric-seconds .role-axis-label text')).fill"
    assert brightness(page.evaluate(fill)) < 382
    hidden = "[...document.querySelectorAll('.options, .copy')].every(e => getComputedStyle(e).display === 'none')"
    assert page.evaluate(hidden)
    assert page.call("Page.printToPDF")["data"].startswith("JVBERi")  # %PDF-
    assert page.evaluate(CLIPPED) == []
    assert page.problems() == []
    page.close()


def test_the_command_can_be_copied(browser: chromium.Chromium, tmp_path: Path) -> None:
    records = comparison()
    page = show(browser, tmp_path, records)
    page.click(".copy")
    assert page.evaluate("document.querySelector('.copy').textContent") == "Copied"
    assert page.evaluate("getSelection().toString().trim()") == records[0].command
    page.close()


def unusual_runs() -> dict[str, tuple[list[Record], float | None]]:
    diverged = runs_of("ddp", "adpsgd")
    for point in diverged[-1].points[20:]:
        point.values["accuracy"] = point.method_metrics["variance"] = math.nan
    rising = runs_of("ddp", "adpsgd", "none")
    for record in rising:
        record.metric, record.higher_is_better = "loss", False
    long = runs_of("ddp", "adpsgd")
    for record in long:
        record.name += "+setting=" + "0123456789" * 12
        record.command += " --out /" + "a" * 300
        record.link = "100mbit,10mbit+20ms+1%,1gbit,100mbit"
    hostile = runs_of("ddp", "adpsgd")
    for record in hostile:
        record.name += HOSTILE
    tiny = runs_of("ddp", "adpsgd")
    for record in tiny:
        record.metric, record.higher_is_better = "excess_loss", False
        for point in record.points:
            point.values["excess_loss"] = 10 ** (-point.step / 50)
            point.method_metrics["nearly_constant"] = 1 + point.step * 1e-9
    loopback = runs_of("ddp")[:1]
    loopback[0].link, loopback[0].nic_nbytes_per_step, loopback[0].step_time = "none", None, None
    loopback[0].points = loopback[0].points[:1]
    return {
        "all failed": ([failed(record, "died") for record in runs_of("ddp")], 0.85),
        "no target": (comparison(), None),
        "not a number": (diverged, 0.85),
        "falling metric": (rising, 0.6),
        "tiny values": (tiny, 0.0),
        "target far above": (runs_of("ddp", "adpsgd", steps=20), 0.999),
        "long names": (long, 0.85),
        "hostile names": (hostile, 0.85),
        "one run, one point": (loopback, 0.85),
    }


@pytest.mark.parametrize("kind", list(unusual_runs()))
def test_unusual_runs_make_a_complete_page(browser: chromium.Chromium, tmp_path: Path, kind: str) -> None:
    records, target = unusual_runs()[kind]
    page = show(browser, tmp_path, records, target, width=400)
    assert page.evaluate(OVERFLOW) == 0
    page.resize(1280)
    assert page.evaluate(OVERFLOW) == 0
    assert page.evaluate(CLIPPED) == []
    names = {record.name for record in records if record.status == "ok"}
    assert page.evaluate(
        "[...document.querySelectorAll('.legend [data-name]')].map(e => e.dataset.name).sort()"
    ) == sorted(names)
    page.evaluate("document.querySelectorAll('details').forEach(folded => { folded.open = true; })")
    for _ in range(3):  # initially, with every option changed, and changed back
        assert page.evaluate("document.getElementById('charts').outerHTML.match(/NaN|Infinity|undefined/)") is None
        page.evaluate("document.querySelectorAll('.option').forEach(button => button.click())")
    assert page.evaluate("document.title").startswith("laconic: ")
    assert page.problems() == []
    page.close()
