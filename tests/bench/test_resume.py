"""A comparison that was interrupted continues with the runs that are missing."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laconic import cli
from laconic.bench import compare
from laconic.bench.record import Record, RunsFile
from laconic.bench.run import Plan, new_record
from laconic.bench.strategies import Contender
from tests.bench import synthetic

LINE = "compare --methods none,ddp,powersgd --task digits --model mlp --workers 2 --steps 40 --evaluations 4 --seeds 2"


class FakeRuns:
    """Takes the place of real runs: results depend on contender and seed only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, int]] = []
        self.interrupt_at: int | None = None
        self.fail_at: int | None = None
        monkeypatch.setattr(compare, "run", self)

    def __call__(self, contender: Contender, plan: Plan, progress: Path | None = None) -> Record:
        if self.interrupt_at == len(self.made):
            raise KeyboardInterrupt
        self.made.append((contender.label, plan.seed))
        shape = next(shape for shape in synthetic.SHAPES if shape.name == contender.label)
        like = synthetic.run(shape, plan.seed, plan.steps)
        measured = ("seconds", "step_time", "payload_nbytes_per_step", "nic_nbytes_per_step", "train_loss")
        record = dataclasses.replace(
            new_record(contender, plan), points=like.points[1:], **{name: getattr(like, name) for name in measured}
        )
        return synthetic.failed(record, "lost") if self.fail_at == len(self.made) else record


def table_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("│", "┃"))]


def test_interrupt_then_resume_gives_the_same_table(monkeypatch, capsys, tmp_path: Path) -> None:
    runs = FakeRuns(monkeypatch)
    assert cli.call([*LINE.split(), "--target", "accuracy=75", "--out", str(tmp_path / "whole")]) == 0
    whole, made = table_of(capsys.readouterr().out), runs.made
    assert len(made) == 6
    line = [*LINE.split(), "--target", "accuracy=75", "--out", str(tmp_path / "parts")]
    monkeypatch.setattr("sys.argv", ["laconic", *line])
    runs.made, runs.interrupt_at = [], 4
    assert cli.call(line) == 130
    error = capsys.readouterr().err
    assert error == f"laconic: interrupted; resume with: {shlex.join(['laconic', *line])} --resume\n"
    runs.made, runs.interrupt_at = [], None
    assert cli.call([*line, "--resume"]) == 0
    assert runs.made == made[4:], "complete runs are not made again"
    assert table_of(capsys.readouterr().out) == whole
    assert RunsFile(tmp_path / "parts").read() == [
        dataclasses.replace(record, command=other.command, date=other.date)
        for record, other in zip(RunsFile(tmp_path / "whole").read(), RunsFile(tmp_path / "parts").read(), strict=True)
    ]


def test_failed_runs_are_made_again(monkeypatch, tmp_path: Path) -> None:
    runs = FakeRuns(monkeypatch)
    runs.fail_at = 2
    line = [*LINE.split(), "--out", str(tmp_path)]
    assert cli.call(line) == 1
    runs.made, runs.fail_at = [], None
    assert cli.call([*line, "--resume"]) == 0
    assert runs.made == [("ddp", 0)]
    assert [record.status for record in RunsFile(tmp_path).read()] == ["ok"] * 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--steps 80", "a run of none with steps 40, not 80"),
        ("--lr 1", "a run of none with task_settings lr=0.002, not 1.0"),
        ("--workers 4", "a run of none with workers 2, not 4"),
        ("--link 1gbit", "a run of none with link 'none', not '1gbit'"),
        ("--evaluations 8", "a run of none with evaluations 4, not 8"),
    ],
)
def test_runs_with_other_settings_are_not_mixed(monkeypatch, capsys, tmp_path: Path, change: str, message: str) -> None:
    runs = FakeRuns(monkeypatch)
    line = [*LINE.split(), "--out", str(tmp_path)]
    assert cli.call(line) == 0
    before, runs.made = (tmp_path / "runs.jsonl").read_bytes(), []
    assert cli.call([*line, *change.split(), "--resume"]) == 2
    assert message in capsys.readouterr().err
    assert runs.made == []
    assert (tmp_path / "runs.jsonl").read_bytes() == before


def test_ctrl_c_prints_no_traceback_and_the_command_that_resumes(monkeypatch, tmp_path: Path) -> None:
    line = "compare --methods none,local_sgd,qsgd --workers 2 --steps 12 --model mlp --out out"
    with subprocess.Popen(
        [sys.executable, "-m", "laconic", *line.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        deadline = time.monotonic() + 100
        while not (tmp_path / "out" / "runs.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to every process of the command
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert error == f"laconic: interrupted; resume with: laconic {line} --resume\n"
    monkeypatch.chdir(tmp_path)
    first = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    assert cli.call([*line.split(), "--resume"]) == 0
    lines = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    assert lines[: len(first)] == first
    assert [record.name for record in RunsFile(tmp_path / "out").read()] == ["none", "local_sgd", "qsgd"]
