"""The methods of the soak, with settings that make them act within a few steps, and the task they are trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import laconic
from laconic.compress import Log, Uniform

LR = 0.05


@dataclass(frozen=True)
class Row:
    """One method in one mode.

    Args:
        name: in records.
        method: with its settings.
        deterministic: an undisturbed run, repeated or resumed, gives the same bits on every rank.
        identical: x is the same on all ranks after every step.
        gossips: ranks that are lost are dropped, and the others go on.
        in_flight: messages are in flight, or moves are due, between steps. If another number of workers loads a
            checkpoint, they are applied then, which moves the mean of all models.
    """

    name: str
    method: laconic.Method
    deterministic: bool = True
    identical: bool = False
    gossips: bool = False
    in_flight: bool = False

    def trains(self, rank: int) -> bool:
        return self.method.trains(rank)


ROWS = [
    Row("allreduce", laconic.AllReduce(), identical=True),
    Row("qsgd", laconic.QSGD(bits=4, seed=3), identical=True),
    Row("local_sgd", laconic.LocalSGD(period=3, moments="averaged")),
    Row("local_sgd, 4 bits", laconic.LocalSGD(period=2, compressor=Uniform(4))),
    Row("diloco", laconic.DiLoCo(period=3)),
    Row("diloco, streaming", laconic.DiLoCo(4, fragments=2, delay=3, compressor=Uniform(4)), in_flight=True),
    Row("adpsgd", laconic.ADPSGD(initial_period=2, warmup=2, calibration=2)),
    Row("adpsgd, 3 bits", laconic.ADPSGD(initial_period=2, calibration=4, max_period=3, compressor=Log(3))),
    Row("efficient_adam", laconic.EfficientAdam(exact_below=10, moments="averaged", moments_every=4)),
    Row("efficient_adam, server", laconic.EfficientAdam(server=0, up=Uniform(8), down=Uniform(8))),
    Row("efficient_adam, dedicated", laconic.EfficientAdam(server=0, dedicated=True)),
    Row("efficient_adam, delay", laconic.EfficientAdam(delay=2), in_flight=True),
    Row("divisible", laconic.Divisible(ratio=8, period=4), in_flight=True),
    Row("divisible, two hops", laconic.Divisible(ratio=8, period=3, corrected=True, hops=2, delay=2), in_flight=True),
    Row("divisible, auto", laconic.Divisible(), deterministic=False, in_flight=True),
    Row("a2cid2, synchronous", laconic.A2CiD2(background=False), in_flight=True),
    Row("a2cid2", laconic.A2CiD2("complete", rate=0.5, slack=4), deterministic=False, gossips=True, in_flight=True),
]
BY_NAME = {row.name: row for row in ROWS}


class Task:
    """A small regression with other data on each rank.

    If the row is not deterministic, the gradient does not depend on x. The sum of all local steps is then known, and so
    is the mean of all models, which such methods must conserve however their messages are timed.
    """

    def __init__(self, row: Row) -> None:
        torch.manual_seed(0)
        self.is_linear = not row.deterministic
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        if self.is_linear:
            self.model = nn.Linear(60, 1, bias=False)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        else:
            self.model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 2))
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def backward(self, rank: int, step: int) -> None:
        if self.is_linear:
            (next(self.model.parameters()) * gradient(rank, step)).sum().backward()  # type: ignore[no-untyped-call]
            return
        generator = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(8, 6, generator=generator) + 0.3 * rank
        nn.functional.mse_loss(self.model(x), x[:, :2].sin()).backward()  # type: ignore[no-untyped-call]


def gradient(rank: int, step: int) -> Tensor:
    """The gradient of the linear task."""
    return torch.randn(60, generator=torch.Generator().manual_seed(1000 * rank + step))


def local_steps(rank: int, first: int, last: int) -> Tensor:
    """Returns how far plain SGD moves a rank of the linear task from step `first` to step `last`, both included."""
    return -LR * torch.stack([gradient(rank, step).double() for step in range(first, last + 1)]).sum(0)
