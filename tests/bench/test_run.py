"""Real runs of every way on loopback and on an emulated network, at tiny scale."""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import signal
from pathlib import Path

import pytest

import laconic
from laconic.bench.compare import _split_peer, compare, prepare
from laconic.bench.progress import Display
from laconic.bench.record import Point, Record, RunsFile, Split
from laconic.bench.run import Plan, evaluated_steps, run
from laconic.bench.table import table
from laconic.bench.ways import Asked, ask, names
from laconic.compress import Sign
from laconic.emulate import EmulationError, Network, parse_links
from laconic.tasks import Digits

PLAN = Plan(Digits(model="mlp"), workers=2, steps=12, evaluations=3, command="laconic compare")


@pytest.mark.parametrize("name", names())
def test_every_way_trains(name: str) -> None:
    record = run(ask(name), PLAN)
    assert record.status == "ok", record.reason
    assert [point.step for point in record.points] == [4, 8, 12]
    assert record.points[-1].values["loss"] < 2.3
    seconds = [point.seconds for point in record.points]
    assert seconds == sorted(seconds)
    payload = [point.payload_nbytes for point in record.points]
    assert payload == sorted(payload)
    assert (payload[-1] == 0) == (name == "none")
    assert record.split is not None
    assert record.split.step > 0
    assert record.peak_memory_nbytes > 1e8
    if not record.is_peer:
        assert record.split.compute is not None
        assert record.split.compute > 0


def test_ddp_and_allreduce_learn_the_same() -> None:
    """The same data order, seeds and schedule: two implementations of full communication agree."""
    ours, theirs = run(ask("allreduce"), PLAN), run(ask("ddp"), PLAN)
    for one, other in zip(ours.points, theirs.points, strict=True):
        assert one.values["loss"] == pytest.approx(other.values["loss"], rel=1e-3)
    p = 6  # parameter tensors of the model, a flag each
    assert ours.points[-1].payload_nbytes == theirs.points[-1].payload_nbytes + 12 * 4 * p


def test_on_an_emulated_network_the_card_counts_what_the_meter_says() -> None:
    plan = dataclasses.replace(PLAN, task=Digits(model="wide"), link="1gbit", steps=6)
    try:
        with Network(parse_links("1gbit", 2)):
            pass
    except EmulationError as error:
        pytest.skip(str(error))
    record = run(ask("allreduce"), plan)
    assert record.status == "ok", record.reason
    assert record.card_nbytes_per_step is not None
    assert record.card_nbytes_per_step == pytest.approx(record.payload_nbytes_per_step["foreground"], rel=0.05)


class Killed:
    """A way whose second worker dies in the middle."""

    is_peer, averages = True, True

    def settings(self) -> dict[str, object]:
        return {}

    def join(self, model: object, optimizer: object) -> object:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        return ask("ddp").way.join(model, optimizer)  # type: ignore[arg-type]


def no_display(asked: Asked, plan: Plan) -> Display:
    import contextlib

    return contextlib.nullcontext()  # type: ignore[return-value]


def test_a_worker_that_dies_fails_its_run_and_the_others_go_on(tmp_path: Path) -> None:
    ways = [ask("none"), Asked("killed", "killed", Killed()), ask("local_sgd+period=2")]  # type: ignore[arg-type]
    records = compare(ways, PLAN, 2, tmp_path, no_display)
    assert [(r.name, r.seed, r.status) for r in records] == [
        (name, seed, "failed" if name == "killed" else "ok")
        for seed in (0, 1)
        for name in ("none", "killed", "local_sgd+period=2")
    ]
    assert "killed by SIGKILL" in records[1].reason
    assert RunsFile(tmp_path).read() == records
    rendered = "".join(cell for column in table(records, 2.0).columns for cell in column.cells)
    assert "failed: worker 1 of 2 failed: killed by SIGKILL" in rendered
    assert "not reached" in rendered


def some_record() -> Record:
    return Record(
        name="ddp", way="ddp", is_peer=True, settings={}, task="digits", task_settings={}, metric="accuracy",
        higher_is_better=True, parameters=10, workers=2, link="none", rho=None, steps=5, seed=0, command="", date="",
        versions={}, machine="", split=Split(1.0, None, None, None),
    )  # fmt: skip


def test_a_full_disk_leaves_the_lines_before(tmp_path: Path) -> None:
    """In a process that may not write beyond 8 kB a file, which is how a full disk looks."""

    def run() -> str:
        file = RunsFile(tmp_path)
        file.append(some_record())
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        try:
            file.append(dataclasses.replace(some_record(), reason="x" * 20000))
        except OSError as error:
            return str(error)
        return "no error"

    (text,) = laconic.spawn(run, 1)
    assert "the run of ddp is not written: " in text
    assert RunsFile(tmp_path).read() == [some_record()]
    RunsFile(tmp_path).append(some_record())
    assert len(RunsFile(tmp_path).read()) == 2


def test_a_run_that_diverged_is_written_in_plain_json(tmp_path: Path) -> None:
    record = some_record()
    record.points.append(Point(1, 0.5, 10.0, None, {"loss": float("nan"), "accuracy": 0.1}, {"period": float("inf")}))
    record.train_loss.append((1, float("nan")))
    RunsFile(tmp_path).append(record)
    assert "NaN" not in RunsFile(tmp_path).path.read_text()
    (read,) = RunsFile(tmp_path).read()
    assert math.isnan(read.points[0].values["loss"])
    assert read.points[0].method == {"period": math.inf}
    assert math.isnan(read.train_loss[0][1])


def test_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text('{"schema": 99}\n')
    with pytest.raises(ValueError, match="must have schema 1, not 99"):
        RunsFile(tmp_path).read()


def test_what_a_peer_takes_beyond_computing_is_waiting() -> None:
    floor = dataclasses.replace(some_record(), way="none", split=Split(0.25, 0.25, 0.0, 0.0))
    record = some_record()
    _split_peer(record, [floor])
    assert record.split == Split(1.0, 0.25, 0.75, 0.0)
    alone = some_record()
    _split_peer(alone, [])
    assert alone.split == Split(1.0, None, None, None)


def test_evaluated_steps() -> None:
    assert evaluated_steps(0, 100, 4) == [25, 50, 75, 100]
    assert evaluated_steps(10, 13, 20) == [11, 12, 13]
    assert evaluated_steps(0, 1, 20) == [1]


def test_an_output_folder_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(out, overwrite=False)
    (out / "runs.jsonl").write_text("")
    with pytest.raises(FileExistsError, match="exists and is not empty: choose another folder, or give --overwrite"):
        prepare(out, overwrite=False)
    prepare(out, overwrite=True)
    assert list(out.iterdir()) == []
    (out / "thesis.tex").write_text("")
    with pytest.raises(FileExistsError, match=r"has no runs.jsonl, so laconic did not make it"):
        prepare(out, overwrite=True)
    assert (out / "thesis.tex").exists()


def test_names_with_settings() -> None:
    asked = ask("local_sgd+period=4+moments=averaged")
    assert asked.way.settings() == {"period": 4, "moments": "averaged", "compressor": None}
    chosen = ask("divisible+hops=2+background=auto").way.settings()
    assert (chosen["hops"], chosen["background"]) == (2, "auto")
    assert ask("divisible+background=sign").way.settings()["background"] == Sign()
    for text, match in [
        ("local_sdg", "no method or peer is called 'local_sdg'; did you mean local_sgd"),
        ("local_sgd+perod=4", "no setting of local_sgd is called 'perod'; did you mean period"),
        ("local_sgd+period", r"settings are written NAME\+key=value, and 'period'"),
        ("local_sgd+period=often", "local_sgd.period must be a whole number, not 'often'"),
        ("local_sgd+period=0", "period must be a whole number, at least 1, not 0"),
        ("efficient_adam+server=0+dedicated=true", "here every worker trains"),
    ]:
        with pytest.raises(ValueError, match=match):
            ask(text)
