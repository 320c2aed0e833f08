"""Baselines for comparisons: what PyTorch itself offers, training without communication, and those of `peers`.

DDP's communication hooks run with a single bucket: gloo may send several buckets in an order that differs between
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.bench.baseline import Baseline, count_payload
from laconic.bench.peers import PEERS
from laconic.bench.strategies import Reading, Session
from laconic.rules import check_count

ONE_BUCKET_MB = 1 << 20


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

    paper: ClassVar[str] = "arXiv 1905.13727"

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
    paper: ClassVar[str] = "arXiv 1808.07217"

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
    **PEERS,
    "none": NoCommunication,
    "none_averaged": NoCommunicationAveraged,
}

WITHOUT_COMMUNICATION = ("none", "none_averaged")
"""A target that one of these baselines reaches does not show what communication buys."""
