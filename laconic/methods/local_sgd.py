"""Local SGD (periodic averaging, also CPSGD): workers train alone and average their parameters every `period` steps.

Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.compress import Compressor
from laconic.forms import Form, Whole
from laconic.method import Replica, check_choice, check_count
from laconic.methods.averaging import Averaging, Moments, check_compressor


@dataclass
class LocalSGD(Averaging):
    """Runs local steps and averages the parameters every `period` steps.

    It is ADPSGD with a constant period.

    Args:
        period: local steps between two rounds of averaging.
        moments: `"averaged"` also averages the optimizer's state (momentum, Adam's m and v), uncompressed.
        moments_every: rounds between two averages of the optimizer's state.
        compressor: quantizes what is sent, with error feedback; such as `Uniform(4)`.

    Bytes per round and worker are those of ADPSGD, and so is the rule for another number of workers.

    >>> import torch, laconic
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.Worker(model, optimizer, laconic.LocalSGD(period=2)) as worker:
    ...     for _ in range(5):
    ...         model(torch.ones(3)).backward()
    ...         optimizer.step()
    >>> worker.method.rounds
    2
    """

    paper: ClassVar[str] = "arXiv 1805.09767"

    period: int = 8
    moments: Moments = "local"
    compressor: Compressor | None = None
    moments_every: int = 1

    def __post_init__(self) -> None:
        check_count("period", self.period)
        check_choice("moments", self.moments, ("local", "averaged"))
        check_count("moments_every", self.moments_every)
        check_compressor(self.compressor)

    def setup(self, worker: Replica) -> None:
        self.prepare(worker, self.compressor)

    def state_forms(self, step: int) -> dict[str, Form]:
        return super().state_forms(step) | {"steps_since_round": Whole(0, self.period - 1)}

    def sends(self, worker: Replica) -> bool:
        return self.steps_since_round + 1 >= self.period

    def after_step(self, worker: Replica) -> None:
        self.steps_since_round += 1
        if self.steps_since_round == self.period:
            self.average(worker, self.moments, self.compressor, self.moments_every)

    def metrics(self) -> dict[str, float]:
        return {"period": float(self.period)} | super().metrics()
