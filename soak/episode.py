"""Runs episodes: attempts one after another, undisturbed runs to compare with, and what is left behind."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import shutil
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typing_extensions import Self

from laconic.emulate import Network, parse_links
from soak import leftovers
from soak.job import Job, Outcome, fork
from soak.judge import Anchor, Record, Reference, find_inconsistencies, judge, mean_of, note_of
from soak.plan import HOSTS, STEPS, Attempt, Episode, Fault
from soak.rows import BY_NAME, Row

LOG = logging.getLogger("soak")
CALM_SECONDS = 60.0  # the time-out of undisturbed runs
DISK_NBYTES = 4 << 20
LOAD_TOLERANCE = 1e-6  # of the mean of all models


class Runner:
    """Runs episodes, several at the same time if threads share it.

    Args:
        folder: for all files of the episodes.
        slots: how many emulated networks to open: as many as episodes that run at the same time.
        patience: see `Job`.
        defect: see `Assignment`; undisturbed runs do not have it.
    """

    def __init__(self, folder: Path, slots: int, *, patience: float = 25.0, defect: str = "") -> None:
        self._folder, self._patience, self.defect = folder, patience, defect
        self._slots = slots
        self._stack = ExitStack()
        self._networks: queue.SimpleQueue[Network] = queue.SimpleQueue()
        self._namespaces: list[Any] = []
        self._references: dict[tuple[str, int], Reference] = {}
        self._locks: dict[tuple[str, int], threading.Lock] = {}
        self._guard = threading.Lock()
        self._stalls: list[tuple[float, float]] = []  # (time, seconds)
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        leftovers.adopt_orphans()
        for _ in range(self._slots):
            network = self._stack.enter_context(Network(parse_links("1gbit", HOSTS)))
            self._namespaces += [host.network_namespace for host in network.hosts]
            self._networks.put(network)
        fork(_nothing).join()  # starts the fork server
        self._children = leftovers.children()
        self._clock = threading.Thread(target=self._watch_clock, daemon=True)
        self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._clock.join()
        self._stack.close()

    def _watch_clock(self) -> None:
        """Measures how long this process was kept from running: a sign that the machine was too busy to judge times."""
        while not self._closing.is_set():
            before = time.monotonic()
            self._closing.wait(0.05)
            with self._guard:
                self._stalls.append((before, time.monotonic() - before - 0.05))
                del self._stalls[:-100_000]

    def _longest_stall(self, since: float) -> float:
        with self._guard:
            return max((seconds for when, seconds in self._stalls if when >= since), default=0.0)

    def find_namespaces(self) -> list[int]:
        """Returns processes that are still in a network of this runner, after its end."""
        return leftovers.processes_in(self._namespaces)

    def run(self, episode: Episode) -> list[dict[str, Any]]:
        """Runs an episode, and returns one record for each fault that happened."""
        folder = self._folder / f"{episode.seed}-{episode.index}"
        network = self._networks.get() if episode.emulated else None
        try:
            with _disk(folder):
                return self._attempts(episode, folder, network)
        except Exception:  # noqa: BLE001  a failure of the soak itself must show in its result
            return [_describe(episode, 0, episode.attempts[0], None, "soak failed", traceback.format_exc())]
        finally:
            if network is not None:
                self._networks.put(network)
            shutil.rmtree(folder, ignore_errors=True)

    def _attempts(self, episode: Episode, folder: Path, network: Network | None) -> list[dict[str, Any]]:
        row, checkpoint = episode.method, folder / "disk" / "checkpoint"
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        reference: Reference | None = None
        waiting: list[Record] = []  # for a later attempt to resume
        judged: list[tuple[int, Attempt, Record, dict[str, Any]]] = []
        saved = _Saves()
        before: Attempt | None = None
        anchor: Anchor | None = None
        for number, attempt in enumerate(episode.attempts):
            has_checkpoint = checkpoint.exists() and any(checkpoint.glob("*/manifest.json"))
            resized = before is not None and before.workers != attempt.workers
            if row.deterministic and (before is None or resized):
                source = checkpoint if has_checkpoint else None
                reference = self._reference(episode, attempt.workers, source, folder.with_suffix(".calm"))
            agent = store if attempt.store == "launcher" else None
            job = Job(attempt, row.name, folder, network, agent, number, self._patience, self.defect)
            outcome = job.run()
            LOG.info("episode %d, attempt %d: %s", episode.index, number, _narrate(attempt, outcome))
            anchor = saved.find_anchor(row, attempt, outcome) or anchor
            records = judge(row, attempt, outcome, reference, anchor)
            if resized:
                records.append(Record(Fault(-1, "resize", -1, saved.newest), row.gossips))
                waiting.append(records[-1])
            resumed = self._check_resumed(row, attempt, outcome, reference, saved, waiting)
            waiting = [] if resumed else waiting
            saved.add(attempt, outcome)
            left = self._left_behind(
                folder, network, outcome, checkpoint if number + 1 == len(episode.attempts) else None
            )
            details = {
                "stall": round(self._longest_stall(outcome.started), 2),
                "ranks": [note_of(log) for log in outcome.logs],
            }
            for record in records:
                record.check("clean", not left, "; ".join(left))
                judged.append((number, attempt, record, details))
                if "resumed" in record.required and record.fault.kind != "resize":
                    waiting.append(record)
            before = attempt
        return [
            _describe(episode, number, attempt, record, record.verdict, details)
            for number, attempt, record, details in judged
            if record.fault.kind != "none" or record.verdict != "ok"
        ]

    def _check_resumed(
        self,
        row: Row,
        attempt: Attempt,
        outcome: Outcome,
        reference: Reference | None,
        saved: _Saves,
        waiting: list[Record],
    ) -> bool:
        """Checks that all ranks have resumed from the newest checkpoint. Returns whether they have come that far."""
        origins = [log.origin for log in outcome.logs if log.origin is not None]
        if not waiting or len(origins) < attempt.workers:
            return False
        wrong = find_inconsistencies(row, attempt, outcome, reference)
        steps = {origin["step"] for origin in origins}
        if len(steps) != 1 or not saved.newest <= min(steps) <= saved.begun:
            wrong.append(f"resumed at step {steps}, and saved at {saved.newest} (begun: {saved.begun})")
        elif min(steps) > 0 and not (row.in_flight and saved.workers[min(steps)] != attempt.workers):
            mean = mean_of([origin["x"] for rank, origin in enumerate(origins) if row.trains(rank)])
            away = (mean - mean_of(saved.values[min(steps)])).abs().max().item()
            if away > LOAD_TOLERANCE:
                wrong.append(f"the mean of all models is off by {away:.2g} after load()")
        for record in waiting:
            record.check("resumed", not wrong, "; ".join(wrong[:3]))
            if record.fault.kind == "resize":
                record.check("consistent", not wrong)
        return True

    def _left_behind(
        self, folder: Path, network: Network | None, outcome: Outcome, checkpoint: Path | None
    ) -> list[str]:
        left = [f"temporary file {name}" for name in leftovers.files_in(folder / "tmp")]
        left += [f"process {pid}" for pid in leftovers.children() - self._children]
        left += [f"shared memory {name}" for name in leftovers.shared_memory_of([log.pid for log in outcome.logs])]
        if network is not None:
            left += [f"socket of {name}" for name in leftovers.open_sockets(network)]
        if checkpoint is not None:
            left += [f"incomplete checkpoint {name}" for name in leftovers.bad_checkpoints(checkpoint)]
        return left

    def _reference(self, episode: Episode, workers: int, checkpoint: Path | None, folder: Path) -> Reference:
        """Returns an undisturbed run from the start, or from a copy of a checkpoint."""
        key = episode.row, workers
        if checkpoint is not None:
            return self._calm_run(episode, workers, checkpoint, folder)
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._references:
                self._references[key] = self._calm_run(episode, workers, None, folder)
        return self._references[key]

    def _calm_run(self, episode: Episode, workers: int, checkpoint: Path | None, folder: Path) -> Reference:
        for name in ("disk", "tmp", "stacks"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        try:
            if checkpoint is not None:
                shutil.copytree(checkpoint, folder / "disk" / "checkpoint")
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            attempt = Attempt(workers, CALM_SECONDS, "launcher", ())
            outcome = Job(attempt, episode.row, folder, None, store, 0, self._patience).run()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        logs = outcome.logs
        wrong = find_inconsistencies(BY_NAME[episode.row], attempt, outcome, None)
        if wrong or any(log.end is None for log in logs):
            notes = [note_of(log) for log in logs]
            raise RuntimeError(f"the undisturbed run of {episode.row} with {workers} workers failed: {wrong} {notes}")
        for log in logs:
            if log.origin is not None and log.steps:
                log.steps[log.origin["step"]] = log.origin["hash"]
        end = logs[0].end
        assert end is not None
        return Reference([log.steps for log in logs], [log.consensus for log in logs], end["hash"], STEPS)


def _narrate(attempt: Attempt, outcome: Outcome) -> str:
    faults = [f"{f.kind}@{f.step} on {f.victim}" for f in attempt.faults if f.number in outcome.injected]
    ranks = [f"{r}: {log.error[1] if log.error else log.end and 'end'}" for r, log in enumerate(outcome.logs)]
    seconds = max(log.ended_at or 0.0 for log in outcome.logs) - outcome.started
    return f"{seconds:.1f} s; {', '.join(faults)}; {', '.join(ranks)}"


class _Saves:
    """The checkpoints of an episode."""

    def __init__(self) -> None:
        self.newest = 0  # the last step that all ranks have saved
        self.begun = 0  # the last step that a rank has begun to save
        self.values: dict[int, list[list[float]]] = {}  # x of the ranks that train, by step
        self.workers: dict[int, int] = {}  # that began to save, by step

    def find_anchor(self, row: Row, attempt: Attempt, outcome: Outcome) -> Anchor | None:
        """Returns the start of this attempt, if the mean of all models counts from there."""
        origins = [log.origin for log in outcome.logs if log.origin is not None]
        steps = {origin["step"] for origin in origins}
        if len(origins) < attempt.workers or len(steps) != 1:
            return None
        (step,) = steps
        if row.gossips or step == 0 or self.workers.get(step) != attempt.workers:
            return Anchor(step, mean_of([origin["x"] for origin in origins]))
        return None

    def add(self, attempt: Attempt, outcome: Outcome) -> None:
        complete = set.intersection(*(set(log.saved) for log in outcome.logs))
        self.newest = max(self.newest, max(complete, default=0))
        for step in {step for log in outcome.logs for step in log.saving}:
            self.begun = max(self.begun, step)
            self.workers[step] = attempt.workers
            if all(step in log.saving for log in outcome.logs):  # else no checkpoint can be complete
                self.values[step] = [log.saving[step] for log in outcome.logs if log.steps]


def _nothing() -> None:
    pass


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Makes the folders of an episode; "disk" is a small file system of its own, so that it can be full."""
    for name in ("disk", "tmp", "stacks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    libc, disk = ctypes.CDLL(None, use_errno=True), os.fsencode(folder / "disk")
    if libc.mount(b"soak", disk, b"tmpfs", 0, f"size={DISK_NBYTES}".encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount a file system for checkpoints ({os.strerror(number)}): run as root")
    try:
        yield
    finally:
        if libc.umount2(disk, 2):  # MNT_DETACH
            raise OSError(ctypes.get_errno(), f"cannot unmount {folder / 'disk'}")


def _describe(
    episode: Episode, number: int, attempt: Attempt, record: Record | None, verdict: str, details: Any
) -> dict[str, Any]:
    """Returns the line of JSON of a fault."""
    line: dict[str, Any] = {
        "seed": episode.seed,
        "episode": episode.index,
        "attempt": number,
        "method": episode.row,
        "workers": attempt.workers,
        "network": "emulated" if episode.emulated else "loopback",
        "store": attempt.store,
        "timeout": attempt.timeout,
    }
    if record is not None:
        fault = record.fault
        line |= {
            "fault": fault.kind,
            "number": fault.number,
            "when": f"step {fault.step}"
            if fault.phase == "step"
            else f"{fault.phase} ({fault.point}), step {fault.step}",
            "victim": fault.victim,
            "seconds": round(max(record.seconds.values()), 3) if record.seconds else None,
            "seconds_by_rank": {rank: round(seconds, 3) for rank, seconds in record.seconds.items()},
            "named": record.named,
            "checks": record.checks,
        }
    line["verdict"] = verdict
    if verdict not in ("ok", "superseded"):
        line |= {"notes": record.notes if record is not None else [], "details": details}
    return line
