"""Gives methods access to one replica: its parameters, gradients and optimizer state as flat vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from laconic.comm import Comm, Meter
from laconic.flat import FlatParameters
from laconic.join import Join


class FlatReplica:
    """Implements `laconic.method.Replica`, which documents what is here. `laconic.Worker` adds the rest."""

    comm: Comm
    optimizers: list[torch.optim.Optimizer]
    step: int
    generator: torch.Generator
    _flat: FlatParameters
    _moment_names: list[str] | None = None
    _join: Join | None = None  # inside join()

    @property
    def x(self) -> Tensor:
        """All trained parameters as one vector (d), of which the model's parameters are views."""
        return self._flat.x

    @property
    def x_and_scalar(self) -> Tensor:
        return self._flat.x_and_scalar

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self._flat.parameters

    @property
    def numels(self) -> list[int]:
        return [p.numel() for p in self.parameters]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, without a framework's wrapper; the first one, if there are several."""
        return self.optimizers[0]

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def meter(self) -> Meter:
        """Payload bytes sent and seconds waited: `meter.total.nbytes("foreground")`, `meter.last_step.seconds()`, …"""
        return self.comm.meter

    @property
    def lr(self) -> float:
        if self._join is not None and self._join.is_done:
            return self._join.lr  # a scheduler of this rank has stopped
        return self._local_lr()

    def _local_lr(self) -> float:
        return max(float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups)

    @property
    def counted(self) -> list[int]:
        return list(range(self.size)) if self._join is None else self._join.counted

    @property
    def anyone_done(self) -> bool:
        return self._join is not None and self._join.anyone_done

    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return mean_of_counted(self.comm, self.counted, x, out)

    def pack_gradient(self) -> Tensor:
        return self._flat.pack_gradient()

    def unpack_gradient(self, packed: Tensor) -> None:
        self._flat.unpack_gradient(packed)

    def gradients(self) -> list[Tensor | None]:
        return self._flat.gradients()

    def views(self, vector: Tensor) -> list[Tensor]:
        return self._flat.views(vector)

    def gather_slices(self, values: Sequence[float]) -> list[Sequence[float]]:
        return [values]

    def moments(self) -> dict[str, Tensor]:
        if self._moment_names is None:
            # A rank whose parameters had no gradient yet has no optimizer state: use the names that any rank has.
            own = [self._flat.moment_names(), all(optimizer.state for optimizer in self.optimizers)]
            notes = self.comm.meet("averaging the optimizer's state", own)
            names = sorted({name for names, _ in notes for name in names})
            if not names and not all(has_state for _, has_state in notes):
                return {}  # some rank has had no gradient yet, so names may still appear
            self._moment_names = names
        return self._flat.moments(self._moment_names)


def mean_of_counted(comm: Comm, counted: Sequence[int], x: Tensor, out: Tensor | None) -> Tensor:
    """Averages x over the ranks that count, as `Replica.mean` does."""
    if len(counted) == comm.size:
        return comm.mean(x, out=out)
    own = x if comm.rank in counted else torch.zeros_like(x)
    return comm.mean(own, out=out).mul_(comm.size / len(counted))
