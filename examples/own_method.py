"""Defines a communication method: averages the parameters, at first rarely and then more often.

torchrun --nproc-per-node 2 examples/own_method.py
"""

from dataclasses import dataclass

import torch
from torch import nn

import laconic


@dataclass
class Shrinking(laconic.Method):
    """Averages the parameters; each interval between averages is one step shorter than the previous one."""

    first: int = 10  # a setting: steps until the first average
    interval: int = laconic.state(0)  # state, which is saved with the worker
    steps_left: int = laconic.state(0)

    def setup(self, worker: laconic.Replica) -> None:
        self.interval = self.steps_left = self.first

    def after_step(self, worker: laconic.Replica) -> None:
        self.steps_left -= 1
        if self.steps_left == 0:
            worker.comm.mean(worker.x, out=worker.x)
            self.interval = self.steps_left = max(1, self.interval - 1)


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
