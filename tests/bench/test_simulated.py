"""Tests simulated runs of a comparison: the record and the report say that they are simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.bench.report import write_report
from laconic.bench.run import Plan, run
from laconic.bench.simulated import measure_compute
from laconic.bench.strategies import parse_contender
from laconic.tasks import Digits

PLAN = Plan(Digits(model="mlp"), workers=16, steps=8, link="100mbit+50ms", evaluations=2, simulated=0.02)


def test_a_simulated_run_has_virtual_seconds_and_its_report_says_so(tmp_path: Path) -> None:
    records = [run(parse_contender(name), PLAN) for name in ("allreduce", "local_sgd+period=4")]
    assert [record.status for record in records] == ["ok", "ok"]
    allreduce, local = records
    assert allreduce.link == "simulated 100mbit+50ms"
    # 2 rounds of 50 ms a step, or up to 60 where the gradient is longer than 64 KiB.
    assert allreduce.step_time is not None
    assert local.step_time is not None
    assert allreduce.step_time.total > 0.22
    assert allreduce.step_time.compute == pytest.approx(0.02)
    assert local.seconds < allreduce.seconds / 2
    write_report(records, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Simulated in one process, not measured" in page
    assert "simulated 100 Mbit/s with 50 ms delay" in page
    assert "Measured with real processes" not in page


def test_a_baseline_and_a_missing_link_are_rejected() -> None:
    with pytest.raises(ValueError, match="ddp must be a method of laconic to be simulated"):
        run(parse_contender("ddp"), PLAN)
    with pytest.raises(ValueError, match="a simulation needs a link"):
        run(parse_contender("allreduce"), Plan(Digits(model="mlp"), workers=2, steps=2, simulated=0.1))


def test_the_compute_time_can_be_measured() -> None:
    assert 0 < measure_compute(PLAN) < 10
