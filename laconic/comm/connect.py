"""Finds the other workers: by torchrun's environment, or in a process group that the user has made."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from laconic.comm.attempt import own_store
from laconic.comm.comm import Comm, PeerError
from laconic.comm.distributed import DistributedComm
from laconic.comm.meter import Meter
from laconic.comm.register import Register
from laconic.comm.solo import Solo
from laconic.comm.staged import StagedComm
from laconic.log import warn

# Variables of launchers that start several processes, but do not set what torch.distributed needs to connect them.
_LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# Workers may start seconds apart, while they import and load. The time-out for steps may be shorter than that.
ARRIVAL_SECONDS = 60.0
# Connects a worker that shares its process with others. Set in the context of each of them, by what runs them.
IN_PROCESS: ContextVar[Callable[[], Comm] | None] = ContextVar("laconic_connect", default=None)


def connect(device: torch.device, timeout: float) -> Comm:
    """Connects this worker to the others, and returns the foreground channel.

    Initialises torch.distributed unless the user has; it stays initialised afterwards.

    Args:
        device: of the tensors. Where torch.distributed has a backend for it (NCCL for "cuda", …), the foreground uses
            that. Other tensors of devices travel through host memory.
        timeout: seconds after which a wait for another worker fails.

    Returns:
        A `Solo` if this process was not started by torchrun, or if there is only one worker.

    Raises:
        PeerError: a worker did not come in time.

    >>> connect(torch.device("cpu"), timeout=60.0).size
    1
    """
    in_process = IN_PROCESS.get()
    if in_process is not None:
        return in_process()
    if not dist.is_available():
        _warn_if_launched()
        return Solo()
    patience = max(timeout, ARRIVAL_SECONDS)
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            _warn_if_launched()
            return Solo()
        own = device_backend(device)
        _initialise("gloo" if own is None else f"cpu:gloo,{device.type}:{own}", patience)
    if dist.get_world_size() == 1:
        return Solo()
    store = dist.distributed_c10d._get_default_store()
    register = Register(store, dist.get_rank(), dist.get_world_size(), timeout)
    try:
        register.start(patience)
        own = device_backend(device)
        if device.type == "cpu" or own is not None:
            return DistributedComm("foreground", register, Meter(), own or "gloo", device=device)
        # A thread starts the messages, as soon as the device has written them, so they must move without the worker.
        channel = DistributedComm("foreground", register, Meter(), "gloo", device=device, background=True)
        return StagedComm(channel, device, timeout)
    except (PeerError, ValueError) as error:
        register.fail(str(error))
        raise


def device_backend(device: torch.device) -> str | None:
    """Returns the backend of torch.distributed for a device's own memory, or None if there is none.

    >>> device_backend(torch.device("cpu")) is None
    True
    """
    backend = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    return backend if backend not in ("gloo", "fake") and dist.is_backend_available(backend) else None


def expected_size() -> int:
    """Returns the number of workers that `connect` would find, without waiting for any."""
    if not dist.is_available():
        return 1
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= set(os.environ) else 1


def _initialise(backend: str, seconds: float) -> None:
    """Calls torch on a thread: its functions have a time-out for ranks that do not come, but none for the store."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            limit = timedelta(seconds=seconds)
            store, rank, size = next(rendezvous("env://", timeout=limit))
            store = own_store(store, rank, size, seconds)
            dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)
        except Exception as error:  # noqa: BLE001  raised again below
            errors.append(error)

    thread = threading.Thread(target=run, name="laconic-start", daemon=True)
    thread.start()
    thread.join(seconds + 1)
    if errors:
        raise errors[0]
    if thread.is_alive():
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise PeerError(f"rank {os.environ['RANK']}: the job's store at {where} did not answer for {seconds:g} s")


def _warn_if_launched() -> None:
    for name in _LAUNCHERS:
        if os.environ.get(name, "1") != "1":
            warn(
                f"{name}={os.environ[name]} but RANK and WORLD_SIZE are not set: this worker runs alone. "
                f"Start the script by torchrun to train together",
                stacklevel=4,
            )
