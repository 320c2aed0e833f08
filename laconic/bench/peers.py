"""What PyTorch itself offers, as it ships it: the alternatives that methods are compared with.

gloo sends the buckets of DDP's hooks in an order that may differ between ranks, so the hooks run with one bucket.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.bench.ways import Joined, Reading
from laconic.method import check_count

ONE_BUCKET_MB = 1 << 20


@dataclass
class Peer:
    is_peer = True
    averages = True

    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @contextmanager
    def join(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Joined]:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        d = sum(p.numel() for p in model.parameters() if p.requires_grad)
        ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        yield self.wrap(model, optimizer, 4 * d * ring)
        dist.barrier()

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, full_nbytes: float) -> Joined:
        """`full_nbytes`: what one worker sends to all-reduce all gradients once."""
        raise NotImplementedError


def counting(optimizer: torch.optim.Optimizer, nbytes_of_step: Any) -> Any:
    """A reading whose payload follows from the number of steps made."""
    sent = {"foreground": 0.0, "steps": 0.0}

    def count(*_: Any) -> None:
        sent["steps"] += 1
        sent["foreground"] += nbytes_of_step(int(sent["steps"]))

    optimizer.register_step_post_hook(count)
    return lambda: Reading({"foreground": sent["foreground"]}, None, None, {})


@dataclass
class DDP(Peer):
    """DistributedDataParallel: the mean gradient in fp32, sent while the backward pass goes on."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, full_nbytes: float) -> Joined:
        return Joined(DistributedDataParallel(model), optimizer, counting(optimizer, lambda step: full_nbytes))


@dataclass
class DDPHalf(Peer):
    """DDP with torch's fp16 compression hook."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, full_nbytes: float) -> Joined:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        return Joined(wrapped, optimizer, counting(optimizer, lambda step: full_nbytes / 2))


@dataclass
class PowerSGD(Peer):
    """DDP with torch's PowerSGD hook: gradients as products of thin matrices, with error feedback."""

    rank: int = 2
    start: int = 2  # steps in full precision before; torch allows no fewer

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_count("start", self.start, least=2)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, full_nbytes: float) -> Joined:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=self.rank, start_powerSGD_iter=self.start, min_compression_rate=1
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        sent = {"foreground": 0.0, "before": 0.0, "steps": 0.0}
        d = sum(p.numel() for p in model.parameters() if p.requires_grad)

        def count(*_: Any) -> None:
            sent["steps"] += 1
            if sent["steps"] <= self.start:
                sent["foreground"] += full_nbytes
                return
            compressed = float(state.compression_stats()[2])  # type: ignore[no-untyped-call]  # numbers sent so far in compressed steps
            sent["foreground"] += full_nbytes / d * (compressed - sent["before"])
            sent["before"] = compressed

        optimizer.register_step_post_hook(count)
        return Joined(wrapped, optimizer, lambda: Reading({"foreground": sent["foreground"]}, None, None, {}))


@dataclass
class PostLocalSGD(Peer):
    """torch's post-local SGD: full communication for `start` steps, then parameters averaged every `period` steps."""

    period: int = 8
    start: int = 0

    def __post_init__(self) -> None:
        check_count("period", self.period)
        check_count("start", self.start, least=0)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, full_nbytes: float) -> Joined:
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
            PostLocalSGDState,
            post_localSGD_hook,
        )
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        alone, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]  # one worker a machine: nobody to average with in between
        wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
        state = PostLocalSGDState(None, alone, start_localSGD_iter=self.start)  # type: ignore[no-untyped-call]
        wrapped.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=self.period, warmup_steps=self.start)

        def nbytes_of_step(step: int) -> float:
            if step <= self.start:
                return full_nbytes
            return full_nbytes if (step - 1 - self.start) % self.period == 0 else 0.0

        return Joined(wrapped, PostLocalSGDOptimizer(optimizer, averager), counting(optimizer, nbytes_of_step))


@dataclass
class Alone(Peer):
    """No communication at all: the time that computing takes. The model judged is rank 0's own."""

    averages = False

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, full_nbytes: float) -> Joined:
        return Joined(model, optimizer, lambda: Reading({}, 0.0, 0.0, {}))


PEERS: dict[str, type[Peer]] = {
    "ddp": DDP,
    "ddp_fp16": DDPHalf,
    "powersgd": PowerSGD,
    "post_local_sgd": PostLocalSGD,
    "none": Alone,
}
