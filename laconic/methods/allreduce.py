"""Full communication: every step uses the mean gradient, as in plain data-parallel training."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.method import Method, Replica


@dataclass
class AllReduce(Method):
    """The mean gradient of all workers before each step; nothing overlaps with computing.

    A parameter that has no gradient on some ranks counts as zero there; one that has none anywhere stays without.
    Bytes a step and worker: 2(n−1)/n · 4(d + p), with p the number of parameter tensors (a flag each).
    `clip_grad_norm_` in the loop runs before the mean is taken: it clips each worker's own gradient.
    """

    def before_step(self, worker: Replica) -> None:
        packed = worker.pack_gradient()
        worker.unpack_gradient(worker.comm.mean(packed, out=packed))
