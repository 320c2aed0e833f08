"""DeMo, written here after the paper. Shares no code with laconic's methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.bench.baseline import Baseline, count_payload
from laconic.bench.strategies import Session
from laconic.rules import check_count, check_number

TILE = 64  # tiles have at most 64 × 64 entries


@dataclass
class DeMo(Baseline):
    """DeMo, written here after the paper: sends the largest frequencies of a decoupled momentum, and steps by signs.

    In every step, for each parameter, with m its momentum on this worker:

        m ← decay·m + g ;   q = the `kept` largest DCT coefficients of each tile of m ;   m ← m − q
        x ← x − lr · sign(Σ over workers of q)

    Replaces the task's optimizer, with its learning rate and weight decay. Tiles have at most 64 × 64 entries, so an
    index has 2 bytes; coefficients are in fp32. (The authors' file sends indices of 8 bytes, two messages a parameter.)
    Workers wait for two messages a step, indices and values, which go from all to all.

    Args:
        kept: Coefficients of a tile that are sent.
        decay: Of the momentum.
        rate: Multiplies the task's learning rate.

    References:
        Peng et al. 2024, https://arxiv.org/abs/2411.19870; https://github.com/bloc97/DeMo
    """

    paper: ClassVar[str] = "arXiv 2411.19870"

    kept: int = 32
    decay: float = 0.999
    rate: float = 1.0

    def __post_init__(self) -> None:
        check_count("kept", self.kept, most=TILE * TILE)
        check_number("decay", self.decay, least=0, most=1)
        check_number("rate", self.rate, above=0)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, allreduce_nbytes: float) -> Session:
        demo = _DeMoOptimizer(optimizer, self)
        nbytes = sum(6 * tile.rows * min(self.kept, tile.height * tile.width) for tiles in demo.tiles for tile in tiles)
        return Session(model, demo, count_payload(demo, lambda step: (dist.get_world_size() - 1) * nbytes))


class _Tiles:
    """Cuts a parameter into equal tiles and transforms them by a two-dimensional DCT."""

    def __init__(self, parameter: Tensor) -> None:
        height, width = (1, parameter.numel()) if parameter.dim() < 2 else (len(parameter), parameter[0].numel())
        self.height, self.width = (_largest_divisor(side) for side in (height, width))
        self.rows = parameter.numel() // (self.height * self.width)
        self._grid = (height // self.height, self.height, width // self.width, self.width)
        self._left, self._right = _dct(self.height), _dct(self.width)

    def transform(self, x: Tensor) -> Tensor:
        """Returns the coefficients, one row for each tile."""
        tiles = x.reshape(self._grid).transpose(1, 2)
        return (self._left @ tiles @ self._right.T).reshape(self.rows, -1)

    def inverse(self, coefficients: Tensor, like: Tensor) -> Tensor:
        down, height, across, width = self._grid
        tiles = self._left.T @ coefficients.view(down, across, height, width) @ self._right
        return tiles.transpose(1, 2).reshape(like.shape)


class _DeMoOptimizer(torch.optim.Optimizer):
    """Steps the parameters of another optimizer, whose groups (and so whose schedule) it shares."""

    def __init__(self, other: torch.optim.Optimizer, settings: DeMo) -> None:
        super().__init__([p for group in other.param_groups for p in group["params"]], {})
        self.param_groups = other.param_groups
        other._opt_called = True  # type: ignore[attr-defined]  # a scheduler warns if its optimizer never steps
        self._settings = settings
        self._momenta = [[torch.zeros_like(p) for p in group["params"]] for group in self.param_groups]
        self.tiles = [[_Tiles(p) for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = zip(self.param_groups, self._momenta, self.tiles, strict=True)
        entries = [
            (group, parameter, momentum, tiles)
            for group, momenta, of_tiles in groups
            for parameter, momentum, tiles in zip(group["params"], momenta, of_tiles, strict=True)
        ]
        indices, values = [], []
        for _, parameter, momentum, tiles in entries:
            momentum.mul_(self._settings.decay)
            if parameter.grad is not None:
                momentum.add_(parameter.grad)
            coefficients = tiles.transform(momentum)
            index = coefficients.abs().topk(min(self._settings.kept, coefficients.shape[1]), dim=1).indices
            kept = coefficients.gather(1, index)
            sparse = torch.zeros_like(coefficients).scatter_(1, index, kept)
            momentum.sub_(tiles.inverse(sparse, momentum))
            indices.append(index.short().flatten())
            values.append(kept.flatten())
        all_indices, all_values = _gather(torch.cat(indices)), _gather(torch.cat(values))
        start = 0
        for group, parameter, _, tiles in entries:
            total = torch.zeros(tiles.rows, tiles.height * tiles.width)
            count = tiles.rows * min(self._settings.kept, total.shape[1])
            for index, value in zip(all_indices, all_values, strict=True):
                part = slice(start, start + count)
                total.scatter_add_(1, index[part].long().view(tiles.rows, -1), value[part].view(tiles.rows, -1))
            start += count
            lr = self._settings.rate * group["lr"]
            parameter.mul_(1 - lr * group.get("weight_decay", 0.0))
            parameter.sub_(tiles.inverse(total, parameter).sign_(), alpha=lr)


def _gather(vector: Tensor) -> Sequence[Tensor]:
    # gloo has no int16; bytes are the same on the wire.
    message = vector.view(torch.uint8)
    found = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    dist.all_gather(found, message)
    return [one.view(vector.dtype) for one in found]


def _largest_divisor(side: int) -> int:
    return max(divisor for divisor in range(1, TILE + 1) if side % divisor == 0)


def _dct(n: int) -> Tensor:
    """Returns the orthogonal matrix of the DCT-II."""
    k, i = torch.arange(n)[:, None], torch.arange(n)[None, :]
    matrix = torch.cos(math.pi / n * (i + 0.5) * k) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix
