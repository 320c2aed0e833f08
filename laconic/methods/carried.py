"""Vectors that travel in pieces: what is sent of some coordinates, and what becomes of them when the mean is there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.compress import Compressor
from laconic.methods.pieces import Piece

# States of torch's optimizers that are sums or averages of squares, or otherwise never negative.
SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf"})


@dataclass
class Codes:
    """What all say of the same coordinates of a vector; their mean is what the codes say times their weights."""

    compressor: Compressor
    codes: Sequence[Tensor]
    weights: Sequence[float]
    own: int  # the number of this rank's
    step: int

    def mean(self, numel: int) -> Tensor:
        mean = torch.zeros(numel, dtype=torch.float32, device=self.codes[0].device)
        for code, weight in zip(self.codes, self.weights, strict=True):
            if weight:
                self.compressor.decode_add(code, mean, weight, step=self.step)
        return mean

    def settle(self, x: Tensor, base: Tensor | None = None) -> None:
        self.compressor.settle(self.codes, self.weights, self.own, x, base, step=self.step)


class Carried(ABC):
    @abstractmethod
    def take(self, piece: Piece, part: slice) -> Tensor:
        """What to send of these coordinates, a part of the piece: a new tensor."""

    @abstractmethod
    def put(self, piece: Piece, part: slice, mean: Tensor, own: Tensor) -> None:
        """The mean of what all sent, which may be changed, and what this rank did."""

    def unit(self, piece: Piece, part: slice) -> Tensor | None:
        """What the entries of a message are multiples of, if not of 1; 0 where it has come too late to be of use."""
        return None

    def encode(self, piece: Piece, part: slice, compressor: Compressor, out: Tensor) -> None:
        """`take`, as a code."""
        compressor.encode(self.take(piece, part), step=piece.step, out=out)

    def settle(self, piece: Piece, part: slice, codes: Codes) -> None:
        """`put`, with what the codes say."""
        own = codes.compressor.decode(codes.codes[codes.own], part.stop - part.start, step=piece.step)
        self.put(piece, part, codes.mean(part.stop - part.start), own)


@dataclass
class Moves(Carried):
    """How far this worker has moved x away from x̂ and has told nobody: e = x − x̂ − s."""

    x: Tensor
    x_hat: Tensor
    in_flight: Callable[[slice], Iterable[tuple[slice, Tensor]]]  # s, where it is not 0 within some coordinates

    def residual(self, part: slice) -> Tensor:
        return self._residual(part, self.in_flight(part))

    def _residual(self, part: slice, in_flight: Iterable[tuple[slice, Tensor]]) -> Tensor:
        e = self.x[part] - self.x_hat[part]
        for sent, s in in_flight:
            e[sent.start - part.start : sent.stop - part.start] -= s
        return e

    def move(self, part: slice, mean: Tensor, own: Tensor) -> None:
        self.x_hat[part] += mean
        self.x[part] += mean.sub_(own)

    def take(self, piece: Piece, part: slice) -> Tensor:
        return self.residual(part)

    def put(self, piece: Piece, part: slice, mean: Tensor, own: Tensor) -> None:
        self.move(part, mean, own)

    def encode(self, piece: Piece, part: slice, compressor: Compressor, out: Tensor) -> None:
        if in_flight := list(self.in_flight(part)):
            compressor.encode(self._residual(part, in_flight), step=piece.step, out=out)
        else:
            compressor.encode_difference(self.x[part], self.x_hat[part], step=piece.step, out=out)

    def settle(self, piece: Piece, part: slice, codes: Codes) -> None:
        codes.settle(self.x[part], self.x_hat[part])


@dataclass
class Moment(Carried):
    """A vector of the optimizer's state, which becomes the mean of all, as far as is known."""

    name: str
    vector: Tensor

    def take(self, piece: Piece, part: slice) -> Tensor:
        return self.vector[part].clone()

    def put(self, piece: Piece, part: slice, mean: Tensor, own: Tensor) -> None:
        now = self.vector[part]
        if self.name in SQUARES:
            # Stale news may ask for less than nothing. Never fall to near 0: Adam divides by its root.
            floor = 0.1 * torch.maximum(now, mean)
            now.copy_(torch.maximum(now + mean - own, floor))
        else:
            now += mean.sub_(own)
