"""Trains a small model on several workers and evaluates the average of their models.

python examples/quickstart.py                                    one worker
torchrun --nproc-per-node 4 examples/quickstart.py               four on this machine
"""

import torch
from torch import nn

import laconic

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

with laconic.Worker(model, optimizer, laconic.LocalSGD(period=8)) as worker:
    # Each worker needs its own data. Here it is random; with a dataset, use DistributedSampler(rank=worker.rank, …).
    data = torch.Generator().manual_seed(1 + worker.rank)
    for step in range(200):
        x = torch.randn(32, 20, generator=data)
        y = x[:, :1] * x[:, 1:2]
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

        if step % 50 == 49:
            with worker.consensus(), torch.no_grad():
                x = torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))
                loss = nn.functional.mse_loss(model(x), x[:, :1] * x[:, 1:2])
            if worker.rank == 0:
                print(f"step {step + 1}: loss {loss:.4f}, sent {worker.meter.total.nbytes('foreground') / 1e6:.2f} MB")

if worker.rank == 0:
    torch.save(model.state_dict(), "quickstart.pt")  # after the block every rank holds the averaged model
