"""Trains a small character-level GPT: accumulation, cosine schedule, clipping, torch.compile, resuming, best model.

torchrun --nproc-per-node 2 examples/nanogpt.py --out runs/nanogpt                   laconic's own source code as text
torchrun --nproc-per-node 2 examples/nanogpt.py --out runs/plays --text input.txt    that of `laconic data shakespeare`
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn

import laconic

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--text", type=Path)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--compile", action="store_true")
arguments = parser.parse_args()
texts = [arguments.text] if arguments.text else sorted(Path(laconic.__file__).parent.rglob("*.py"))
data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in texts)), dtype=torch.uint8).long()
train, held_out, context = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :], 64


class GPT(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, width), nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, 256)

    def forward(self, text: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        rows = text[start[:, None] + torch.arange(context + 1)]
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        logits = self.head(self.blocks(self.embed(rows[:, :-1]) + self.positions, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


torch.manual_seed(0)
model = torch.compile(GPT()) if arguments.compile else GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 + 0.5 * math.cos(math.pi * s / arguments.steps))
with laconic.Worker(model, optimizer, laconic.Divisible()) as worker:
    state = {"best": math.inf, "schedule": schedule.state_dict()}
    if (arguments.out / "state").exists():
        state = worker.load(arguments.out / "state")
        schedule.load_state_dict(state["schedule"])
    while worker.step < arguments.steps:
        for i in range(arguments.accumulate):  # other windows on each rank, in each step
            drawn = torch.Generator().manual_seed((worker.step * worker.size + worker.rank) * arguments.accumulate + i)
            start = torch.randint(len(train) - context, (8,), generator=drawn)
            (model(train, start) / arguments.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if worker.step % 20 == 0:
            with worker.consensus(), torch.no_grad():  # the averaged model, on all ranks
                loss = model(held_out, torch.arange(0, len(held_out) - context, len(held_out) // 32)).item()
                if loss < state["best"]:
                    worker.export(arguments.out / "best.pt")
            state = {"best": min(loss, state["best"]), "schedule": schedule.state_dict()}
            worker.save(arguments.out / "state", state)
            if worker.rank == 0:
                print(f"step {worker.step}: held-out loss {loss:.3f}, best {state['best']:.3f}")
