"""Runs a function in several worker processes on this machine: for tests, notebooks and the command line."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, Protocol

import cloudpickle
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from laconic.comm import PeerError
from laconic.rules import check_count

# Imported once by the fork server, from which all workers of this process are forked: importing these takes seconds.
PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "laconic"]
# Seconds to wait for the worker that failed first, when the first report is of a worker that failed because of it.
PATIENCE = 1.0
STORE_PORT = 29500  # on an emulated host, which has a network stack of its own, in which every port is free
MOST_WORKERS = 1 << 12  # on one machine; more are a typing error
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's mallopt


class Host(Protocol):
    """A place for a worker process to run in, such as a host of an emulated network."""

    @property
    def address(self) -> str:
        """The IP address at which the other hosts reach this one."""

    @property
    def interface(self) -> str:
        """The network interface that carries the address, for GLOO_SOCKET_IFNAME."""

    def enter(self) -> None:
        """Moves the calling process to this host."""


class WorkerFailed(RuntimeError):
    """A worker process raised or was killed.

    Attributes:
        rank: the rank that failed first. The message has its traceback or the name of the signal.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass
class _Failure:
    rank: int
    text: str
    is_consequence: bool  # the worker failed because another one did


def spawn(
    fn: Callable[..., Any],
    workers: int,
    *args: Any,
    hosts: Sequence[Host] | None = None,
    nodes: int = 1,
    preload: Sequence[str] = (),
    spare_survivors: bool = False,
) -> list[Any]:
    """Runs `fn(*args)` in `workers` processes that find each other as torchrun's processes do.

    If a worker raises or is killed, the others are stopped at once, unless `spare_survivors` is set. No process is left
    behind, even when this one is interrupted or killed. The job's store is held outside of the workers, so that they
    may lose any of them. In a script, call `spawn` under `if __name__ == "__main__":`.

    Args:
        fn: the function; lambdas and functions of a notebook are fine.
        workers: the number of processes.
        *args: the arguments of `fn`, the same in every process.
        hosts: one place per worker to run in, such as the hosts of an emulated network (`laconic.emulate`). By default
            all workers run on this machine and communicate over loopback. With several nodes, one place per node.
        nodes: sets torchrun's variables as on so many machines, for `Worker(…, nodes="auto")`.
        preload: names of modules to import once, before the workers are forked. Only the first call of `spawn` in a
            process sets them; later calls fork from the same server.
        spare_survivors: let the others go on when a worker fails, as with `A2CiD2`, whose workers outlive lost ones.

    Returns:
        What `fn` returned, by rank. With `spare_survivors`, a `WorkerFailed` in place of what a worker would have
        returned that raised or was killed.

    Raises:
        WorkerFailed: a worker raised or was killed; with `spare_survivors` only if all did.

    >>> import os
    >>> import laconic
    >>> laconic.spawn(lambda power: int(os.environ["RANK"]) ** power, 3, 2)
    [0, 1, 4]
    """
    if not callable(fn):
        raise ValueError(f"fn must be a function, not {fn!r}")
    check_count("workers", workers, most=MOST_WORKERS)
    check_count("nodes", nodes, most=workers)
    if workers % nodes:
        raise ValueError(f"nodes must divide the number of workers, and {nodes} does not divide {workers}")
    places, what = (workers, "workers") if nodes == 1 else (nodes, "nodes")
    if hosts is not None and not (
        isinstance(hosts, Sequence) and len(hosts) == places and all(hasattr(host, "enter") for host in hosts)
    ):
        raise ValueError(f"hosts must be None or have one entry for each of the {places} {what}, not {hosts!r}")
    if isinstance(preload, str) or not (isinstance(preload, Sequence) and all(isinstance(m, str) for m in preload)):
        raise ValueError(f"preload must be a list of names of modules, not {preload!r}")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    _start_fork_server()
    job = cloudpickle.dumps((fn, args))
    processes: list[ForkServerProcess] = []
    pipes: list[Connection] = []

    def start(name: str, target: Callable[..., None], *arguments: Any) -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments), name=f"laconic-{name}", daemon=False)
        with _interrupts_later():  # a process that was started in part would print a traceback, or stay
            process.start()
            processes.append(process)
        theirs.close()
        pipes.append(ours)
        return ours

    try:
        if hosts is None:
            store = open_store("127.0.0.1", 0)
            address, port = "127.0.0.1", store.port
        else:  # this process cannot be reached from an emulated host
            address, port = hosts[0].address, STORE_PORT
            _await_store(start("store", _hold_store, hosts[0], address, port))
        for rank in range(workers):
            host = hosts[rank * places // workers] if hosts is not None else None
            interface = host.interface if host is not None else "lo"
            environment = _environment(rank, workers, nodes, address, port, interface)
            start(str(rank), _run, host, environment, job)
        results = _collect(processes[-workers:], pipes[-workers:], spare_survivors)
        for pipe in pipes:
            pipe.close()  # the process that holds the store stays until this
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


def _start_fork_server() -> None:
    """Starts the process from which workers are forked, unless it runs already.

    It and all workers ignore Ctrl-C, which a terminal sends to every process: this process ends them. Each would print
    a traceback otherwise.
    """
    resource_tracker.ensure_running()  # first of all: it unblocks SIGINT
    with _interrupts_later():
        forkserver.ensure_running()


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """A Ctrl-C inside the block takes effect at its end.

    Processes that are started inside inherit the blocked signal. In this process the system may give the signal to
    another thread, and Python would still interrupt the main one: so its handler is exchanged, too.
    """
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    exchanged = handler is not None and threading.current_thread() is threading.main_thread()
    if exchanged:
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if exchanged:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def open_store(address: str, port: int) -> TCPStore:
    """Returns a new key-value store, which this process holds, and by which the workers of a job find each other.

    Args:
        address: of this machine, at which workers reach the store; "" for all its addresses.
        port: 0 for a free one.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # By itself, torch would listen at all addresses.
    listener = socket.create_server((address, port), family=family, backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        address or "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _hold_store(pipe: Connection, host: Host, address: str, port: int) -> None:
    """Runs in a process of its own: holds the store until the launcher closes the pipe, or dies."""
    host.enter()
    try:
        store = open_store(address, port)
        pipe.send(None)
    except OSError as error:
        pipe.send(str(error))
        return
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    del store


def _await_store(pipe: Connection) -> None:
    try:
        error = pipe.recv()
    except (EOFError, OSError):
        error = "its process has ended"
    if error is not None:
        raise RuntimeError(f"the job's store cannot be opened on the first host: {error}")


def _environment(rank: int, workers: int, nodes: int, address: str, port: int, interface: str) -> dict[str, str]:
    """Returns the environment variables that torchrun would set."""
    node, place = divmod(rank, workers // nodes)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(place),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers // nodes),
        "GROUP_RANK": str(node),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
    }


def _run(pipe: Connection, host: Host | None, environment: dict[str, str], job: bytes) -> None:
    """Runs in the worker: calls the function and sends back ("result", …) or ("error", …)."""
    if host is not None:
        host.enter()  # first of all: the kernel moves one thread, so there must be no other yet
    done = threading.Event()
    launcher = threading.Thread(target=_watch_launcher, args=(pipe, done), daemon=True)
    launcher.start()
    os.environ.update(environment)
    torch.set_num_threads(1)
    _keep_freed_memory()
    try:
        fn, args = pickle.loads(job)
        report = ("result", cloudpickle.dumps(fn(*args)))
    except BaseException as error:  # noqa: BLE001  the launcher raises it again
        report = ("error", (traceback.format_exc(), isinstance(error, PeerError)))
    done.set()
    try:
        pipe.send(report)
    except BrokenPipeError:
        return  # the launcher was interrupted meanwhile, and nobody is left to be told
    if report[0] == "result":
        launcher.join()  # others may still read from the connections that would be closed with this process


def _keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next step, which needs as much again.

    By default glibc returns it to the kernel in some runs and keeps it in others. Where it is returned, getting zeroed
    pages again takes up to a quarter of a small model's step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the largest value glibc accepts
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def _watch_launcher(pipe: Connection, done: threading.Event) -> None:
    """Ends this process if the launcher dies: it never writes into the pipe, so reading ends when the pipe closes."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        if not done.is_set():
            os._exit(1)


def _collect(processes: list[ForkServerProcess], pipes: list[Connection], spare_survivors: bool) -> list[Any]:
    """Returns the results by rank; raises `WorkerFailed` for the first failure that is no consequence of another."""
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
                failures.append(_Failure(rank, _describe_exit(processes[rank]), False))
                continue
            if kind == "result":
                results[rank] = pickle.loads(content)
            else:
                failures.append(_Failure(rank, content[0], content[1]))
        if spare_survivors:
            continue
        if any(not failure.is_consequence for failure in failures):
            break
        if failures and deadline is None:
            deadline = time.monotonic() + PATIENCE
    errors = {
        failure.rank: WorkerFailed(failure.rank, f"worker {failure.rank} of {len(processes)} failed: {failure.text}")
        for failure in failures
    }
    if failures and not (spare_survivors and results):
        raise errors[min(failures, key=lambda failure: failure.is_consequence).rank]
    return [errors[rank] if rank in errors else results[rank] for rank in range(len(processes))]


def _describe_exit(process: ForkServerProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code} before its function returned"
