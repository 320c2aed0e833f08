"""Checks now and then that all workers step with the same learning rate and the same settings of their optimizer."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from laconic.comm import Pending
from laconic.method import Replica

EVERY = 16  # steps
NAMES = ("lr", "betas", "eps", "weight_decay", "momentum")


class SettingsCheck:
    """Compares a checksum over all ranks, in the background: it is sent in one step and looked at in the next."""

    def __init__(self, worker: Replica) -> None:
        self._pending: tuple[int, Pending[list[Tensor]], list[str]] | None = None

    def after_step(self, worker: Replica) -> None:
        self.finish(worker)
        if worker.step % EVERY == 1:
            settings = [describe(group) for group in worker.optimizer.param_groups]
            checksum = torch.tensor([zlib.crc32(repr(settings).encode())], dtype=torch.int64, device=worker.x.device)
            self._pending = worker.step, worker.comm.all_gather_async(checksum), settings

    def finish(self, worker: Replica) -> None:
        """Raises ValueError on every rank if settings differed in the last check."""
        if self._pending is None:
            return
        step, pending, settings = self._pending
        self._pending = None
        if len({int(checksum) for checksum in pending.wait()}) == 1:
            return
        notes = worker.comm.meet("optimizer settings that differ", settings)
        found = "; ".join(
            f"rank {rank}: {', '.join(note)}" for rank, note in zip(worker.comm.members, notes, strict=True)
        )
        raise ValueError(
            f"all ranks must step with the same optimizer settings, and at step {step} they differ: {found}. Give "
            f"every rank the same learning rates and the same schedule"
        )


def describe(group: dict[str, Any]) -> str:
    """Returns the settings of a parameter group that must not differ between ranks.

    >>> describe({"lr": 0.1, "momentum": 0.9, "params": []})
    'lr=0.1 momentum=0.9'
    """
    return " ".join(f"{name}={_number(group[name])}" for name in NAMES if name in group)


def _number(value: Any) -> Any:
    """A learning rate may be a tensor."""
    return float(value) if isinstance(value, Tensor) else value
