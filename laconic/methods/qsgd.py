"""QSGD: synchronous data-parallel training with stochastically quantized gradients.

Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
arXiv 1610.02132.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from laconic.comm.coded_mean import CodedMean, split
from laconic.compress import Uniform, bits_per_entry
from laconic.method import Method, Replica, kernels_of


@dataclass
class QSGD(Method):
    """Averages the gradients of all workers before each step, in `bits` bits per entry and one scale per block.

    Both the workers' gradients and their mean are rounded stochastically, so the expectation of the gradient that the
    optimizer sees is the mean gradient. A parameter without a gradient on some ranks counts as zero there; a parameter
    without a gradient on any rank keeps none.

    Args:
        bits: bits per entry, from 2 to 8.
        block: entries per scale (the largest magnitude of the block, in fp32).
        seed: of the stochastic rounding.

    Bytes per step and worker: 2(n−1)/n · (⌈d·bits/8⌉ + 4·blocks) + (n−1)·p, where p is the number of parameter tensors
    (one flag each), and each n-th of the vector has blocks of its own.

    >>> import laconic
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with laconic.Worker(model, optimizer, laconic.QSGD(bits=4)) as worker:
    ...     model(torch.ones(3)).backward()
    ...     optimizer.step()
    """

    paper: ClassVar[str] = "arXiv 1610.02132"
    steps_alike: ClassVar[bool] = True

    bits: int = 8
    block: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        self.quantizer()

    def quantizer(self) -> Uniform:
        return Uniform(self.bits, stochastic=True, block=self.block, seed=self.seed)

    def kernels(self, numel: int, workers: int) -> set[str]:
        return kernels_of(self.quantizer())

    def setup(self, worker: Replica) -> None:
        parts = split(0, worker.x.numel(), owners=range(worker.comm.size))
        self._mean = CodedMean(worker.comm, parts, self.quantizer(), name="gradient")

    def before_step(self, worker: Replica) -> None:
        if worker.comm.size == 1:
            return
        packed = worker.pack_gradient()
        gradient, flags = packed.tensor_split([worker.x.numel()])
        gathered = worker.comm.all_gather_async(flags.to(torch.uint8))
        self._mean.average(gradient, step=worker.step, counted=worker.counted, out=gradient)
        flags.copy_(torch.stack(gathered.wait()).amax(dim=0))
        worker.unpack_gradient(packed)

    def unsliceable(self) -> None:
        return None

    def sent_until(self, worker: Replica) -> int:
        return worker.step

    def common(self, worker: Replica) -> Literal["x"]:
        return "x"

    def metrics(self) -> dict[str, float]:
        return {"period": 1.0, "bits": bits_per_entry(self.quantizer())}
