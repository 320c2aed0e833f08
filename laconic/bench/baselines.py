"""Baselines for comparisons: what PyTorch itself offers, DiLoCo, and training without communication.

DDP's communication hooks run with a single bucket: gloo may send several buckets in an order that differs between
ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.bench.strategies import Reading, Session
from laconic.rules import check_count, check_number

ONE_BUCKET_MB = 1 << 20


@dataclass
class Baseline:
    """The base class of baselines; a `Strategy` over torch.distributed with the gloo backend."""

    is_baseline = True
    averages = True
    apart = False
    """Whether workers hold different models, to be averaged once at the end. Under DDP only rounding differs."""

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
            session.average = partial(average_models, model)
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


def average_models(model: nn.Module) -> None:
    """Computes the mean of all workers' parameters, with one all-reduce. The model is not changed."""
    dist.all_reduce(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


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


@dataclass
class DDP(Baseline):
    """DistributedDataParallel: averages fp32 gradients during the backward pass."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, allreduce_nbytes: float) -> Session:
        read = count_payload(optimizer, lambda step: allreduce_nbytes)
        return Session(DistributedDataParallel(model), optimizer, read)


@dataclass
class DDPHalf(Baseline):
    """DDP with PyTorch's fp16 compression hook."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, allreduce_nbytes: float) -> Session:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        return Session(wrapped, optimizer, count_payload(optimizer, lambda step: allreduce_nbytes / 2))


@dataclass
class PowerSGD(Baseline):
    """DDP with PyTorch's PowerSGD hook: low-rank gradient compression with error feedback.

    Args:
        rank: The rank of the approximation.
        start: Uncompressed steps at the beginning; PyTorch requires at least 2.

    References:
        Vogels et al. 2019, https://arxiv.org/abs/1905.13727
    """

    rank: int = 2
    start: int = 2

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_count("start", self.start, least=2)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, allreduce_nbytes: float) -> Session:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=self.rank, start_powerSGD_iter=self.start, min_compression_rate=1
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        d = sum(p.numel() for p in model.parameters() if p.requires_grad)
        compressed_before = 0.0

        def nbytes_of_step(step: int) -> float:
            nonlocal compressed_before
            if step <= self.start:
                return allreduce_nbytes
            # The third entry is the number of values sent so far in compressed steps.
            compressed = float(state.compression_stats()[2])  # type: ignore[no-untyped-call]
            nbytes = allreduce_nbytes / d * (compressed - compressed_before)
            compressed_before = compressed
            return nbytes

        return Session(wrapped, optimizer, count_payload(optimizer, nbytes_of_step))


@dataclass
class PostLocalSGD(Baseline):
    """PyTorch's post-local SGD: DDP for `start` steps, then local steps with parameters averaged every `period` steps.

    Args:
        period: Local steps between two averages.
        start: Steps with full communication at the beginning.

    References:
        Lin et al. 2018, https://arxiv.org/abs/1808.07217
    """

    apart = True

    period: int = 8
    start: int = 0

    def __post_init__(self) -> None:
        check_count("period", self.period)
        check_count("start", self.start, least=0)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, allreduce_nbytes: float) -> Session:
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
            PostLocalSGDState,
            post_localSGD_hook,
        )
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        # The hook averages gradients within a machine. Here every worker is a machine of its own: groups of one.
        alone, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
        wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
        state = PostLocalSGDState(None, alone, start_localSGD_iter=self.start)  # type: ignore[no-untyped-call]
        wrapped.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=self.period, warmup_steps=self.start)

        def nbytes_of_step(step: int) -> float:
            if step <= self.start:
                return allreduce_nbytes
            return allreduce_nbytes if (step - 1 - self.start) % self.period == 0 else 0.0

        return Session(wrapped, PostLocalSGDOptimizer(optimizer, averager), count_payload(optimizer, nbytes_of_step))


@dataclass
class DiLoCo(Baseline):
    """DiLoCo, written plainly: `period` local steps, then a Nesterov step on the averaged difference.

    Communication blocks and is in fp32. Streaming DiLoCo (fragments that are sent in the background, 4 bits per entry;
    arXiv 2501.18512) is not implemented.

    With θ the parameters after the last outer step and θᵢ those of worker i after `period` steps of the task's
    optimizer, Δ = mean(θ − θᵢ) is the gradient of an outer SGD with Nesterov momentum; all workers continue from its
    result. Each worker keeps the state of its inner optimizer. The paper's inner optimizer is AdamW.

    Args:
        period: Local steps between two outer steps (H in the paper).
        outer_lr: The learning rate of the outer optimizer.
        outer_momentum: Its Nesterov momentum; 0 for none.

    References:
        Douillard et al. 2023, https://arxiv.org/abs/2311.08105
    """

    apart = True

    period: int = 8
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        check_count("period", self.period)
        check_number("outer_lr", self.outer_lr, above=0)
        check_number("outer_momentum", self.outer_momentum, least=0, most=1)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, allreduce_nbytes: float) -> Session:
        parameters = [p for p in model.parameters() if p.requires_grad]
        start = [p.detach().clone() for p in parameters]
        outer = torch.optim.SGD(start, lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.outer_momentum > 0)
        steps = 0

        def synchronize(*_: Any) -> None:
            nonlocal steps
            steps += 1
            if steps % self.period:
                return
            difference = torch.cat([(s - p.detach()).flatten() for s, p in zip(start, parameters, strict=True)])
            dist.all_reduce(difference)
            difference /= dist.get_world_size()
            _step(outer, start, difference)
            with torch.no_grad():
                for parameter, value in zip(parameters, start, strict=True):
                    parameter.copy_(value)

        optimizer.register_step_post_hook(synchronize)
        read = count_payload(optimizer, lambda step: 0.0 if step % self.period else allreduce_nbytes)
        return Session(model, optimizer, read)


def _step(outer: torch.optim.Optimizer, start: list[Tensor], gradient: Tensor) -> None:
    """Makes one step of the outer optimizer, given its gradient as one flat vector."""
    parts = gradient.split([value.numel() for value in start])  # type: ignore[no-untyped-call]
    for value, part in zip(start, parts, strict=True):
        value.grad = part.view_as(value)
    outer.step()


@dataclass
class NoCommunication(Baseline):
    """Workers never communicate, and rank 0's model is evaluated: one worker alone, and the time of computing only."""

    averages = False

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, allreduce_nbytes: float) -> Session:
        return Session(model, optimizer, lambda: Reading({}, 0.0, 0.0, {}))


@dataclass
class NoCommunicationAveraged(NoCommunication):
    """Workers never communicate, and the mean of all workers' models is evaluated.

    Methods that let workers drift apart are evaluated as this mean too, so it is their fair baseline: averaging the
    models once can gain accuracy even if workers never communicated.
    """

    averages = True
    apart = True


BASELINES: dict[str, type[Baseline]] = {
    "ddp": DDP,
    "ddp_fp16": DDPHalf,
    "powersgd": PowerSGD,
    "post_local_sgd": PostLocalSGD,
    "diloco": DiLoCo,
    "none": NoCommunication,
    "none_averaged": NoCommunicationAveraged,
}

WITHOUT_COMMUNICATION = ("none", "none_averaged")
"""A target that one of these baselines reaches does not show what communication buys."""
