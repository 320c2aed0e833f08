"""SparseLoCo, written here after the paper. Shares no code with laconic's methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.bench.baseline import Baseline, count_payload
from laconic.bench.strategies import Session
from laconic.rules import check_count, check_number

CHUNK = 4096  # entries; an index in a chunk has 12 bits


@dataclass
class SparseLoCo(Baseline):
    """SparseLoCo, written here after the paper: DiLoCo whose differences are sparse, with error feedback.

    After `period` local steps, with e the error feedback of worker i and Δ = θ − θᵢ:

        e ← decay·e + Δ ;   q = Q(top `kept` of each 4096 entries of e) ;   e ← e − q ;   θ ← θ − outer_lr · mean(q)

    Q has 2 bits: the sign, and which of two magnitudes (the means of the larger and of the smaller half of a chunk's
    kept entries, in fp16). With 12 bits of index that is 14 bits per kept entry. Workers wait for the messages, which
    go from all to all.

    Args:
        period: Local steps between two outer steps; the paper has 15 to 100.
        kept: Entries of 4096 that are sent, a multiple of 4.
        decay: Of the error feedback, once a round.
        outer_lr: The rate of the outer step.

    References:
        Sarfi et al. 2025, https://arxiv.org/abs/2508.15706
    """

    apart = True
    paper: ClassVar[str] = "arXiv 2508.15706"

    period: int = 15
    kept: int = 64
    decay: float = 0.95
    outer_lr: float = 1.0

    def __post_init__(self) -> None:
        check_count("period", self.period)
        check_count("kept", self.kept, most=CHUNK)
        if self.kept % 4:
            raise ValueError(f"kept must be a multiple of 4, since four values share a byte, not {self.kept}")
        check_number("decay", self.decay, least=0, most=1)
        check_number("outer_lr", self.outer_lr, above=0)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, allreduce_nbytes: float) -> Session:
        parameters = [p for p in model.parameters() if p.requires_grad]
        theta = torch.cat([p.detach().flatten() for p in parameters])
        feedback = torch.zeros_like(theta)
        size, steps = dist.get_world_size(), 0

        @torch.no_grad()
        def synchronize(*_: Any) -> None:
            nonlocal steps
            steps += 1
            if steps % self.period:
                return
            feedback.mul_(self.decay).add_(theta - torch.cat([p.flatten() for p in parameters]))
            message = encode_sparse(feedback, self.kept)
            feedback.sub_(decode_sparse(message, len(theta), self.kept))
            messages = [torch.empty_like(message) for _ in range(size)]
            dist.all_gather(messages, message)
            for one in messages:
                theta.sub_(decode_sparse(one, len(theta), self.kept), alpha=self.outer_lr / size)
            nn.utils.vector_to_parameters(theta.clone(), parameters)

        optimizer.register_step_post_hook(synchronize)
        sent = (size - 1) * -(-len(theta) // CHUNK) * (self.kept * 14 // 8 + 4)
        read = count_payload(optimizer, lambda step: 0.0 if step % self.period else sent)
        return Session(model, optimizer, read, agreed=lambda: theta)


def encode_sparse(vector: Tensor, kept: int) -> Tensor:
    """Returns the `kept` largest entries of each 4096 as bytes: 12-bit indices, 2-bit values, two fp16 magnitudes."""
    chunks = nn.functional.pad(vector, (0, -len(vector) % CHUNK)).view(-1, CHUNK)
    index = chunks.abs().topk(kept, dim=1).indices  # the largest first
    values = chunks.gather(1, index)
    halves = values.abs().view(-1, 2, kept // 2).mean(dim=2).half()
    first, second = index[:, 0::2], index[:, 1::2]
    packed = torch.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], dim=2).to(torch.uint8)
    is_small = torch.arange(kept) >= kept // 2
    codes = (values < 0).to(torch.uint8) * 2 + is_small.to(torch.uint8)
    quarters = codes.view(-1, kept // 4, 4) << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    bytes_of_values = quarters.sum(dim=2).to(torch.uint8)
    return torch.cat([packed.flatten(), bytes_of_values.flatten(), halves.flatten().view(torch.uint8)])


def decode_sparse(message: Tensor, numel: int, kept: int) -> Tensor:
    """Returns the vector that `encode_sparse` wrote."""
    rows = -(-numel // CHUNK)
    sizes = [rows * kept // 2 * 3, rows * kept // 4, rows * 4]
    packed, values, halves = torch.split(message, sizes)
    a, b, c = packed.view(rows, -1, 3).long().unbind(2)
    index = torch.stack([a << 4 | b >> 4, (b & 15) << 8 | c], dim=2).view(rows, kept)
    codes = (values.view(rows, -1, 1) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).view(rows, kept)
    sizes_of_values = halves.clone().view(torch.float16).float().view(rows, 2).gather(1, (codes & 1).long())
    chunks = torch.zeros(rows, CHUNK).scatter_(1, index, torch.where(codes > 1, -sizes_of_values, sizes_of_values))
    return chunks.view(-1)[:numel]
