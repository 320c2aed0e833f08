"""What one rank of an attempt runs: a training loop that reports all it sees, with the faults that it causes itself."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import laconic
from laconic.launch import Host
from soak.harm import Saboteur
from soak.plan import EVERY, Attempt
from soak.rows import BY_NAME, Task

PACE = 0.002  # seconds of every step, so that faults which the launcher causes find the ranks at work


@dataclass(frozen=True)
class Assignment:
    """What a rank has to do.

    Args:
        rank: its number.
        row: the name of the method's row.
        attempt: which the rank takes part in.
        folder: of the episode: "disk" has the checkpoints, "tmp" is for temporary files, "stacks" for debugging.
        environment: variables to set.
        defect: a defect of the method to plant, so that tests can see whether the soak finds it; empty for none.
    """

    rank: int
    row: str
    attempt: Attempt
    folder: Path
    environment: dict[str, str]
    defect: str = ""


def fingerprint(x: Tensor) -> str:
    return hashlib.blake2b(x.numpy().tobytes(), digest_size=8).hexdigest()


class Reporter:
    """Sends events to the launcher: (what, time, details). Threads may share it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def __call__(self, what: str, **details: Any) -> None:
        with self._lock:
            self._pipe.send((what, time.monotonic(), details))

    def warn(self, message: Warning | str, *_: Any, **__: Any) -> None:
        self("warning", text=str(message))


def run(pipe: Connection, host: Host | None, job: Assignment) -> None:
    """Runs in the process of a rank."""
    if host is not None:
        host.enter()
    os.environ.update(job.environment)
    stacks = open(job.folder / "stacks" / f"{os.getpid()}", "w")  # noqa: SIM115  open as long as the process
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    os.dup2(stacks.fileno(), 2)  # what torch writes about broken connections
    threading.Thread(target=_end_with_launcher, args=(pipe,), daemon=True).start()
    torch.set_num_threads(1)
    report = Reporter(pipe)
    warnings.simplefilter("always")
    warnings.showwarning = report.warn
    try:
        _train(job, report)
    except BaseException as error:  # noqa: BLE001  the launcher judges it
        if job.defect == "no error":
            return
        text = "no sign of life from rank 0" if job.defect == "wrong accusation" else str(error)
        report("error", kind=type(error).__name__, text=text)
        return
    if job.rank == 0 and job.attempt.store == "rank 0":
        threading.Event().wait()  # others may still read the store; ends with the launcher


def _end_with_launcher(pipe: Connection) -> None:
    """Ends the process when the launcher closes the pipe, into which it never writes."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)


def _train(job: Assignment, report: Reporter) -> None:
    row, task, directory = BY_NAME[job.row], Task(BY_NAME[job.row]), job.folder / "disk" / "checkpoint"
    saboteur = Saboteur([f for f in job.attempt.faults if f.victim == job.rank], report, job.folder / "disk")
    saboteur.at_start()
    with laconic.Worker(task.model, task.optimizer, row.method, timeout=job.attempt.timeout) as worker:
        report("started")
        if directory.exists() and any(directory.glob("*/manifest.json")):
            _phase(saboteur, report, "load", worker, lambda: worker.load(directory))
        report("origin", step=worker.step, x=worker.x.tolist(), hash=fingerprint(worker.x))
        while worker.step < job.attempt.until:
            _advance(worker, task, saboteur, report, job)
            if worker.step % EVERY == EVERY // 2:
                _phase(saboteur, report, "consensus", worker, lambda: _look(worker, report))
            if worker.step % EVERY == 0:
                _phase(saboteur, report, "save", worker, lambda: _save(worker, directory, report))
        report("enter", phase="end", step=worker.step)
        saboteur.enter("end", worker.step, worker)
    saboteur.leave("end")
    members = list(worker.comm.members)
    report("end", step=worker.step, x=worker.x.tolist(), hash=fingerprint(worker.x), members=members)


def _advance(worker: laconic.Worker, task: Task, saboteur: Saboteur, report: Reporter, job: Assignment) -> None:
    """Makes one step; a rank without data serves until the next phase."""
    if not worker.method.trains(worker.rank):
        worker.serve()
        return
    step = worker.step + 1
    time.sleep(PACE)
    saboteur.before_step(step)
    task.backward(worker.rank, step)
    saboteur.after_backward(step, worker)
    if job.defect and worker.rank == 1 and step == 6:
        _plant(job.defect, worker)
    task.optimizer.step()
    task.optimizer.zero_grad()
    report("step", step=step, hash=fingerprint(worker.x))


def _phase(saboteur: Saboteur, report: Reporter, phase: str, worker: laconic.Worker, act: Callable[[], object]) -> None:
    report("enter", phase=phase, step=worker.step)
    saboteur.enter(phase, worker.step, worker)
    act()
    saboteur.leave(phase)
    report("leave", phase=phase, step=worker.step)


def _look(worker: laconic.Worker, report: Reporter) -> None:
    with worker.consensus():
        report("consensus", step=worker.step, hash=fingerprint(worker.x))


def _save(worker: laconic.Worker, directory: Path, report: Reporter) -> None:
    report("saving", step=worker.step, x=worker.x.tolist())
    try:
        worker.save(directory)
    except OSError as error:  # as a user does who can go on without this checkpoint
        report("not saved", step=worker.step, text=str(error))
    else:
        report("saved", step=worker.step)


def _plant(defect: str, worker: laconic.Worker) -> None:
    """Defects that a soak must find; see tests/test_soak.py."""
    if defect == "silent change":  # as if a message had arrived damaged
        gradient = worker.parameters[0].grad
        assert gradient is not None
        gradient[0, 0] += 1e-3
    elif defect == "hang":
        time.sleep(3600)
    elif defect == "stray file":
        Path(os.environ["TMPDIR"], "stray").touch()
