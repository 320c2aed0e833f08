"""Find the other workers: torchrun's environment, a group the user has made, or nobody."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from laconic.comm.comm import Comm, PeerError
from laconic.comm.distributed import DistributedComm
from laconic.comm.meter import Meter
from laconic.comm.register import Register
from laconic.comm.solo import Solo

# Launchers that say how many processes they start, but not what torch.distributed needs to find them.
_LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# Workers start seconds apart, as their hosts import and load: no time-out for steps is meant for that.
ARRIVAL_SECONDS = 60.0


def connect(device: torch.device, timeout: float) -> Comm:
    """The foreground channel. Initialises torch.distributed where the user has not; it stays so afterwards."""
    if not dist.is_available():
        _warn_if_launched()
        return Solo()
    patience = max(timeout, ARRIVAL_SECONDS)
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            _warn_if_launched()
            return Solo()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=patience))
    if dist.get_world_size() == 1:
        return Solo()
    store = dist.distributed_c10d._get_default_store()
    register = Register(store, dist.get_rank(), dist.get_world_size(), timeout)
    try:
        register.meet("the start", 0, None, timeout=patience)
        register.look_for_failure("the start")  # of one that has come before, and has given up
        return DistributedComm("foreground", register, Meter(), "nccl" if device.type == "cuda" else "gloo")
    except PeerError as error:
        register.fail(str(error))
        raise


def _warn_if_launched() -> None:
    for name in _LAUNCHERS:
        if os.environ.get(name, "1") != "1":
            warnings.warn(
                f"{name}={os.environ[name]} but RANK and WORLD_SIZE are not set: this worker runs alone. "
                f"Launch the script by torchrun to train together",
                stacklevel=4,
            )
