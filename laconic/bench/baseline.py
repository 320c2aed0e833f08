"""The base class of baselines: strategies over torch.distributed, without laconic's worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from laconic.bench.strategies import Reading, Session


@dataclass
class Baseline:
    """The base class of baselines; a `Strategy` over torch.distributed with the gloo backend."""

    is_baseline = True
    averages = True
    apart = False
    """Whether workers hold different models, to be averaged once at the end. Under DDP only rounding differs."""
    needs: ClassVar[str | None] = None
    """The package of an extra that this baseline needs, if any."""
    paper: ClassVar[str] = ""
    """Where the method was published, if it was."""

    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @contextmanager
    def join(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        d = sum(p.numel() for p in model.parameters() if p.requires_grad)
        ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        session = self.wrap(model, optimizer, 4 * d * ring)
        if self.apart:
            session.average = partial(average_models, model, 4 * d * ring)
        yield session
        dist.barrier()

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, allreduce_nbytes: float) -> Session:
        """Returns the session in which the replica trains.

        Args:
            model: The bare model.
            optimizer: Its optimizer.
            allreduce_nbytes: The bytes that one worker sends in one ring all-reduce of all fp32 gradients.
        """
        raise NotImplementedError


def average_models(model: nn.Module, nbytes: float) -> float:
    """Computes the mean of all workers' parameters, with one all-reduce of so many bytes. The model is not changed."""
    dist.all_reduce(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return nbytes


def count_payload(optimizer: torch.optim.Optimizer, nbytes_of_step: Callable[[int], float]) -> Callable[[], Reading]:
    """Returns a function that reads the payload sent so far.

    Args:
        optimizer: Its steps are counted.
        nbytes_of_step: The bytes that one worker sends in a step; steps are counted from 1.
    """
    sent = {"foreground": 0.0, "steps": 0.0}

    def count(*_: Any) -> None:
        sent["steps"] += 1
        sent["foreground"] += nbytes_of_step(int(sent["steps"]))

    optimizer.register_step_post_hook(count)
    return lambda: Reading({"foreground": sent["foreground"]}, None, None, {})
