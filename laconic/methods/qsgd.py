"""QSGD: full communication with gradients of few bits, rounded up or down by chance so that their mean is right.

Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
arXiv 1610.02132.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.compress import Uniform
from laconic.method import Method, Replica
from laconic.methods.coded_mean import coded_mean


@dataclass
class QSGD(Method):
    """The mean gradient of all workers before each step, in `bits` bits an entry and one scale a block of entries.

    Both the workers' gradients and their mean are rounded stochastically, so what the optimizer sees has the mean
    gradient as its expectation. A parameter that has no gradient on some ranks counts as zero there; one that has none
    anywhere stays without.
    Bytes a step and worker: 2(n−1)/n · (⌈d·bits/8⌉ + 4·blocks) + (n−1)·p, where p is the number of parameter tensors (a
    flag each), and each n-th of the vector has blocks of its own.
    """

    paper: ClassVar[str] = "arXiv 1610.02132"

    bits: int = 8
    block: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        self.quantizer()

    def quantizer(self) -> Uniform:
        return Uniform(self.bits, stochastic=True, block=self.block, seed=self.seed)

    def before_step(self, worker: Replica) -> None:
        if worker.comm.size == 1:
            return
        packed = worker.pack_gradient()
        gradient, flags = packed.tensor_split([worker.x.numel()])
        everyones_flags = coded_mean(
            worker.comm, gradient, self.quantizer(), step=worker.step, rider=flags.to(torch.uint8)
        )
        flags.copy_(torch.stack(everyones_flags).amax(dim=0))
        worker.unpack_gradient(packed)
