"""`laconic report`: draws the runs of one or several folders again."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from laconic import cli
from laconic.bench.join import common_target, join_runs
from laconic.bench.record import Record, RunsFile
from tests.bench.synthetic import SHAPES, run


def write(directory: Path, records: list[Record]) -> Path:
    directory.mkdir()
    for record in records:
        RunsFile(directory).append(record)
    return directory


def runs(*numbers: int, seeds: tuple[int, ...] = (0, 1)) -> list[Record]:
    return [run(SHAPES[number], seed, steps=40) for number in numbers for seed in seeds]


def report(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    monkeypatch.setattr(sys, "argv", ["laconic", "report", *shlex.split(line)])
    with pytest.raises(SystemExit) as done:
        cli.main()
    return int(done.value.code or 0)


def test_a_report_is_drawn_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = runs(0, 2, 4)
    for record in records:
        record.target = 0.5
    a = write(tmp_path / "a", records)
    assert report(monkeypatch, f"{a}") == 0
    assert "Time to 50 %" in (a / "index.html").read_text(), "the target is in the runs"
    assert "Time to 60 %" not in (a / "index.html").read_text()
    assert report(monkeypatch, f"{a} --target 0.6") == 0
    assert "Time to 60 %" in (a / "index.html").read_text()
    assert RunsFile(a).read() == records
    assert "report: " in capsys.readouterr().out


def test_folders_are_joined_into_a_new_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a, b, c = write(tmp_path / "a", runs(0, 4)), write(tmp_path / "b", runs(4, 5, seeds=(2,))), tmp_path / "c"
    assert report(monkeypatch, f"{a} {b} --out {c}") == 0
    assert RunsFile(c).read() == runs(0, 4) + runs(4, 5, seeds=(2,))
    page = (c / "index.html").read_text()
    assert all(f'data-name="{SHAPES[number].name}"' in page for number in (0, 4, 5))
    assert RunsFile(a).read() == runs(0, 4)
    assert not (a / "index.html").exists()


def test_runs_are_added_to_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", runs(0, 4)), write(tmp_path / "b", runs(5))
    for _ in range(2):  # the second time there is nothing new
        assert report(monkeypatch, f"{a} {b} --out {a}") == 0
        assert RunsFile(a).read() == runs(0, 4, 5)
        assert RunsFile(b).read() == runs(5)


def test_an_earlier_report_is_replaced_only_on_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = write(tmp_path / "a", runs(0)), write(tmp_path / "b", runs(5)), write(tmp_path / "c", runs(4))
    assert report(monkeypatch, f"{a} {b} --out {c}") == 2
    assert "already has runs" in capsys.readouterr().err
    assert RunsFile(c).read() == runs(4)
    assert report(monkeypatch, f"{a} {b} --out {c} --overwrite") == 0
    assert RunsFile(c).read() == runs(0, 5)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("years of work")
    assert report(monkeypatch, f"{a} {b} --out {tmp_path / 'foreign'} --overwrite") == 2
    assert "is not empty and has no runs.jsonl" in capsys.readouterr().err


def test_wrong_folders_and_files_are_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a", runs(0))
    files = {
        "text": ("a diary\n", "line 1 is not a run that laconic wrote"),
        "list": ("[]\n", "line 1 is not a run that laconic wrote (a run must have a schema from 1 to 5, not None)"),
        "fields": ('{"schema": 4}\n', "line 1 is not a run that laconic wrote ('points')"),
        "future": ('{"schema": 6}\n', "a schema from 1 to 5, not 6"),
        "cut": (RunsFile(a).path.read_text() + '{"name": "dd', "line 3 is not a run"),
        "empty": ("", "has no runs"),
    }
    for name, (text, _) in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "runs.jsonl").write_text(text)
    (tmp_path / "none").mkdir()
    expected = {str(tmp_path / name): message for name, (_, message) in files.items()}
    expected |= {
        "": "name at least one folder",
        str(tmp_path / "nowhere"): "nowhere does not exist",
        str(tmp_path / "none"): "has no runs.jsonl: give the --out folder",
        str(a / "runs.jsonl"): "is a file: give the --out folder",
        f"{a} {tmp_path / 'text'}": "several folders need --out",
        f"{a} --targt 0.5": "laconic: report has no option --targt",
    }
    for line, message in expected.items():
        assert report(monkeypatch, line) == 2, line
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_runs_that_differ_are_not_mixed(tmp_path: Path) -> None:
    slow = runs(0, seeds=(5,))
    slow[0].link = "10mbit"
    a, b, c = write(tmp_path / "a", runs(0)), write(tmp_path / "b", slow), write(tmp_path / "c", runs(0, seeds=(1,)))
    with pytest.raises(ValueError, match=r"ddp was run with link '100mbit' in .*a and '10mbit' in .*b"):
        join_runs([a, b])
    assert join_runs([a, c]) == runs(0), "the same run in two folders counts once"
    other = runs(0, seeds=(1,))
    other[0].seconds += 1
    d = write(tmp_path / "d", other)
    with pytest.raises(ValueError, match=r"ddp with seed 1 is in .*a and, with other results, in .*d"):
        join_runs([a, d])


def test_runs_with_different_targets_need_a_choice() -> None:
    records = runs(0)
    assert common_target(records) is None
    records[0].target = 0.5
    assert common_target(records) == 0.5
    records[1].target = 0.6
    with pytest.raises(ValueError, match=r"different targets \(0.5, 0.6\): choose one with --target"):
        common_target(records)
