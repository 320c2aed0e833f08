"""Runs one real training: one process per worker, with the same loop for every method and baseline.

At chosen steps each worker writes a copy of its model to a file. The copies of all workers are averaged and evaluated
only after training, so evaluation neither delays a worker nor sends a byte. The clock never stops: if it stood still
while copies (and checkpoints) are written, methods that send in the background would send for free meanwhile.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import platform
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import laconic
from laconic import kernels
from laconic.bench.copies import average_copies, read_agreed, write_copies
from laconic.bench.record import Point, Record, StepTime, mean_step_time
from laconic.bench.simulated import run_simulated
from laconic.bench.strategies import Contender, Reading
from laconic.bench.units import SIMULATED
from laconic.emulate import hosts_behind
from laconic.launch import WorkerFailed, spawn
from laconic.rules import check_count, check_number, check_seed
from laconic.tasks import Task

PRELOAD = ["laconic.preload", "laconic.bench.run"]
WARM_UP_STEPS = 3  # they open connections and fill caches, so the average step time excludes them


@dataclass(frozen=True)
class Plan:
    """The settings of a run, except its method.

    Args:
        task: What is trained.
        workers: The number of processes.
        steps: The number of training steps.
        seed: The seed of the model and of the data order.
        link: The emulated link of each host, such as "100mbit"; "none" for loopback.
        rho: Written to the record only; `link` is what the network emulates.
        evaluations: The number of evaluations, evenly spaced over the run.
        checkpoint: The folder for checkpoints, or None. One is saved at the end and every `save_every` steps.
        save_every: Steps between two checkpoints, or None.
        resume: Whether to continue from `checkpoint`.
        command: The command line, for the record.
        target: A value of the metric, for the record: reports measure the time to it.
        simulated: The seconds in which a simulated worker computes a step; None for real processes.

    Example:
        >>> from laconic.tasks import Digits
        >>> Plan(Digits(), workers=4, steps=100, link="100mbit").evaluations
        20
    """

    task: Task
    workers: int
    steps: int
    seed: int = 0
    link: str = "none"
    rho: float | None = None
    evaluations: int = 20
    checkpoint: Path | None = None
    save_every: int | None = None
    resume: bool = False
    command: str = ""
    target: float | None = None
    simulated: float | None = None

    def identity(self) -> str:
        """Returns a description of everything that must stay the same when a run is resumed: all but its length."""
        task = dataclasses.replace(self.task, steps=1)
        return f"{task!r} with seed {self.seed}"

    def __post_init__(self) -> None:
        for name in ("workers", "steps", "evaluations"):
            check_count(name, getattr(self, name))
        check_seed(self.seed)
        if self.rho is not None:
            check_number("rho", self.rho, above=0)
        if self.save_every is not None:
            check_count("save_every", self.save_every)
        if self.simulated is not None:
            check_number("simulated (seconds that a step computes)", self.simulated, least=0)


@dataclass
class WorkerReport:
    """What one worker measured. Lists have one entry per evaluation."""

    seconds: list[float]
    readings: list[Reading]
    nic_nbytes: list[int | None]
    losses: list[tuple[int, float]]
    warm_up_seconds: float  # training time of the warm-up steps
    warm_up: Reading  # at the end of the warm-up steps
    steps: range
    peak_memory_nbytes: int
    average_seconds: float | None = None  # to average all models once, at the end
    average_nbytes: float = 0.0  # that this worker sent for it


def run(contender: Contender, plan: Plan, progress: Path | None = None) -> Record:
    """Trains, evaluates, and returns the record of the run.

    A worker that fails does not raise: the record then has the status "failed" and the reason.

    Args:
        contender: The method or baseline.
        plan: All other settings.
        progress: The file to which rank 0 writes its progress, or None.
    """
    record = new_record(contender, plan)
    with tempfile.TemporaryDirectory(prefix="laconic-") as folder:
        try:
            if plan.simulated is not None:
                reports = run_simulated(_train, contender, plan, Path(folder), progress)
            else:
                with hosts_behind(plan.link, plan.workers) as hosts:
                    reports = spawn(
                        _train, plan.workers, contender, plan, Path(folder), progress, hosts=hosts, preload=PRELOAD
                    )
        except WorkerFailed as failure:
            record.status, record.reason = "failed", str(failure)
            return record
        _add_costs(record, reports)
        model, ranks = plan.task.build_model(), plan.workers if contender.strategy.averages else 1
        for i, (step, _) in enumerate(reports[0].losses):
            differs = average_copies(model, Path(folder), step, ranks)
            nics = [worker.nic_nbytes[i] for worker in reports]
            values = plan.task.evaluate(model)
            differs = differs and record.average_nbytes > 0
            has_agreed = differs and read_agreed(model, Path(folder), step)
            record.points.append(
                Point(
                    step=step,
                    seconds=max(worker.seconds[i] for worker in reports),
                    payload_nbytes=_mean([sum(worker.readings[i].payload_nbytes.values()) for worker in reports]),
                    nic_nbytes=None if None in nics else _mean([float(nic or 0) for nic in nics]),
                    values=values,
                    method_metrics=reports[0].readings[i].metrics,
                    differs=differs,
                    agreed=plan.task.evaluate(model) if has_agreed else {},
                )
            )
    return record


def _train(contender: Contender, plan: Plan, folder: Path, progress: Path | None) -> WorkerReport:
    """Runs the training loop in one worker."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(plan.seed)
    model = plan.task.build_model()
    optimizer = plan.task.build_optimizer(model)
    schedule = plan.task.build_schedule(optimizer, plan.steps)
    shard = plan.task.load(rank, size, plan.seed)
    shown = np.memmap(progress, dtype=np.float64, mode="r+") if progress else None
    display = shown if rank == 0 else None
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    report = WorkerReport([], [], [], [], 0.0, Reading({}, 0.0, 0.0, {}), range(0), 0)
    with _compilation_shown(shown), contender.strategy.join(model, optimizer) as session:
        start = 0
        if plan.resume:
            assert session.worker is not None
            assert plan.checkpoint is not None
            extra = session.worker.load(plan.checkpoint)
            if extra["plan"] != plan.identity():
                raise ValueError(f"the checkpoint is of {extra['plan']}, but this run is {plan.identity()}")
            start = session.worker.step
            if schedule is not None:
                schedule.load_state_dict(extra["schedule"])
        if start >= plan.steps:
            raise ValueError(f"the checkpoint is at step {start} already: give --steps above that, not {plan.steps}")
        report.steps = range(start, plan.steps)
        evaluated = evaluated_steps(start, plan.steps, plan.evaluations)
        nic_start = _nic_nbytes(interface)
        now = time.perf_counter if session.worker is None else session.worker.comm.now  # which may be simulated
        clock = now()
        for step in report.steps:
            if step == start + WARM_UP_STEPS:
                report.warm_up_seconds, report.warm_up = now() - clock, session.read()
            loss = plan.task.backward(session.module, shard, step)
            session.optimizer.step()
            session.optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
            done = step + 1
            if done in evaluated:
                report.seconds.append(now() - clock)
                report.readings.append(session.read())
                nic = _nic_nbytes(interface)
                report.nic_nbytes.append(None if nic is None or nic_start is None else nic - nic_start)
                report.losses.append((done, loss.item()))
                write_copies(folder, done, rank, model, session.agreed(), is_reference=session.sends_differences)
            if display is not None:
                display[:] = (done, loss.item(), sum(session.read().payload_nbytes.values()), plan.steps)
            if plan.checkpoint and session.worker and (done == plan.steps or _is_due(done, plan.save_every)):
                extra = {"plan": plan.identity()}
                if schedule is not None:
                    extra["schedule"] = _without_functions(schedule.state_dict())
                session.worker.save(plan.checkpoint, extra)
        report.peak_memory_nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if contender.strategy.averages and session.average is not None:
            worker = session.worker
            if worker is not None and worker.method.common(worker.seen) == "x":
                # After a round all models are equal, and averaging them costs nothing; after one more step it does.
                plan.task.backward(session.module, shard, plan.steps)
                session.optimizer.step()
            start_seconds = now()
            report.average_nbytes = session.average()
            report.average_seconds = now() - start_seconds
    return report


@contextmanager
def _compilation_shown(shown: np.ndarray | None) -> Iterator[None]:
    """Writes the expected seconds of compiling kernels to the progress file, in the place of the first step's loss.

    Any rank may be the one that compiles. Without this, its log message would interrupt the progress bar.
    """

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg != kernels.COMPILING:
                logging.lastResort.handle(record) if logging.lastResort else None
            elif shown is not None and isinstance(record.args, tuple):
                shown[1] = record.args[1]

    handler = Handler()
    logger = logging.getLogger("laconic")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def evaluated_steps(start: int, steps: int, evaluations: int) -> list[int]:
    """Returns the steps after which the model is evaluated: evenly spaced, always with the last one.

    Example:
        >>> evaluated_steps(start=0, steps=100, evaluations=4)
        [25, 50, 75, 100]
    """
    number = min(evaluations, steps - start)
    return sorted({start + round((steps - start) * (i + 1) / number) for i in range(number)})


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _without_functions(schedule: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of a LambdaLR without its functions, which cannot be saved; the task provides them again."""
    return schedule | ({"lr_lambdas": [None]} if "lr_lambdas" in schedule else {})


def _nic_nbytes(interface: str) -> int | None:
    """Returns the bytes sent by this host's network interface; None on loopback, which all workers share."""
    if interface == "lo" or not Path("/proc/self/net/dev").exists():
        return None
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    return None


def new_record(contender: Contender, plan: Plan) -> Record:
    """Returns a record with the settings of the run and no measurements."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        parameters = sum(p.numel() for p in plan.task.build_model().parameters())
    return Record(
        name=contender.label,
        method=contender.method,
        is_baseline=contender.strategy.is_baseline,
        settings={name: repr(value) for name, value in contender.strategy.settings().items()},
        task=plan.task.name,
        task_settings=dataclasses.asdict(plan.task),
        metric=plan.task.metric,
        higher_is_better=plan.task.higher_is_better,
        parameters=parameters,
        workers=plan.workers,
        link=plan.link if plan.simulated is None else SIMULATED + plan.link,
        rho=plan.rho,
        steps=plan.steps,
        seed=plan.seed,
        command=plan.command,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions={"laconic": laconic.__version__, "torch": torch.__version__, "python": platform.python_version()},
        machine=f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        target=plan.target,
    )


def _add_costs(record: Record, reports: list[WorkerReport]) -> None:
    """Adds seconds, bytes, memory and training loss to the record."""
    first = reports[0]
    record.seconds = max(worker.seconds[-1] for worker in reports)
    record.train_loss = [
        (step, _mean([worker.losses[i][1] for worker in reports])) for i, (step, _) in enumerate(first.losses)
    ]
    steps = len(first.steps)
    steady = steps - WARM_UP_STEPS if steps > WARM_UP_STEPS else steps
    last = [worker.readings[-1] for worker in reports]
    record.worker_step_times = [_step_time(worker, steady) for worker in reports]
    record.step_time = mean_step_time(record.worker_step_times)
    channels = sorted({channel for reading in last for channel in reading.payload_nbytes})
    record.payload_nbytes_per_step = {
        channel: _mean([reading.payload_nbytes.get(channel, 0.0) for reading in last]) / steps for channel in channels
    }
    nics = [worker.nic_nbytes[-1] for worker in reports]
    if all(nic is not None for nic in nics):
        record.nic_nbytes_per_step = _mean([float(nic or 0) for nic in nics]) / steps
    record.peak_memory_nbytes = max(worker.peak_memory_nbytes for worker in reports)
    averages = [worker.average_seconds for worker in reports if worker.average_seconds is not None]
    if averages:
        # The others also wait for the last worker to arrive, which training did not.
        record.average_seconds = min(averages)
        record.average_nbytes = _mean([worker.average_nbytes for worker in reports])


def _step_time(worker: WorkerReport, steady: int) -> StepTime:
    """Returns the average step of one worker over its `steady` steps after the warm-up."""
    total = (worker.seconds[-1] - worker.warm_up_seconds) / steady
    end, begin = worker.readings[-1], worker.warm_up
    if end.waiting_seconds is None or end.method_seconds is None:
        return StepTime(total, None, None, None)
    waiting = (end.waiting_seconds - (begin.waiting_seconds or 0)) / steady
    overhead = (end.method_seconds - (begin.method_seconds or 0)) / steady - waiting
    return StepTime(total, total - waiting - overhead, waiting, overhead)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
