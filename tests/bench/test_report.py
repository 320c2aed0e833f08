"""The report: its text for given runs. Its page in a browser is tested in test_report_page.py."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest

from laconic.bench.headline import headline
from laconic.bench.record import Record
from laconic.bench.report import render, write_report
from laconic.bench.summary import curve_of, spread, summarize
from laconic.bench.units import link_text, metric_text, nbytes_text, number_text, seconds_text
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
    assert len(page.encode()) < 1_500_000
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
    assert page.count("</script>") == 4
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    rows = json.loads(data[1])["figures"]["list"][0]["spec"]["datasets"]["rows"]
    assert {row["method"] for row in rows} == {"ddp" + HOSTILE, "adpsgd" + HOSTILE}


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
