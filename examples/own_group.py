"""Trains in processes and in a process group that another engine has made: torch's mp.spawn, Ray Train or Slurm.

python examples/own_group.py               two processes by torch.multiprocessing.spawn
python examples/own_group.py --ray         by Ray Train (pip install 'ray[train]'), which makes the group itself
srun --ntasks 2 python examples/own_group.py --slurm       MASTER_ADDR and MASTER_PORT are set in the batch script
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import laconic


def train(_: object = None) -> None:
    """The user's function. The worker finds torch's default process group and uses it."""
    torch.manual_seed(0)
    model = nn.Linear(20, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with laconic.Worker(model, optimizer, laconic.Divisible()) as worker:
        data = torch.Generator().manual_seed(1 + worker.rank)
        for _ in range(200):
            x = torch.randn(32, 20, generator=data)
            loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        worker.average_(mean := loss.detach())
        if worker.rank == 0:
            print(f"step {worker.step} of {worker.size} workers: loss {mean:.3f}", flush=True)


def run(rank: int, size: int, address: str) -> None:
    """What an engine does in each process."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "--ray" in sys.argv:
        from ray.train import ScalingConfig
        from ray.train.torch import TorchTrainer

        TorchTrainer(train, train_loop_config={}, scaling_config=ScalingConfig(num_workers=2)).fit()
    elif "--slurm" in sys.argv:
        run(int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]), "env://")
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run, (2, f"file://{folder}/group"), nprocs=2)
