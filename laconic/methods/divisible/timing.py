"""How long work takes, and messages of which only the latency counts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from laconic.comm import Comm


def now(comm: Comm, device: torch.device | None) -> float:
    """Returns the time, when a device has done what it was given; with None, at once."""
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)
    return comm.now()


def time_work(comm: Comm, device: torch.device | None, work: Callable[[], None]) -> float:
    """Does the work; returns the seconds it took, without those of waiting for others. `device`: as in `now`."""
    start, waited = now(comm, device), comm.meter.current_step.seconds()
    work()
    return max(0.0, now(comm, device) - start - (comm.meter.current_step.seconds() - waited))


def time_empty(comm: Comm, device: torch.device, *, is_quantized: bool, is_waited_for: bool) -> float:
    """Returns the seconds that an average of nothing takes, by the verb of quantized or of fp32 averages."""
    start = now(comm, device)
    if is_quantized:
        comm.all_gather(torch.zeros(1, dtype=torch.uint8, device=device))
    elif is_waited_for:
        comm.mean(torch.zeros(1, device=device))
    else:
        comm.mean_async(torch.zeros(1, device=device)).wait()
    return now(comm, device) - start
