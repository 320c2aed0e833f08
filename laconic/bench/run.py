"""One real training run: the same loop for every way, a process for each worker, judged after the clock has stopped.

At chosen steps each worker writes a copy of its model, off the clock. Only when training is over are the copies of all
workers averaged and evaluated: so judging neither pauses a worker nor sends a byte.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import laconic
from laconic.bench.record import Point, Record, Split
from laconic.bench.ways import Asked, Reading
from laconic.emulate import hosts_behind
from laconic.launch import WorkerFailed, spawn
from laconic.tasks import Task

PRELOAD = ["laconic.preload", "laconic.bench.run"]
STEADY_AFTER = 3  # steps that open connections and fill caches, left out of the seconds of an average step


@dataclass(frozen=True)
class Plan:
    """What to run, beside the way."""

    task: Task
    workers: int
    steps: int
    seed: int = 0
    link: str = "none"
    rho: float | None = None  # only told in the record; `link` is what counts
    evaluations: int = 20
    checkpoint: Path | None = None  # where to save at the end and every `save_every` steps
    save_every: int | None = None
    resume: bool = False
    command: str = ""

    def identity(self) -> str:
        """What a resumed run must have in common with the one before: all but its length."""
        task = dataclasses.replace(self.task, steps=1)
        return f"{task!r} with seed {self.seed}"

    def __post_init__(self) -> None:
        for name in ("workers", "steps", "evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass
class Told:
    """What one worker reports at the end."""

    seconds: list[float]  # at each evaluated step
    readings: list[Reading]
    card_nbytes: list[int | None]
    losses: list[tuple[int, float]]
    steady_seconds: float  # the clock, and the reading, when the steady steps begin
    steady: Reading
    steps: range
    peak_memory_nbytes: int


def run(asked: Asked, plan: Plan, progress: Path | None = None) -> Record:
    """Train, judge, and tell. A worker that fails makes a record that says so; it does not raise."""
    record = _describe(asked, plan)
    with tempfile.TemporaryDirectory(prefix="laconic-") as folder:
        try:
            with hosts_behind(plan.link, plan.workers) as hosts:
                told = spawn(_work, plan.workers, asked, plan, Path(folder), progress, hosts=hosts, preload=PRELOAD)
        except WorkerFailed as failure:
            record.status, record.reason = "failed", str(failure)
            return record
        _sum_up(record, told)
        _judge(record, asked, plan, told, Path(folder))
    return record


def _work(asked: Asked, plan: Plan, folder: Path, progress: Path | None) -> Told:
    """In each worker: the training loop."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(plan.seed)
    model = plan.task.build_model()
    optimizer = plan.task.build_optimizer(model)
    schedule = plan.task.build_schedule(optimizer, plan.steps)
    shard = plan.task.load(rank, size, plan.seed)
    display = np.memmap(progress, dtype=np.float64, mode="r+") if progress and rank == 0 else None
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    told = Told([], [], [], [], 0.0, Reading({}, 0.0, 0.0, {}), range(0), 0)
    with asked.way.join(model, optimizer) as joined:
        start = 0
        if plan.resume:
            assert joined.worker is not None
            assert plan.checkpoint is not None
            extra = joined.worker.load(plan.checkpoint)
            if extra["plan"] != plan.identity():
                raise ValueError(f"the checkpoint is of {extra['plan']}, and this run is {plan.identity()}")
            start = joined.worker.step
            if schedule is not None:
                schedule.load_state_dict(extra["schedule"])
        if start >= plan.steps:
            raise ValueError(f"the checkpoint is at step {start} already, and steps is {plan.steps}")
        told.steps = range(start, plan.steps)
        judged = evaluated_steps(start, plan.steps, plan.evaluations)
        card_start = _card_nbytes(interface)
        clock, paused = time.perf_counter(), 0.0
        for step in told.steps:
            if step == start + STEADY_AFTER:
                told.steady_seconds, told.steady = time.perf_counter() - clock - paused, joined.read()
            loss = plan.task.loss(joined.module, shard.batch(step))
            loss.backward()  # type: ignore[no-untyped-call]
            joined.optimizer.step()
            joined.optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
            done = step + 1
            if done in judged:
                now = time.perf_counter()
                told.seconds.append(now - clock - paused)
                told.readings.append(joined.read())
                card = _card_nbytes(interface)
                told.card_nbytes.append(None if card is None or card_start is None else card - card_start)
                told.losses.append((done, loss.item()))
                torch.save(list(model.state_dict().values()), folder / f"{rank}-{done}.pt")
                paused += time.perf_counter() - now
            if display is not None:
                display[:] = (done, loss.item(), sum(joined.read().payload_nbytes.values()), plan.steps)
            if plan.checkpoint and joined.worker and (done == plan.steps or _is_due(done, plan.save_every)):
                now = time.perf_counter()
                extra = {"plan": plan.identity()}
                if schedule is not None:
                    extra["schedule"] = _plain(schedule.state_dict())
                joined.worker.save(plan.checkpoint, extra)
                paused += time.perf_counter() - now
    told.peak_memory_nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return told


def evaluated_steps(start: int, steps: int, evaluations: int) -> list[int]:
    """The steps after which the model is judged: evenly spaced, the last one always."""
    number = min(evaluations, steps - start)
    return sorted({start + round((steps - start) * (i + 1) / number) for i in range(number)})


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _plain(schedule: dict[str, Any]) -> dict[str, Any]:
    """A LambdaLR keeps its functions in its state; they come from the task again."""
    return schedule | ({"lr_lambdas": [None]} if "lr_lambdas" in schedule else {})


def _card_nbytes(interface: str) -> int | None:
    """Bytes this host's network card has sent; None on loopback, which all workers share."""
    if interface == "lo" or not Path("/proc/self/net/dev").exists():
        return None
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    return None


def _describe(asked: Asked, plan: Plan) -> Record:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        parameters = sum(p.numel() for p in plan.task.build_model().parameters())
    return Record(
        name=asked.text,
        way=asked.name,
        is_peer=asked.way.is_peer,
        settings={name: repr(value) for name, value in asked.way.settings().items()},
        task=plan.task.name,
        task_settings=dataclasses.asdict(plan.task),
        metric=plan.task.metric,
        higher_is_better=plan.task.higher_is_better,
        parameters=parameters,
        workers=plan.workers,
        link=plan.link,
        rho=plan.rho,
        steps=plan.steps,
        seed=plan.seed,
        command=plan.command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"laconic": laconic.__version__, "torch": torch.__version__, "python": platform.python_version()},
        machine=f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
    )


def _sum_up(record: Record, told: list[Told]) -> None:
    """Seconds, bytes and memory."""
    first = told[0]
    record.seconds = max(worker.seconds[-1] for worker in told)
    record.train_loss = [
        (step, _mean([worker.losses[i][1] for worker in told])) for i, (step, _) in enumerate(first.losses)
    ]
    steps = len(first.steps)
    steady = steps - STEADY_AFTER if steps > STEADY_AFTER else steps
    seconds = _mean([(worker.seconds[-1] - worker.steady_seconds) / steady for worker in told])
    last = [worker.readings[-1] for worker in told]
    record.split = Split(seconds, None, None, None)
    waits = [(worker.readings[-1].waiting_seconds, worker.steady.waiting_seconds) for worker in told]
    works = [(worker.readings[-1].method_seconds, worker.steady.method_seconds) for worker in told]
    if all(end is not None for end, _ in waits + works):
        waiting = _mean([((end or 0) - (begin or 0)) / steady for end, begin in waits])
        method = _mean([((end or 0) - (begin or 0)) / steady for end, begin in works]) - waiting
        record.split = Split(seconds, seconds - waiting - method, waiting, method)
    channels = sorted({channel for reading in last for channel in reading.payload_nbytes})
    record.payload_nbytes_per_step = {
        channel: _mean([reading.payload_nbytes.get(channel, 0.0) for reading in last]) / steps for channel in channels
    }
    cards = [worker.card_nbytes[-1] for worker in told]
    if all(card is not None for card in cards):
        record.card_nbytes_per_step = _mean([float(card or 0) for card in cards]) / steps
    record.peak_memory_nbytes = max(worker.peak_memory_nbytes for worker in told)


def _judge(record: Record, asked: Asked, plan: Plan, told: list[Told], folder: Path) -> None:
    """Evaluate the mean of all workers' copies, step by step."""
    model = plan.task.build_model()
    own = model.state_dict()
    for i, (step, _) in enumerate(told[0].losses):
        copies: list[list[Tensor]] = [
            torch.load(folder / f"{rank}-{step}.pt", weights_only=True)
            for rank in range(plan.workers if asked.way.averages else 1)
        ]
        for target, *values in zip(own.values(), *copies, strict=True):
            agreed = torch.stack(values).mean(dim=0) if target.is_floating_point() else values[0]
            target.copy_(agreed)
        cards = [worker.card_nbytes[i] for worker in told]
        record.points.append(
            Point(
                step=step,
                seconds=max(worker.seconds[i] for worker in told),
                payload_nbytes=_mean([sum(worker.readings[i].payload_nbytes.values()) for worker in told]),
                card_nbytes=None if None in cards else _mean([float(card or 0) for card in cards]),
                values=plan.task.evaluate(model),
                method=told[0].readings[i].metrics,
            )
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
