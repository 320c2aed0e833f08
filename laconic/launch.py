"""Run a function in several worker processes on this machine: for tests, notebooks and the command line."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, Protocol

import cloudpickle
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from laconic.comm import PeerError

# What workers import before they fork, once for all runs of this process: it takes seconds, forking does not.
PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "laconic"]
# When one worker fails, the others fail because of it. The first report may be theirs: seconds to wait for the cause.
PATIENCE = 1.0
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers for mallopt


class Host(Protocol):
    """A place for a worker to run in, such as an emulated host."""

    @property
    def address(self) -> str: ...

    @property
    def interface(self) -> str: ...

    def enter(self) -> None:
        """Move the calling process there."""


class WorkerFailed(RuntimeError):
    """A worker raised or was killed; `rank` says which, the message has its traceback or signal."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass
class _Failure:
    rank: int
    text: str
    is_consequence: bool


def spawn(
    fn: Callable[..., Any],
    workers: int,
    *args: Any,
    link: str = "none",
    hosts: Sequence[Host] | None = None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Run `fn(*args)` in `workers` processes that see each other as torchrun's do; their results by rank.

    A worker that raises or is killed ends the run at once: the others are stopped, and `WorkerFailed` has its
    traceback or signal. No process is left behind, also when this one is interrupted or killed. Functions may be
    lambdas or come from a notebook. In a script, call it under `if __name__ == "__main__":`.

    With a `link` such as "100mbit" each worker runs on an emulated host of its own behind such a link, see
    `laconic.emulate`; `hosts` are those of a network that is open already. What the first call in this process names in
    `preload` (modules) is imported once for all workers, also those of later calls.
    """
    if link != "none":
        if hosts is not None:
            raise ValueError(f"give either link or hosts, not both: a link ({link}) makes hosts of its own")
        from laconic.emulate import Network, parse_links

        with Network(parse_links(link, workers)) as network:
            return spawn(fn, workers, *args, hosts=network.hosts, preload=preload)
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ValueError(f"workers must be a whole number, at least 1, not {workers!r}")
    if hosts is not None and len(hosts) != workers:
        raise ValueError(f"there must be one host for each of {workers} workers, not {len(hosts)}")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    job = cloudpickle.dumps((fn, args))
    # On loopback the store lives here, so that it outlives every worker. Emulated hosts cannot reach this process:
    # there the store lives in rank 0.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if hosts is None else None
    processes: list[ForkServerProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(workers):
            ours, theirs = context.Pipe()
            environment = _environment(rank, workers, store, hosts)
            host = hosts[rank] if hosts is not None else None
            process = context.Process(
                target=_run, args=(theirs, host, environment, job), name=f"laconic-{rank}", daemon=False
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        results = _collect(processes, pipes)
        for pipe in pipes:
            pipe.close()  # all are done: now they may go
        for process in processes:
            process.join(PATIENCE)
        return results
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join()
        for pipe in pipes:
            pipe.close()


def _environment(rank: int, workers: int, store: TCPStore | None, hosts: Sequence[Host] | None) -> dict[str, str]:
    """What torchrun would set."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    if store is not None:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    if hosts is not None:
        # Each emulated host is a network of its own: any port is free.
        environment |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
        environment |= {"GLOO_SOCKET_IFNAME": hosts[rank].interface}
    return environment


def _run(pipe: Connection, host: Host | None, environment: dict[str, str], job: bytes) -> None:
    """In the worker: do the job and send back ("result", …) or ("error", …)."""
    if host is not None:
        host.enter()  # before any thread is there
    done = threading.Event()
    launcher = threading.Thread(target=_watch_launcher, args=(pipe, done), daemon=True)
    launcher.start()
    os.environ.update(environment)
    torch.set_num_threads(1)
    _keep_freed_memory()
    try:
        fn, args = pickle.loads(job)
        report = ("result", cloudpickle.dumps(fn(*args)))
    except BaseException as error:  # noqa: BLE001  whatever it is, the launcher raises it
        report = ("error", (traceback.format_exc(), isinstance(error, PeerError)))
    done.set()
    pipe.send(report)
    launcher.join()  # rank 0 may hold the store that others still need


def _keep_freed_memory() -> None:
    """For the next step, which needs as much again. glibc may give it back to the kernel in each step or in none, as
    chance has it; to get it anew, cleared, is up to a quarter of a small model's step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the largest that it takes
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def _watch_launcher(pipe: Connection, done: threading.Event) -> None:
    """The launcher never writes into the pipe: reading ends when it closes the pipe, or is gone."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        if not done.is_set():
            os._exit(1)


def _collect(processes: list[ForkServerProcess], pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    waiting = dict(enumerate(pipes))
    deadline: float | None = None
    while waiting:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        ready = set(wait(list(waiting.values()), left))
        for rank, pipe in list(waiting.items()):
            if pipe not in ready:
                continue
            del waiting[rank]
            try:
                kind, content = pipe.recv()
            except (EOFError, ConnectionResetError):
                processes[rank].join()
                failures.append(_Failure(rank, _how_it_ended(processes[rank]), False))
                continue
            if kind == "result":
                results[rank] = pickle.loads(content)
            else:
                failures.append(_Failure(rank, content[0], content[1]))
        if any(not failure.is_consequence for failure in failures):
            break
        if failures and deadline is None:
            deadline = time.monotonic() + PATIENCE
    if failures:
        first = min(failures, key=lambda failure: failure.is_consequence)
        raise WorkerFailed(first.rank, f"worker {first.rank} of {len(processes)} failed: {first.text}")
    return [results[rank] for rank in range(len(processes))]


def _how_it_ended(process: ForkServerProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code} before its function returned"
