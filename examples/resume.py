"""Saves a checkpoint every 20 steps, and resumes from the last one by itself when it is started again.

torchrun --nproc-per-node 2 --max-restarts 3 examples/resume.py runs/resume

docs/restarts.md says how Slurm and Kubernetes start it again.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

import laconic

directory = Path(sys.argv[1])
stop = int(sys.argv[2]) if len(sys.argv) > 2 else 60
torch.manual_seed(0)
model = nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

with laconic.Worker(model, optimizer, laconic.LocalSGD(period=4, moments="averaged")) as worker:
    try:
        lowest = worker.load(directory)["lowest"]
    except FileNotFoundError:  # on all ranks: the first start, or it ended before the first checkpoint
        lowest = float("inf")
    print(f"process {os.getpid()}, rank {worker.rank} continues after step {worker.step}", flush=True)
    while worker.step < stop:
        # A batch depends only on step and rank, so a resumed run sees the same data as one without interruption.
        data = torch.Generator().manual_seed(1000 * worker.step + worker.rank)
        x = torch.randn(16, 20, generator=data)
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lowest = min(lowest, loss.item())
        if worker.step % 20 == 0:
            worker.save(directory, {"lowest": lowest})
    worker.export(directory / "model.pt")
    print(f"rank {worker.rank} is at step {worker.step}, lowest loss {lowest:.4f}", flush=True)
