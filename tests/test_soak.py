"""Tests the soak itself: a few faults are all right, and planted defects of a method are found."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from soak.episode import Runner
from soak.judge import REQUIRED, Record
from soak.names import accused
from soak.plan import FATAL, HARMLESS, STEPS, Attempt, Episode, Fault, make_episode
from soak.rows import ROWS
from soak.summary import summarize

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="the soak mounts file systems, so it needs root and Linux"
)


def episode_of(*attempts: tuple[Fault, ...]) -> Episode:
    """Returns an episode of AllReduce on 3 ranks over loopback, with these faults in its attempts."""
    return Episode(0, 0, "allreduce", False, tuple(Attempt(3, 1.5, "launcher", faults) for faults in attempts))


@needs_root
def test_a_few_faults_and_planted_defects(tmp_path: Path) -> None:
    slow = Fault(0, "slow", 1, 3, seconds=0.05)
    kill = Fault(1, "kill_in", 2, 9, phase="save", point="meeting", amount=1)
    full = Fault(2, "disk_full_on_one", 0, 17, phase="save")
    with Runner(tmp_path, 0, patience=0.5) as runner:
        lines = runner.run(episode_of((slow, kill), (full,)))
        assert [(line["fault"], line["verdict"]) for line in lines] == [
            ("slow", "ok"),
            ("kill_in", "ok"),
            ("disk_full_on_one", "ok"),
        ]
        assert lines[1]["named"] == {0: [2], 1: [2]}
        for defect, verdict in {
            "silent change": "wrong result",
            "hang": "hang",
            "stray file": "left behind",
            "wrong accusation": "wrong name",
            "no error": "silent",
        }.items():
            runner.defect = defect
            faults = (slow,) if defect not in ("wrong accusation", "no error") else (kill,)
            found = {line["verdict"] for line in runner.run(episode_of(faults))}
            assert verdict in found, (defect, found)


def test_an_episode_depends_on_seed_and_number_only() -> None:
    assert make_episode(3, 17) == make_episode(3, 17)
    assert make_episode(3, 17) != make_episode(4, 17)
    episodes = [make_episode(0, index) for index in range(400)]
    assert {fault.kind for e in episodes for a in e.attempts for fault in a.faults} == {*HARMLESS, *FATAL}
    assert {e.row for e in episodes} == {row.name for row in ROWS}
    assert {a.workers for e in episodes for a in e.attempts} == {3, 4, 5}
    for episode in episodes:
        for attempt in episode.attempts:
            assert all(0 <= fault.victim < attempt.workers for fault in attempt.faults)


def test_a_verdict_is_ok_only_if_every_check_was_made_and_passed() -> None:
    for kind, names in REQUIRED.items():
        record = Record(Fault(0, kind, 0, STEPS))
        for name in names:
            assert record.verdict.startswith("unchecked")
            record.check(name, True)
        assert record.verdict == "ok"
        for name in names:
            bad = dataclasses.replace(record, checks=dict(record.checks))
            bad.check(name, False)
            bad.check(name, True)
            assert bad.verdict not in ("ok", "superseded")


def test_who_is_accused() -> None:
    assert accused("rank 2: mean at step 3 failed, no sign of life from ranks 0, 1 (a reset)") == {0, 1}
    assert accused("rank 0: mean at step 8 cannot complete: rank 3: mean at step 8 failed, rank 4 died") == {4}
    assert accused("no connection to rank 1: the host or its link is down (waited 4 s for rank 1)") == {1}
    assert accused("exchange with rank 2 at step 3 cannot complete: rank 1 failed at step 2: KeyError") == {1}
    assert accused("mean at step 3: NaN or infinity on rank 2") == {2}


def test_the_summary_counts_each_verdict() -> None:
    line = {"seed": 0, "episode": 4, "fault": "kill", "seconds_by_rank": {"0": 1.0, "1": 3.0}}
    text = summarize([line | {"verdict": "ok"}, line | {"verdict": "late"}, line | {"verdict": "superseded"}])
    assert text.startswith("2 faults: 1 ok, 0 silent, 0 hang, 0 wrong result, 0 wrong name, 1 late")
    assert "| kill | 2 | 1 | 4 | 2.00 | 3.00 | 3.00 |" in text
    assert "replay: python -m soak --replay 0:4" in text
