"""Starts the ranks of an attempt, causes the faults that come from outside, and collects what the ranks report."""

from __future__ import annotations

import functools
import heapq
import itertools
import multiprocessing as mp
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from laconic import launch
from laconic.emulate import Network
from laconic.launch import Host
from soak import rank as rank_module
from soak.plan import Attempt, Fault
from soak.rank import Assignment

EXTERNAL = ("pause", "cut_heal", "kill", "stop", "cut", "restart", "stop_store")  # caused by the launcher
PORT = 29500
START_SECONDS = 120.0  # for the ranks to start, and for the fork server to import torch and the kernels
_ports = itertools.count(20000 + os.getpid() % 10000)
_lock = threading.Lock()  # one process is forked at a time


@dataclass
class Log:
    """What one rank has reported in an attempt."""

    pid: int = 0
    origin: dict[str, Any] | None = None
    steps: dict[int, str] = field(default_factory=dict)  # the fingerprint of x after each step
    step_times: list[float] = field(default_factory=list)
    consensus: dict[int, str] = field(default_factory=dict)
    saving: dict[int, list[float]] = field(default_factory=dict)  # x, before each save()
    saved: list[int] = field(default_factory=list)
    not_saved: dict[int, tuple[float, str]] = field(default_factory=dict)
    phases: list[tuple[float, str, str]] = field(default_factory=list)  # (time, "enter" or "leave", phase)
    warnings: list[tuple[float, str]] = field(default_factory=list)
    error: tuple[float, str, str] | None = None  # (time, kind, text)
    end: dict[str, Any] | None = None
    ended_at: float | None = None  # the end of its process
    exit_code: int | None = None
    hung: bool = False  # its process had to be killed

    def add(self, what: str, when: float, details: dict[str, Any]) -> None:
        if what == "step":
            self.steps[details["step"]] = details["hash"]
            self.step_times.append(when)
        elif what == "consensus":
            self.consensus[details["step"]] = details["hash"]
        elif what == "saving":
            self.saving[details["step"]] = details["x"]
        elif what == "saved":
            self.saved.append(details["step"])
        elif what == "not saved":
            self.not_saved[details["step"]] = when, details["text"]
        elif what in ("enter", "leave"):
            self.phases.append((when, what, details["phase"]))
        elif what == "warning":
            self.warnings.append((when, details["text"]))
        elif what == "error":
            self.error = when, details["kind"], details["text"]
        elif what == "origin":
            self.origin = details
        elif what == "end":
            self.end = details


@dataclass
class Outcome:
    """What happened in an attempt.

    Args:
        logs: by rank.
        injected: when each fault happened, by its number.
        healed: when it was over, if it ended.
        started: when the ranks were started.
    """

    logs: list[Log]
    injected: dict[int, float] = field(default_factory=dict)
    healed: dict[int, float] = field(default_factory=dict)
    started: float = 0.0
    stacks: str = ""


class Job:
    """One attempt.

    Args:
        attempt: what to run.
        row: the name of the method's row.
        folder: of the episode.
        network: an emulated network for it; None for loopback.
        store_port: of the launcher's store, if that is used.
        number: of the attempt, as torchrun counts restarts.
        patience: seconds without any report, beyond the time-out, after which the ranks count as hanging.
        defect: see `Assignment`.
    """

    def __init__(
        self,
        attempt: Attempt,
        row: str,
        folder: Path,
        network: Network | None,
        store: TCPStore | None,
        number: int,
        patience: float,
        defect: str = "",
    ) -> None:
        self._attempt, self._network, self._patience = attempt, network, patience
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._pending = [fault for fault in attempt.faults if fault.kind in EXTERNAL]
        self._frozen: set[int] = set()  # ranks that are stopped for ever
        self._cut: set[int] = set()  # hosts
        self._last_report = 0.0
        self.outcome = Outcome([Log() for _ in range(attempt.workers)])
        self._store_process: Any = None
        environments = self._environments(store, number, folder)
        assignments = [Assignment(r, row, attempt, folder, e, defect) for r, e in enumerate(environments)]
        self._folder, self._assignments = folder, assignments
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self) -> Outcome:
        """Runs the attempt until the last of its processes has ended."""
        (self._folder / "disk" / "ballast").unlink(missing_ok=True)  # of a rank that was killed
        try:
            self._start()
            while any(process.is_alive() for process in self._processes):
                self._advance()
        finally:
            self._clean_up()
        return self.outcome

    # Starting

    def _environments(self, store: TCPStore | None, number: int, folder: Path) -> list[dict[str, str]]:
        attempt, hosts = self._attempt, self._hosts()
        port = store.port if store is not None else PORT + number if hosts is not None else _free_port()
        address = "127.0.0.1" if hosts is None else hosts[0].address
        if attempt.store == "host":
            assert self._network is not None
            address = self._network.hosts[-1].address
        common = {
            "WORLD_SIZE": str(attempt.workers),
            "LOCAL_WORLD_SIZE": str(attempt.workers),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(number),
            "TMPDIR": str(folder / "tmp"),
        }
        if attempt.store != "rank 0":
            common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        return [
            common | {"RANK": str(r), "LOCAL_RANK": str(r), "GLOO_SOCKET_IFNAME": hosts[r].interface if hosts else "lo"}
            for r in range(attempt.workers)
        ]

    def _hosts(self) -> Sequence[Host] | None:
        return None if self._network is None else self._network.hosts

    def _start(self) -> None:
        hosts = self._hosts()
        if self._attempt.store == "host":
            assert hosts is not None
            ours, theirs = mp.get_context("forkserver").Pipe()
            self._store_process = fork(_hold_store, theirs, hosts[-1], self._assignments[0].environment)
            theirs.close()
            self._pipes.append(ours)
            ours.poll(START_SECONDS)
        self.outcome.started = self._last_report = time.monotonic()
        for assignment, log in zip(self._assignments, self.outcome.logs, strict=True):
            ours, theirs = mp.get_context("forkserver").Pipe()
            host = None if hosts is None else hosts[assignment.rank]
            process = fork(rank_module.run, theirs, host, assignment)
            theirs.close()
            self._processes.append(process)
            self._pipes.insert(len(self._processes) - 1, ours)
            log.pid = process.pid

    # Running

    def _advance(self) -> None:
        """Waits for the next report, end of a process or timer, and handles it."""
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        until = self._timers[0][0] if self._timers else now + 0.5
        pipes = {
            self._pipes[r]: r for r, process in enumerate(self._processes) if self.outcome.logs[r].ended_at is None
        }
        for ready in wait(list(pipes), max(0.0, min(until - now, 0.5))):
            self._read(pipes[ready])  # type: ignore[index]
        self._release_if_over()
        self._kill_if_hanging()

    def _read(self, rank: int) -> None:
        log = self.outcome.logs[rank]
        try:
            what, when, details = self._pipes[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(10)
            log.ended_at, log.exit_code = time.monotonic(), self._processes[rank].exitcode
            self._last_report = time.monotonic()
            return
        self._last_report = time.monotonic()
        log.add(what, when, details)
        if what == "fault":
            self.outcome.injected[details["number"]] = when
            (fault,) = (f for f in self._attempt.faults if f.number == details["number"])
            if fault.kind == "restart_in":
                self._kill_all()
        elif what == "healed":
            self.outcome.healed[details["number"]] = when
        elif what == "step" or (what == "enter" and not log.steps):
            self._trigger(rank, details["step"])

    def _trigger(self, rank: int, step: int) -> None:
        due = [fault for fault in self._pending if fault.victim == rank and fault.step <= step]
        self._pending = [fault for fault in self._pending if fault not in due]
        for fault in due:
            self._after(fault.delay, functools.partial(self._inject, fault))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, id(act), act))

    def _inject(self, fault: Fault) -> None:
        log, victim = self.outcome.logs[fault.victim], self._processes[fault.victim]
        if fault.kind != "restart" and (log.ended_at is not None or log.end is not None or log.error is not None):
            return  # too late: the rank is done
        if fault.kind in ("pause", "stop"):
            os.kill(victim.pid, signal.SIGSTOP)
        elif fault.kind == "stop_store":
            os.kill(self._store_process.pid, signal.SIGSTOP)
        elif fault.kind in ("cut", "cut_heal"):
            assert self._network is not None
            self._network.cut(fault.victim)
            self._cut.add(fault.victim)
        self.outcome.injected[fault.number] = time.monotonic()
        if fault.kind == "kill":
            victim.kill()
        elif fault.kind == "restart":
            self._kill_all()
        elif fault.kind == "stop":
            self._frozen.add(fault.victim)
        elif fault.kind in ("pause", "cut_heal"):
            self._after(fault.seconds, lambda: self._heal(fault))

    def _heal(self, fault: Fault) -> None:
        if fault.kind == "pause":
            if self.outcome.logs[fault.victim].ended_at is None:
                os.kill(self._processes[fault.victim].pid, signal.SIGCONT)
        elif self._network is not None:
            self._network.heal(fault.victim)
            self._cut.discard(fault.victim)
        self.outcome.healed[fault.number] = time.monotonic()

    def _kill_all(self) -> None:
        for process in self._processes:
            process.kill()

    # Ending

    def _release_if_over(self) -> None:
        """Ends the ranks that only the launcher can end, once all others are done."""
        logs = self.outcome.logs
        holder = 0 if self._attempt.store == "rank 0" and logs[0].end is not None else None
        left = [r for r, log in enumerate(logs) if log.ended_at is None and r != holder]
        if set(left) <= self._frozen and left:
            for rank in left:
                self._frozen.discard(rank)
                stop = next(f for f in self._attempt.faults if f.kind == "stop" and f.victim == rank)
                if stop.seconds:
                    os.kill(self._processes[rank].pid, signal.SIGCONT)
                    self.outcome.healed[stop.number] = self._last_report = time.monotonic()
                else:
                    self._processes[rank].kill()
        elif not left and holder is not None and logs[holder].ended_at is None:
            self._pipes[holder].close()
            self._processes[holder].join(10)
            logs[holder].ended_at, logs[holder].exit_code = time.monotonic(), self._processes[holder].exitcode

    def _kill_if_hanging(self) -> None:
        logs = self.outcome.logs
        has_started = all(log.origin is not None for log in logs)
        limit = self._attempt.timeout + self._patience if has_started else START_SECONDS
        if time.monotonic() - self._last_report <= limit:
            return
        for rank, log in enumerate(logs):
            if log.ended_at is None and self._processes[rank].is_alive():
                log.hung = rank not in self._frozen
                os.kill(self._processes[rank].pid, signal.SIGUSR1)  # writes the stacks of its threads
        time.sleep(0.3)
        self.outcome.stacks = "\n".join(
            f"rank {rank}:\n{(self._folder / 'stacks' / str(log.pid)).read_text()[-6000:]}"
            for rank, log in enumerate(logs)
            if log.hung
        )
        self._kill_all()

    def _clean_up(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process, log in zip(self._processes, self.outcome.logs, strict=False):
            process.join()
            if log.ended_at is None:
                log.ended_at, log.exit_code = time.monotonic(), process.exitcode
        if self._store_process is not None:
            self._store_process.kill()
            self._store_process.join()
        if self._network is not None:
            for host in self._cut:
                self._network.heal(host)
        for pipe in self._pipes:
            pipe.close()


def _free_port() -> int:
    """Returns a port for a store that rank 0 will hold on loopback; below those that the kernel gives away itself."""
    while True:
        port = next(_ports)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def fork(target: Callable[..., None], *args: Any) -> Any:
    """Starts a process from the fork server, which has imported torch and loaded the kernels."""
    context = mp.get_context("forkserver")
    with _lock:
        context.set_forkserver_preload([*launch.PRELOAD, "laconic.preload", "soak.rank"])
        process = context.Process(target=target, args=args, daemon=False)
        process.start()
    return process


def _hold_store(pipe: Connection, host: Host, environment: dict[str, str]) -> None:
    """Holds the store on an emulated host of its own, as torchrun's agent does."""
    host.enter()
    store = TCPStore(host.address, int(environment["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    pipe.send("ready")
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        del store
