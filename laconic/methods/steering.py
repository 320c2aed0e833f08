"""Where others go: how far the mean gradient is from a worker's own, as far as that lasts."""

from __future__ import annotations

from typing import Any

import torch

from laconic.method import Replica

KEPT = 0.95  # of what was seen, from piece to piece
LEAST_SHARE = 0.1  # below, it is taken for chance
SURE = 20  # steps in a row with steering, which are no chance


class Steering:
    """Adds a share of what the mean gradient last differed by from the own one to the own gradients.

    The idea is SCAFFOLD's (Karimireddy et al., arXiv 1910.06378). But part of such a difference is noise, which the
    next one does not have: what is added is the share that differences have in those that come after them, by least
    squares. Where workers hold alike data that is none, and nothing is done but look.
    """

    def __init__(self, worker: Replica) -> None:
        self.apart = torch.zeros_like(worker.x)  # mean − own gradient, as last known (d)
        self.share = 0.0
        self.shares: list[float] = []  # that were added in the latest steps
        self.is_on = False  # once it was, `apart` is kept up everywhere
        self.steps = 0  # in a row, up to now, in which some rank has steered; all ranks know the same
        self.quiet = 0  # in a row in which none has
        self._products = self._squares = 0.0  # of each difference with the one before, and of that one
        ascends = {id(p) for group in worker.optimizer.param_groups if group["maximize"] for p in group["params"]}
        signs = [-1 if id(p) in ascends else 1 for p in worker.parameters]
        self._views = list(zip(worker.views(self.apart), signs, strict=True))

    def before_step(self, worker: Replica) -> None:
        if self.share == 0:
            return
        for gradient, (view, sign) in zip(worker.gradients(), self._views, strict=True):
            assert gradient is not None
            gradient.add_(view, alpha=sign * self.share)

    def see(self, products: float, squares: float, part: float = 1.0) -> None:
        """Of differences that have come now with those before, and of those; in which part of a piece."""
        self._products = KEPT**part * self._products + products
        self._squares = KEPT**part * self._squares + squares
        share = min(self._products / self._squares, 1.0) if self._squares > 0 else 0.0
        self.share = share if share >= LEAST_SHARE else 0.0
        self.is_on |= self.share > 0

    def rest(self) -> None:
        """Nothing can be seen."""
        self.share = self._products = self._squares = 0.0

    @property
    def data_is_unlike(self) -> bool:
        return self.steps >= SURE

    def hear(self, shares: list[float]) -> None:
        """By how much each rank steers now."""
        self.steps, self.quiet = (self.steps + 1, 0) if any(shares) else (0, self.quiet + 1)

    def state_dict(self) -> dict[str, Any]:
        seen = {"share": self.share, "shares": self.shares, "seen": [self._products, self._squares]}
        return seen | {"apart": self.apart, "is_on": self.is_on, "steps": self.steps, "quiet": self.quiet}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.apart.copy_(saved["apart"])
        self.share, self.shares = saved["share"], saved["shares"]
        self.is_on, self.steps, self.quiet = saved["is_on"], saved["steps"], saved["quiet"]
        self._products, self._squares = saved["seen"]
