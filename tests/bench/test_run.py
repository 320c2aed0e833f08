"""Tiny real runs of every method and baseline, on loopback and on an emulated network."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import resource
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

import laconic
from laconic.bench.compare import _infer_baseline_waiting, compare, prepare_folder
from laconic.bench.copies import read_tensors, write_tensors
from laconic.bench.record import Point, Record, RunsFile, StepTime
from laconic.bench.run import Plan, evaluated_steps, run
from laconic.bench.strategies import Contender, installed_strategies, parse_contender
from laconic.bench.table import table
from laconic.compress import Sign
from laconic.emulate import EmulationError, Network, parse_links
from laconic.tasks import Digits
from tests.bench import synthetic

PLAN = Plan(Digits(model="mlp"), workers=2, steps=12, evaluations=3, command="laconic compare")


# With settings that make them communicate within 12 short steps.
ACTIVE = {
    "a2cid2": "a2cid2+rate=1+slack=1",  # with a fixed rate, training waits for gossip
    "diloco": "diloco+period=4",
    "torchft_diloco": "torchft_diloco+period=6+delay=1",
    "sparseloco": "sparseloco+period=4",
}


@pytest.mark.parametrize("name", installed_strategies())
def test_every_method_and_baseline_trains(name: str) -> None:
    record = run(parse_contender(ACTIVE.get(name, name)), PLAN)
    assert record.status == "ok", record.reason
    assert [point.step for point in record.points] == [4, 8, 12]
    assert record.points[-1].values["loss"] < 2.3
    seconds = [point.seconds for point in record.points]
    assert seconds == sorted(seconds)
    payload = [point.payload_nbytes for point in record.points]
    assert payload == sorted(payload)
    assert (payload[-1] == 0) == (name in ("none", "none_averaged"))
    assert record.step_time is not None
    assert record.step_time.total > 0
    assert record.peak_memory_nbytes > 1e8
    if not record.is_baseline:
        assert record.step_time.compute is not None
        assert record.step_time.compute > 0


def test_none_averaged_evaluates_the_mean_of_models_that_never_communicated() -> None:
    """The same training as `none`, bit for bit; only the evaluated model differs."""
    alone, averaged = run(parse_contender("none"), PLAN), run(parse_contender("none_averaged"), PLAN)
    assert averaged.train_loss == alone.train_loss
    assert [point.payload_nbytes for point in averaged.points] == [0.0] * 3
    models = []
    task = PLAN.task
    for rank in range(PLAN.workers):
        torch.manual_seed(PLAN.seed)
        model = task.build_model()
        optimizer = task.build_optimizer(model)
        schedule = task.build_schedule(optimizer, PLAN.steps)
        shard = task.load(rank, PLAN.workers, PLAN.seed)
        for step in range(PLAN.steps):
            task.backward(model, shard, step)
            optimizer.step()
            optimizer.zero_grad()
            assert schedule is not None
            schedule.step()
        models.append(model)
    assert alone.points[-1].values["loss"] == pytest.approx(task.evaluate(models[0])["loss"], rel=1e-5)
    with torch.no_grad():
        for first, second in zip(*(model.parameters() for model in models), strict=True):
            first.add_(second).div_(2)
    assert averaged.points[-1].values["loss"] == pytest.approx(task.evaluate(models[0])["loss"], rel=1e-5)


def test_ddp_and_allreduce_learn_the_same() -> None:
    """Two implementations of full communication agree, given the same data order, seeds and schedule."""
    ours, theirs = run(parse_contender("allreduce"), PLAN), run(parse_contender("ddp"), PLAN)
    for one, other in zip(ours.points, theirs.points, strict=True):
        assert one.values["loss"] == pytest.approx(other.values["loss"], rel=1e-3)
    p = 6  # parameter tensors of the model, a flag each
    assert ours.points[-1].payload_nbytes == theirs.points[-1].payload_nbytes + 12 * 4 * p


def test_the_nic_of_an_emulated_host_counts_what_the_meter_counts() -> None:
    plan = dataclasses.replace(PLAN, task=Digits(model="wide"), link="1gbit", steps=6)
    try:
        with Network(parse_links("1gbit", 2)):
            pass
    except EmulationError as error:
        pytest.skip(str(error))
    record = run(parse_contender("allreduce"), plan)
    assert record.status == "ok", record.reason
    assert record.nic_nbytes_per_step is not None
    assert record.nic_nbytes_per_step == pytest.approx(record.payload_nbytes_per_step["foreground"], rel=0.05)


class SlowToCopy(Digits):
    """A task whose models take a known time to copy."""

    copy_seconds = 0.1

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        model.register_state_dict_post_hook(lambda *_: time.sleep(self.copy_seconds))
        return model


def test_the_clock_does_not_stop_while_copies_for_evaluations_are_written() -> None:
    """Otherwise methods that send in the background could send during evaluations for free."""
    plan = dataclasses.replace(PLAN, task=SlowToCopy(model="mlp"), steps=6, evaluations=6)
    record = run(parse_contender("none"), plan)
    assert record.status == "ok", record.reason
    intervals = [after.seconds - before.seconds for before, after in itertools.pairwise(record.points)]
    assert min(intervals) >= SlowToCopy.copy_seconds


def test_copies_of_models_are_exact(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1).bfloat16())
    state = list(model.state_dict().values())
    write_tensors(tmp_path / "copy", state)
    for value, copy in zip(state, read_tensors(tmp_path / "copy", state), strict=True):
        assert (copy.dtype, copy.shape) == (value.dtype, value.shape)
        assert torch.equal(copy, value)


def test_a_target_is_reached_when_the_next_evaluation_confirms_it() -> None:
    record = synthetic.run(synthetic.SHAPES[0], seed=0)

    def reached(*values: float) -> int | None:
        points = [Point(i, float(i), 0.0, None, {"accuracy": value}) for i, value in enumerate(values)]
        point = dataclasses.replace(record, points=points).reached(0.9)
        return None if point is None else point.step

    assert reached(0.8, 0.91, 0.89, 0.92, 0.93, 0.89) == 3, "one evaluation above the target is noise"
    assert reached(0.8, 0.91, 0.89) is None
    assert reached(0.8, 0.89, 0.91) == 2, "nothing follows the last evaluation"
    assert reached() is None


def test_the_agreed_model_reaches_a_target_without_an_average() -> None:
    record = synthetic.run(synthetic.SHAPES[0], seed=0)

    def reached(means: list[float], agreed: list[float], average: float) -> tuple[float, float, float] | None:
        points = [
            Point(i, float(i), 10.0 * i, None, {"accuracy": one}, differs=True, agreed={"accuracy": other})
            for i, (one, other) in enumerate(zip(means, agreed, strict=True))
        ]
        one = dataclasses.replace(record, points=points, average_seconds=average, average_nbytes=5.0).reached(0.9)
        return None if one is None else (one.seconds, one.payload_nbytes, one.values["accuracy"])

    assert reached([0.8, 0.91, 0.92, 0.93], [0.7, 0.8, 0.94, 0.95], average=1.5) == (2.0, 20.0, 0.94)
    assert reached([0.8, 0.91, 0.92, 0.93], [0.7, 0.8, 0.94, 0.95], average=0.5) == (1.5, 15.0, 0.91)
    assert reached([0.8, 0.91, 0.92], [0.7, 0.94, 0.89], average=9.0) == (10.0, 15.0, 0.91), "one of them is noise"
    assert reached([0.8, 0.8], [0.8, 0.91], average=9.0) == (1.0, 10.0, 0.91), "nothing follows"
    assert reached([0.8, 0.8], [0.8, 0.8], average=9.0) is None


@pytest.mark.parametrize("name", ["divisible+period=3", "diloco+period=4", "sparseloco+period=4", "torchft_diloco"])
def test_agreed_models_are_evaluated_beside_the_mean(name: str) -> None:
    if name == "torchft_diloco":
        pytest.importorskip("torchft")
        name += "+period=4+delay=1"
    record = run(parse_contender(name), dataclasses.replace(PLAN, steps=10, evaluations=5, workers=2))
    assert record.status == "ok", record.reason
    for point in record.points:
        assert bool(point.agreed) == point.differs
    agreed = [point.agreed["loss"] for point in record.points if point.differs]
    assert agreed, "models differ in between"
    assert all(math.isfinite(loss) for loss in agreed)
    assert agreed != [point.values["loss"] for point in record.points if point.differs], "they are some steps old"
    assert agreed[-1] < agreed[0], "they learn"


def test_methods_without_an_agreed_model_have_none_evaluated() -> None:
    record = run(parse_contender("none_averaged"), dataclasses.replace(PLAN, steps=4, evaluations=2, workers=2))
    assert [point.agreed for point in record.points] == [{}, {}]


def test_the_time_to_a_target_includes_one_average_where_the_models_differ() -> None:
    plan = dataclasses.replace(PLAN, steps=8, evaluations=2, workers=2)
    apart = run(parse_contender("none_averaged"), plan)
    together = run(parse_contender("ddp"), plan)
    sometimes = run(parse_contender("local_sgd+period=3"), dataclasses.replace(plan, evaluations=8))
    in_4_bits = run(parse_contender("local_sgd+period=4+compressor=uniform:4"), plan)  # equal at the end
    assert [point.differs for point in apart.points] == [True, True]
    assert [point.differs for point in together.points] == [False, False]
    assert [point.differs for point in sometimes.points] == [True, True, False, True, True, False, True, True]
    assert not any(point.differs for point in run(parse_contender("none"), plan).points)
    assert (together.average_seconds, together.average_nbytes) == (0.0, 0.0)
    assert in_4_bits.average_nbytes == pytest.approx(0.5 * in_4_bits.parameters, rel=0.01)
    for record in (apart, sometimes):
        assert record.average_seconds > 0
        assert record.average_nbytes == pytest.approx(4 * record.parameters, abs=16)  # and the consensus distance
        first, reached = record.points[0], record.reached(0.0)
        assert reached is not None
        extra = record.average_seconds if first.differs else 0.0
        assert reached.seconds == first.seconds + extra
        assert reached.payload_nbytes == first.payload_nbytes + (record.average_nbytes if first.differs else 0.0)


def test_digits_with_few_training_images_hold_out_all_others() -> None:
    split = Digits(train_images=200).images()
    assert (len(split.train.labels), len(split.test.labels)) == (200, 1597)
    assert set(split.train.labels) == set(range(10))
    with pytest.raises(ValueError, match="train_images must be a whole number from 1 to 1796, not 1797"):
        Digits(train_images=1797)


class Killed:
    """A strategy whose second worker is killed."""

    is_baseline, averages = True, True

    def settings(self) -> dict[str, object]:
        return {}

    def join(self, model: object, optimizer: object) -> object:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        return parse_contender("ddp").strategy.join(model, optimizer)  # type: ignore[arg-type]


class NoDisplay:
    def __call__(self, contender: Contender, plan: Plan) -> AbstractContextManager[None]:
        return nullcontext()

    def show_result(self, record: Record) -> None:
        pass


def test_a_worker_that_dies_fails_its_run_and_the_others_go_on(tmp_path: Path) -> None:
    killed = Contender("killed", "killed", Killed())  # type: ignore[arg-type]
    contenders = [parse_contender("none"), killed, parse_contender("local_sgd+period=2")]
    records = compare(contenders, PLAN, 2, tmp_path, NoDisplay())
    assert [(r.name, r.seed, r.status) for r in records] == [
        (name, seed, "failed" if name == "killed" else "ok")
        for seed in (0, 1)
        for name in ("none", "killed", "local_sgd+period=2")
    ]
    assert "killed by SIGKILL" in records[1].reason
    assert RunsFile(tmp_path).read() == records
    rendered = "".join(str(cell) for column in table(records, 2.0).columns for cell in column.cells)
    assert "failed: worker 1 of 2 failed: killed by SIGKILL" in rendered
    assert "not reached" in rendered


def some_record() -> Record:
    return Record(
        name="ddp", method="ddp", is_baseline=True, settings={}, task="digits", task_settings={}, metric="accuracy",
        higher_is_better=True, parameters=10, workers=2, link="none", rho=None, steps=5, seed=0, command="", date="",
        versions={}, machine="", step_time=StepTime(1.0, None, None, None),
        worker_step_times=[StepTime(0.75, None, None, None), StepTime(1.25, None, None, None)],
    )  # fmt: skip


def test_a_full_disk_keeps_earlier_lines(tmp_path: Path) -> None:
    """A process that may write at most 8 kB per file stands in for a full disk."""

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
    assert "the run of ddp was not written: " in text
    assert RunsFile(tmp_path).read() == [some_record()]
    RunsFile(tmp_path).append(some_record())
    assert len(RunsFile(tmp_path).read()) == 2


def test_a_run_that_diverged_is_written_as_valid_json(tmp_path: Path) -> None:
    record = some_record()
    record.points.append(Point(1, 0.5, 10.0, None, {"loss": float("nan"), "accuracy": 0.1}, {"period": float("inf")}))
    record.train_loss.append((1, float("nan")))
    RunsFile(tmp_path).append(record)
    assert "NaN" not in RunsFile(tmp_path).path.read_text()
    (read,) = RunsFile(tmp_path).read()
    assert math.isnan(read.points[0].values["loss"])
    assert read.points[0].method_metrics == {"period": math.inf}
    assert math.isnan(read.train_loss[0][1])


def test_an_unknown_schema_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text('{"schema": 99}\n')
    with pytest.raises(ValueError, match=r"line 1 is not a run .*schema from 1 to 5, not 99"):
        RunsFile(tmp_path).read()


def test_schema_1_is_still_read(tmp_path: Path) -> None:
    record = some_record()
    record.points.append(Point(1, 0.5, 10.0, 11.0, {"loss": 1.0, "accuracy": 0.1}, {"period": 4.0}))
    record.nic_nbytes_per_step = 11.0
    record.worker_step_times = []
    old = dataclasses.asdict(record) | {"schema": 1}
    del old["worker_step_times"], old["target"]
    for new_name, name in (("method", "way"), ("is_baseline", "is_peer"), ("step_time", "split")):
        old[name] = old.pop(new_name)
    old["card_nbytes_per_step"] = old.pop("nic_nbytes_per_step")
    old["split"] = {"step": 1.0, "compute": None, "waiting": None, "method": None}
    (point,) = old["points"]
    point["card_nbytes"], point["method"] = point.pop("nic_nbytes"), point.pop("method_metrics")
    (tmp_path / "runs.jsonl").write_text(json.dumps(old) + "\n")
    assert RunsFile(tmp_path).read() == [record]


def test_the_time_of_a_baseline_beyond_computing_is_waiting() -> None:
    alone = dataclasses.replace(some_record(), method="none", step_time=StepTime(0.25, 0.25, 0.0, 0.0))
    alone.worker_step_times = [StepTime(0.25, 0.25, 0.0, 0.0)] * 2
    record = some_record()
    _infer_baseline_waiting(record, [alone])
    assert record.worker_step_times == [StepTime(0.75, 0.25, 0.5, 0.0), StepTime(1.25, 0.25, 1.0, 0.0)]
    assert record.step_time == StepTime(1.0, 0.25, 0.75, 0.0)
    unknown = some_record()
    _infer_baseline_waiting(unknown, [])
    assert unknown.step_time == StepTime(1.0, None, None, None)


def test_evaluated_steps() -> None:
    assert evaluated_steps(0, 100, 4) == [25, 50, 75, 100]
    assert evaluated_steps(10, 13, 20) == [11, 12, 13]
    assert evaluated_steps(0, 1, 20) == [1]


def test_an_output_folder_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_folder(out, overwrite=False)
    (out / "runs.jsonl").write_text("")
    with pytest.raises(FileExistsError, match="exists and is not empty: choose another folder, or give --overwrite"):
        prepare_folder(out, overwrite=False)
    prepare_folder(out, overwrite=True)
    assert list(out.iterdir()) == []
    (out / "thesis.tex").write_text("")
    with pytest.raises(FileExistsError, match=r"has no runs.jsonl, so laconic did not write it"):
        prepare_folder(out, overwrite=True)
    assert (out / "thesis.tex").exists()


def test_names_with_settings() -> None:
    contender = parse_contender("local_sgd+period=4+moments=averaged")
    assert contender.strategy.settings() == {
        "period": 4,
        "moments": "averaged",
        "compressor": None,
        "moments_every": 1,
    }
    chosen = parse_contender("divisible+hops=2+background=auto").strategy.settings()
    assert (chosen["hops"], chosen["background"]) == (2, "auto")
    assert parse_contender("divisible+background=sign").strategy.settings()["background"] == Sign()
    for text, match in [
        ("local_sdg", "no method or baseline is called 'local_sdg'; did you mean local_sgd"),
        ("local_sgd+perod=4", "no setting of local_sgd is called 'perod'; did you mean period"),
        ("local_sgd+period", r"settings are written NAME\+key=value, and 'period'"),
        ("local_sgd+period=often", "local_sgd.period must be a whole number, not 'often'"),
        ("local_sgd+period=0", "period must be a whole number, at least 1, not 0"),
        ("efficient_adam+server=0+dedicated=true", "every worker must train"),
    ]:
        with pytest.raises(ValueError, match=match):
            parse_contender(text)
