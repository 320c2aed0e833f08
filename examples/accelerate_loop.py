"""Trains on scikit-learn's digits with Accelerate; only the three lines marked (*) are laconic's.

accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py runs/accelerate      again: continues
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laconic  # (*)
from laconic.integrations.accelerate import LaconicWorker  # (*)

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=10)
arguments = parser.parse_args()

pixels, labels = load_digits(return_X_y=True)
pixels, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
held_out = torch.arange(len(labels)) % 5 == 0
loader = DataLoader(TensorDataset(pixels[~held_out], labels[~held_out]), batch_size=16, shuffle=True)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.epochs * len(loader))
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

with LaconicWorker(accelerator, model, optimizer, laconic.Divisible()) as worker:  # (*)
    done = [int(path.name) for path in arguments.out.glob("*") if path.name.isdigit()]  # epochs
    if done:
        accelerator.load_state(str(arguments.out / str(max(done))))
    for epoch in range(max(done, default=0), arguments.epochs):
        loader.set_epoch(epoch)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        with worker.consensus(), torch.no_grad():  # the averaged model, on all ranks
            accuracy = (model(pixels[held_out]).argmax(dim=1) == labels[held_out]).float().mean()
        accelerator.save_state(str(arguments.out / str(epoch + 1)))
        accelerator.print(f"epoch {epoch + 1}: accuracy {accuracy:.1%}")
