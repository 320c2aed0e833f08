"""Trains on scikit-learn's handwritten digits; each worker reads its own part of the data.

python examples/digits.py                                  one worker
torchrun --nproc-per-node 4 examples/digits.py             four on this machine
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import laconic

torch.manual_seed(0)
device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"

pixels, labels = load_digits(return_X_y=True)  # 1797 images of 8 × 8 pixels
pixels, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
held_out = torch.arange(len(labels)) % 5 == 0
train_set = TensorDataset(pixels[~held_out], labels[~held_out])
test_pixels, test_labels = pixels[held_out].to(device), labels[held_out].to(device)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

with laconic.Worker(model, optimizer, laconic.Divisible()) as worker:
    sampler = DistributedSampler(train_set, num_replicas=worker.size, rank=worker.rank)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler, drop_last=True)
    for epoch in range(10 * worker.size):  # 440 steps, with one worker, two or four
        sampler.set_epoch(epoch)  # else every epoch has the same order
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with worker.consensus(), torch.no_grad():  # on all ranks: the averaged model
            accuracy = (model(test_pixels).argmax(dim=1) == test_labels).float().mean()
        if worker.rank == 0:
            sent = worker.meter.total  # the traffic of the steps, without that of evaluations
            sent_mb = (sent.nbytes("foreground") + sent.nbytes("background")) / 1e6
            print(f"epoch {epoch}: accuracy {accuracy:.1%}, step {worker.step}, {sent_mb:.2f} MB sent")

if worker.rank == 0:
    torch.save(model.state_dict(), "digits.pt")  # after the block: the averaged model
