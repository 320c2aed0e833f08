"""The report: its text for given runs, and that its page works in a real browser, offline, wide and narrow."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from laconic.bench.headline import headline
from laconic.bench.record import Record
from laconic.bench.report import render, write_report
from laconic.bench.summary import curve_of, spread, summarize
from laconic.bench.units import link_text, metric_text, nbytes_text, number_text, seconds_text
from tests.bench import chromium
from tests.bench.synthetic import SEEDS, SHAPES, comparison, failed, run

NAMES = [shape.name for shape in SHAPES]
HOSTILE = "</script><img src=x onerror=\"document.title='broken'\">&amp;"


def runs_of(*names: str, steps: int = 400) -> list[Record]:
    return [run(shape, seed, steps) for shape in SHAPES if shape.name in names for seed in SEEDS]


def sentence(records: list[Record], target: float | None) -> str:
    result = headline(summarize(records), target)
    return " ".join([result.sentence, *result.details])


# --- numbers


@pytest.mark.parametrize(
    ("formatted", "text"),
    [
        (seconds_text(0), "0 s"),
        (seconds_text(4e-5), "40 µs"),
        (seconds_text(0.0341), "34.1 ms"),
        (seconds_text(0.9996), "1 s"),
        (seconds_text(41.23), "41.2 s"),
        (seconds_text(620), "10 min 20 s"),
        (seconds_text(7260), "2 h 1 min"),
        (seconds_text(None), "–"),
        (nbytes_text(0), "0 B"),
        (nbytes_text(999.6), "1 kB"),
        (nbytes_text(86_000), "86 kB"),
        (nbytes_text(11_200_000), "11.2 MB"),
        (nbytes_text(3e15), "3,000 TB"),
        (number_text(1234567), "1,234,567"),
        (number_text(0.00001234), "1.23e-5"),
        (number_text(math.nan), "not finite"),
        (metric_text("accuracy", 0.85), "85 %"),
        (metric_text("bleu", 27.34), "27.3"),
        (link_text("none"), "loopback"),
        (link_text("100mbit,100mbit"), "100 Mbit/s"),
        (link_text("100mbit,2.5gbit+20ms+1%"), "100 Mbit/s, 2.5 Gbit/s with 20 ms delay and 1 % loss"),
    ],
)
def test_formatting_of_numbers(formatted: str, text: str) -> None:
    assert formatted == text


def test_spread_is_the_sample_standard_deviation() -> None:
    assert spread([]) is None
    alone, three = spread([2.0]), spread([1.0, 2.0, 3.0])
    assert alone is not None
    assert alone.deviation is None
    assert three is not None
    assert (three.mean, three.deviation) == (2.0, 1.0)


def test_curves_have_the_steps_that_all_seeds_have() -> None:
    curve = curve_of([[(0, 1.0), (10, 2.0), (20, 9.0)], [(0, 3.0), (10, 6.0)]])
    assert (curve.steps, curve.mean, curve.low, curve.high) == ([0, 10], [2.0, 4.0], [1.0, 2.0], [3.0, 6.0])


def test_long_curves_are_thinned_out_and_keep_their_ends() -> None:
    curve = curve_of([[(step, float(step)) for step in range(100_001)]])
    assert len(curve.steps) < 500
    assert (curve.steps[0], curve.steps[-1]) == (0, 100_000)


# --- the headline


def test_headline_compares_the_best_method_with_ddp() -> None:
    records = comparison()
    mean = {s.name: cost for s in summarize(records) if (cost := s.to_target(0.85))}
    best, ddp = mean["divisible+ratio=1024"], mean["ddp"]
    expected = f"At 100 Mbit/s, divisible+ratio=1024 reaches 85 % in {seconds_text(best.seconds)} where DDP takes "
    assert sentence(records, 0.85).startswith(expected + seconds_text(ddp.seconds))


def test_headline_says_when_a_baseline_is_faster() -> None:
    text = sentence(runs_of("ddp", "powersgd", "local_sgd+period=8"), 0.85)
    assert "local_sgd+period=8 reaches" in text
    assert "The baseline powersgd is faster still" in text


def test_headline_says_when_ddp_misses_the_target() -> None:
    text = sentence(runs_of("divisible+ratio=1024") + runs_of("ddp", steps=50), 0.85)
    assert re.search(r"divisible\+ratio=1024 reaches 85 % in .*; DDP does not reach it", text)


def test_headline_says_when_no_target_is_reached() -> None:
    text = sentence(comparison(), 0.99)
    assert "no method reaches 99 % in 400 steps" in text
    assert "ddp" in text or "DDP" in text  # it ends nearest


def test_headline_counts_a_target_that_some_seeds_miss_as_missed() -> None:
    records = runs_of("adpsgd")
    for point in records[0].points:
        point.values["accuracy"] = 0.5
    assert "no method reaches 85 % with all of its seeds" in sentence(records, 0.85)


def test_headline_without_target_without_ddp_without_runs() -> None:
    assert "No target was given" in sentence(comparison(), None)
    assert "where DDP takes" in sentence(comparison(), None)
    assert "There is no DDP run to compare with." in sentence(runs_of("adpsgd", "local_sgd+period=8"), 0.85)
    assert "There is no DDP run to compare with." in sentence(runs_of("adpsgd"), None)
    assert "All runs failed" in sentence([failed(record, "died") for record in runs_of("ddp")], 0.85)
    assert "only training without communication" in sentence(runs_of("none", "none_averaged"), 0.8)


SPEED_UP = re.compile(r"faster|slower|×")


def test_no_speed_up_to_a_target_that_one_worker_reaches_alone() -> None:
    text = sentence(comparison(), 0.6)
    assert "60 % does not show what communication buys: none (one worker alone) reaches it in" in text
    assert not SPEED_UP.search(text)
    assert not SPEED_UP.search(re.sub(r".*<tbody>|</tbody>.*", "", render(comparison(), 0.6), flags=re.DOTALL))
    assert "No speed-up is shown: the target is reached without communication." in render(comparison(), 0.6)
    assert "does not show" not in sentence(comparison(), 0.85)
    assert SPEED_UP.search(sentence(comparison(), 0.85))


def test_no_speed_up_to_a_target_that_an_average_without_communication_reaches() -> None:
    """One seed is enough: the target is then within reach of workers that never communicate."""
    records = runs_of("ddp", "none", "none_averaged", "adpsgd")
    assert SPEED_UP.search(sentence(records, 0.85))
    next(r for r in records if r.method == "none_averaged").points[-1].values["accuracy"] = 0.851
    text = sentence(records, 0.85)
    assert "85 % does not show what communication buys: none_averaged (workers that never communicate, " in text
    assert "DDP at 88" in text
    assert not SPEED_UP.search(text)


def test_headline_of_a_target_met_before_training() -> None:
    assert "met before any training" in sentence(runs_of("ddp", "adpsgd"), 0.05)


def test_headline_for_a_metric_that_decreases() -> None:
    records = runs_of("ddp", "adpsgd")
    for record in records:
        record.metric, record.higher_is_better = "loss", False
    assert "adpsgd reaches a loss of 0.6 in" in sentence(records, 0.6)
    assert "no method reaches a loss of 0.1" in sentence(records, 0.1)


# --- the page as text


def test_page_loads_nothing_and_stays_small() -> None:
    page = render(comparison(), 0.85)
    assert len(page.encode()) < 200_000
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "default-src 'none'" in page


def test_page_has_the_figures_the_failures_and_the_command() -> None:
    records = comparison()
    page = render(records, 0.85)
    for name in NAMES:
        assert f'data-name="{name}"' in page
    assert "not reached" in page  # `none`
    assert "2 of 3 seeds" in page
    assert "rank 2 died: &lt;signal 9&gt; (killed) at step 118; the others stopped &amp; left" in page
    assert "1 of 24 runs failed" in page
    assert records[0].command in page
    assert "1,863,690" in page


def test_text_from_runs_is_escaped() -> None:
    records = runs_of("ddp", "adpsgd")
    for record in records:
        record.command = record.machine = record.task = record.date = HOSTILE
        record.name += HOSTILE
        record.settings = record.versions = {HOSTILE: HOSTILE}
        record.task_settings = {HOSTILE: HOSTILE}
    failed(records[0], HOSTILE)
    page = render(records, 0.85)
    assert "<img" not in page
    assert page.count("</script>") == 2
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["methods"][0]["name"] == "ddp" + HOSTILE


def test_the_page_warns_of_runs_that_differ() -> None:
    records = runs_of("ddp", "adpsgd")
    records[0].workers = 8
    assert "These runs differ in workers: 8; 4." in render(records)


def test_the_page_warns_of_values_that_are_not_finite() -> None:
    records = runs_of("adpsgd")
    assert "not finite" not in render(records, 0.85)
    records[1].points[-1].values["accuracy"] = math.nan
    assert "adpsgd, seed 1: at some step its accuracy is not finite." in render(records, 0.85)


def test_runs_of_two_tasks_are_rejected() -> None:
    records = runs_of("ddp")
    records[0].task = "digits"
    with pytest.raises(ValueError, match=r"same task, not \['digits', 'fashion'\]"):
        render(records)
    with pytest.raises(ValueError, match="at least one run, not 0"):
        render([])


def test_a_page_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.html"
    write_report(runs_of("ddp"), path)
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(comparison(), path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["index.html"]


# --- the page in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Chromium]:
    executable = chromium.find()
    if executable is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with chromium.Chromium(executable, tmp_path_factory.mktemp("profile")) as running:
        yield running


def show(
    browser: chromium.Chromium, directory: Path, records: list[Record], target: float | None = 0.85, **look: object
) -> chromium.Page:
    path = directory / "index.html"
    write_report(records, path, target)
    return browser.open(path.as_uri(), **look)


def drawn(page: chromium.Page) -> dict[str, list[str]]:
    """Returns, for each chart, the names that are visible on the screen."""
    return dict(
        page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('#charts figure')].map(f => [f.id,"
            "[...f.querySelectorAll('[data-name]')].filter(e => e.getBoundingClientRect().height > 5)"
            ".map(e => e.dataset.name)]))"
        )
    )


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_page_works_at_each_width(browser: chromium.Chromium, tmp_path: Path, width: int, scheme: str) -> None:
    page = show(browser, tmp_path, comparison(), width=width, scheme=scheme)
    charts = drawn(page)
    everywhere = {"metric-seconds", "to-target", "metric-steps", "step-time", "step-bytes", "train-loss"}
    assert {chart for chart, names in charts.items() if sorted(names) == sorted(NAMES)} == everywhere
    assert sorted(charts["metric-bytes"]) == sorted(
        set(NAMES) - {"none", "none_averaged"}
    )  # 0 bytes: not on a log scale
    assert sorted(names for chart, names in charts.items() if chart.startswith("metric-of-method-")) == [
        ["adpsgd"],
        ["adpsgd", "divisible+ratio=1024"],
        ["divisible+ratio=1024"],
    ]
    assert page.evaluate(OVERFLOW) == 0
    outside = (
        "[...document.querySelectorAll('figure, figure svg text, .bar, section, h1, .facts li')].filter(e => {"
        "const b = e.getBoundingClientRect(); return b.left < 0 || b.right > innerWidth + 0.5; }).length"
    )
    assert page.evaluate(outside) == 0
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) > 382) == (scheme == "light")
    assert page.problems() == []
    assert page.requests() == [(tmp_path / "index.html").as_uri()]
    page.close()


def test_the_legend_controls_all_charts(browser: chromium.Chromium, tmp_path: Path) -> None:
    page = show(browser, tmp_path, comparison())
    before = drawn(page)
    button = f".legend button:nth-child({NAMES.index('adpsgd') + 1})"
    page.click(button)
    assert page.evaluate(f"document.querySelector('{button}').getAttribute('aria-pressed')") == "false"
    assert drawn(page) == {chart: [name for name in names if name != "adpsgd"] for chart, names in before.items()}
    page.click(button)
    assert drawn(page) == before
    for k in range(len(NAMES)):
        page.click(f".legend button:nth-child({k + 1})")
    assert not any(drawn(page).values())
    page.click(".legend .all")
    assert drawn(page) == before
    assert page.problems() == []
    page.close()


def test_options_change_the_scales(browser: chromium.Chromium, tmp_path: Path) -> None:
    page = show(browser, tmp_path, comparison())
    labels = "[...document.querySelectorAll('#metric-seconds svg text')].map(t => t.textContent)"
    seen = [page.evaluate(labels)]
    for k in (1, 2):  # log time, close-up
        page.click(f"#metric-seconds .option:nth-child({k})")
        seen.append(page.evaluate(labels))
    assert "0 s" not in seen[0]
    assert "0 s" in seen[1]
    assert "60 %" in seen[1]
    assert "60 %" not in seen[2]
    page.resize(400)
    assert page.evaluate("document.querySelector('#metric-seconds svg').getBoundingClientRect().width") < 400
    assert page.problems() == []
    page.close()


def test_the_pointer_shows_values(browser: chromium.Chromium, tmp_path: Path) -> None:
    page = show(browser, tmp_path, comparison())
    x, y = page.evaluate(
        "(() => { const b = document.querySelector('#metric-seconds [data-name=ddp] .end').getBoundingClientRect();"
        "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    page.move_to(x, y)
    tip = page.evaluate("document.querySelector('#metric-seconds .tip').innerText")
    assert tip.startswith("ddp\naccuracy 88.")
    assert "400 steps" in tip
    page.move_to(2, 2)
    assert page.evaluate("document.querySelector('.tip')") is None
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
    names = {record.name for record in records if record.status == "ok"}
    assert page.evaluate("[...document.querySelectorAll('.legend button:not(.all)')].length") == len(names)
    for _ in range(3):  # initially, with every option changed, and changed back
        assert page.evaluate("document.getElementById('charts').outerHTML.match(/NaN|Infinity|undefined/)") is None
        page.evaluate("document.querySelectorAll('.option').forEach(button => button.click())")
    assert page.evaluate("document.title").startswith("laconic: ")
    assert page.problems() == []
    page.close()
