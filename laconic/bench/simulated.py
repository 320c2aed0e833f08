"""Simulated runs of a comparison: the same training loop, on workers in one process and in virtual time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from laconic.bench.strategies import Contender, MethodStrategy
from laconic.simulate import simulate

if TYPE_CHECKING:
    from laconic.bench.run import Plan

T = TypeVar("T")

MEASURED_STEPS = 20


def run_simulated(train: Callable[..., T], contender: Contender, plan: Plan, *args: object) -> list[T]:
    """Runs the training loop on simulated workers. Returns their reports.

    Args:
        train: the training loop of one worker; called with the contender, the plan and `args`.
        contender: what is trained.
        plan: the settings; `plan.simulated` is the seconds that a step computes.

    Raises:
        ValueError: the contender is a baseline, or the link is "none".
        WorkerFailed: a worker failed.
    """
    require_simulable(contender, plan)
    assert plan.simulated is not None
    return simulate(train, plan.workers, contender, plan, *args, link=plan.link, compute=plan.simulated, seed=plan.seed)


def require_simulable(contender: Contender, plan: Plan) -> None:
    """Raises a ValueError if the contender is a baseline, or the link is "none"."""
    if not isinstance(contender.strategy, MethodStrategy):
        raise ValueError(
            f"{contender.label} must be a method of laconic to be simulated: baselines use torch.distributed, which "
            f"has no processes to connect; allreduce stands for ddp"
        )
    if plan.link == "none":
        raise ValueError("a simulation needs a link: add --link, such as --link 1gbit+50ms")


def measure_compute(plan: Plan) -> float:
    """Returns the seconds in which one worker of this machine, with one thread, computes a gradient and steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = plan.task.build_model()
        optimizer = plan.task.build_optimizer(model)
        shard = plan.task.load(0, plan.workers, plan.seed)
        seconds = []
        for step in range(MEASURED_STEPS):
            start = time.perf_counter()
            plan.task.backward(model, shard, step)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(seconds)
