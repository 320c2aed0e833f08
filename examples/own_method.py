"""A method of one's own: average the parameters, seldom at first and more often later.

torchrun --nproc-per-node 2 examples/own_method.py
"""

from dataclasses import dataclass

import torch
from torch import nn

import laconic


@dataclass
class Shrinking(laconic.Method):
    """The mean of the parameters after ever fewer steps: each pause is one step shorter than the one before."""

    first: int = 10  # a setting
    length: int = laconic.state(0)  # state: saved with the worker
    left: int = laconic.state(0)

    def setup(self, worker: laconic.Replica) -> None:
        self.length = self.left = self.first

    def after_step(self, worker: laconic.Replica) -> None:
        self.left -= 1
        if self.left == 0:
            worker.comm.mean(worker.x, out=worker.x)
            self.length = self.left = max(1, self.length - 1)


model = nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with laconic.Worker(model, optimizer, Shrinking()) as worker:
    for _ in range(100):
        x = torch.randn(16, 20)
        nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
if worker.rank == 0:
    print(f"averaged {worker.meter.total.calls('foreground', 'mean')} times, sent {worker.meter.total.nbytes()} bytes")
