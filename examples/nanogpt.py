"""Trains a small character-level GPT: accumulation, cosine schedule, clipping, torch.compile, resuming, best model.

torchrun --nproc-per-node 2 examples/nanogpt.py runs/nanogpt                      laconic's own source code as text
torchrun --nproc-per-node 2 examples/nanogpt.py runs/plays --text input.txt      that of `laconic data shakespeare`
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import laconic
from laconic.tasks.transformer import CharacterModel

CONTEXT, ACCUMULATE = 64, 2
parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--text", type=Path)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--compile", action="store_true")
arguments = parser.parse_args()
texts = [arguments.text] if arguments.text else sorted(Path(laconic.__file__).parent.rglob("*.py"))
data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in texts)), dtype=torch.uint8).long()
train, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def loss_at(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    rows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


torch.manual_seed(0)
model = CharacterModel(256, width=64, layers=2, heads=4)
model = torch.compile(model) if arguments.compile else model
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
with laconic.Worker(model, optimizer, laconic.Divisible()) as worker:
    best = float("inf")
    if (arguments.out / "state").exists():
        best = (state := worker.load(arguments.out / "state"))["best"]
        schedule.load_state_dict(state["schedule"])
    while worker.step < arguments.steps:
        drawn = torch.Generator().manual_seed(worker.step * worker.size + worker.rank)  # other data on each rank
        for starts in torch.randint(len(train) - CONTEXT, (ACCUMULATE, 8), generator=drawn):
            (loss_at(train, starts) / ACCUMULATE).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if worker.step % 20 == 0:
            with worker.consensus(), torch.no_grad():  # the averaged model, on all ranks
                worker.average_(loss := loss_at(held_out, torch.arange(0, len(held_out) - CONTEXT, 997)))
            if loss < best:
                worker.export(arguments.out / "best.pt")
            best = min(best, loss.item())
            worker.save(arguments.out / "state", {"best": best, "schedule": schedule.state_dict()})
            if worker.rank == 0:
                print(f"step {worker.step}: held-out loss {loss:.3f}, best {best:.3f}")
