"""Trains a small ResNet and evaluates the exponential moving average (EMA) of its weights, averaged over workers.

torchrun --nproc-per-node 2 examples/resnet_ema.py                 scikit-learn's digits
torchrun --nproc-per-node 2 examples/resnet_ema.py --data cifar10  after `laconic data cifar10`
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import laconic
from laconic.tasks.data import DATASETS

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="digits")
parser.add_argument("--epochs", type=int, default=10)
arguments = parser.parse_args()
if arguments.data == "digits":
    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
else:
    arrays = DATASETS[arguments.data].arrays()
    pixels, labels = torch.tensor(arrays["x_train"]).permute(0, 3, 1, 2) / 255, torch.tensor(arrays["y_train"]).long()
held_out = torch.arange(len(labels)) % 5 == 0


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        parts = [part for _ in range(2) for part in (nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))]
        self.body = nn.Sequential(*parts[:2], nn.ReLU(), *parts[2:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x + self.body(x))


torch.manual_seed(0)
ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
model = nn.Sequential(nn.Conv2d(pixels.shape[1], 32, 3, padding=1), Block(32), nn.MaxPool2d(2), Block(32), *ends)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
with laconic.Worker(model, optimizer, laconic.Divisible()) as worker:
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)  # of this worker's weights
    sampler = DistributedSampler(data := TensorDataset(pixels[~held_out], labels[~held_out]), worker.size, worker.rank)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=32, sampler=sampler):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model)
        averaged = {n: v.clone() for n, v in ema.module.eval().state_dict().items() if v.is_floating_point()}
        worker.average_(averaged.values())  # over workers; each goes on with its own
        found = torch.func.functional_call(ema.module, averaged, (pixels[held_out],)).argmax(dim=1)
        if worker.rank == 0:
            print(f"epoch {epoch}: accuracy of the averaged EMA {(found == labels[held_out]).float().mean():.1%}")
