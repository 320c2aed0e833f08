"""Full communication: every step uses the mean gradient, as in plain synchronous data-parallel training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from laconic.method import Method, Replica


@dataclass
class AllReduce(Method):
    """Averages the gradients of all workers before each step; communication does not overlap with computing.

    A parameter without a gradient on some ranks counts as zero there; a parameter without a gradient on any rank keeps
    none. `clip_grad_norm_` in the training loop runs before the average, so it clips each worker's local gradient.

    Bytes per step and worker: 2(n−1)/n · 4(d + p), with p the number of parameter tensors (one flag each).

    >>> import torch, laconic
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.Worker(model, optimizer, laconic.AllReduce()) as worker:
    ...     model(torch.ones(3)).backward()
    ...     optimizer.step()
    """

    steps_alike: ClassVar[bool] = True

    def setup(self, worker: Replica) -> None:
        self._bits = 8.0 * worker.x.element_size()

    def before_step(self, worker: Replica) -> None:
        packed = worker.pack_gradient()
        worker.unpack_gradient(worker.mean(packed, out=packed))

    def unsliceable(self) -> None:
        return None

    def sent_until(self, worker: Replica) -> int:
        return worker.step

    def common(self, worker: Replica) -> Literal["x"]:
        return "x"

    def metrics(self) -> dict[str, float]:
        return {"period": 1.0, "bits": self._bits}
