"""Corrects local gradients by the mean gradient as last known, for workers that hold different kinds of data.

The idea is SCAFFOLD's (Karimireddy et al., arXiv 1910.06378): a worker adds the difference between the mean gradient of
all workers and its own, both over the last window, to its gradients. Then all workers move alike. The corrections of
all workers sum to zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.forms import Choice, Each, Fields, Form, Maybe, Row, Whole, form_of
from laconic.method import Replica


class Correction:
    """Accumulates the local gradient between messages, and adds the last known difference to each new gradient."""

    def __init__(self, worker: Replica, *, has_owners: bool) -> None:
        self.total = torch.zeros_like(worker.x)  # of local gradients since they were last sent (d)
        self.shift = torch.zeros_like(worker.x)  # mean of all workers − local, as last known (d)
        self.since: dict[int, int] = {}  # by the first entry of a piece: the step in which it was last sent
        self.start = 0  # the step of the last `restart`
        # Two hops: the quantization error of the means that this rank, as an owner, has sent (d). Without feedback it
        # would be in every correction, and the corrections of all workers would not sum to zero.
        kind = torch.promote_types(worker.x.dtype, torch.float32)
        self.owner_residual = torch.zeros_like(worker.x, dtype=kind) if has_owners else None
        self._totals, self._shifts = worker.views(self.total), worker.views(self.shift)

    def before_step(self, worker: Replica) -> None:
        for gradient, total, shift in zip(worker.gradients(), self._totals, self._shifts, strict=True):
            if gradient is not None:
                total += gradient
                gradient += shift

    def take(self, piece: slice, step: int) -> Tensor:
        """Returns the mean local gradient since this piece was last sent, and starts a new sum."""
        total = self.total[piece]
        mean = total / (step - self.since.get(piece.start, self.start))
        self.since[piece.start] = step
        total.zero_()
        return mean

    def put(self, piece: slice, mean: Tensor, own: Tensor) -> None:
        torch.sub(mean, own, out=self.shift[piece])

    def restart(self, step: int) -> None:
        """Forgets sums that were begun with other pieces."""
        self.total.zero_()
        self.since, self.start = {}, step
        if self.owner_residual is not None:
            self.owner_residual.zero_()

    def state_dict(self) -> dict[str, Any]:
        since = [list(item) for item in self.since.items()]
        return {
            "total": self.total,
            "shift": self.shift,
            "since": since,
            "start": self.start,
            "owner_residual": self.owner_residual,
        }

    def form(self, step: int) -> Form:
        """Returns what the state saved after `step` must look like."""
        since = Row((Whole(0, self.total.numel() - 1), Whole(0, step)))
        residual = Choice((None,)) if self.owner_residual is None else Maybe(form_of(self.owner_residual))
        return Fields(
            {
                "total": form_of(self.total),
                "shift": form_of(self.shift),
                "since": Each(since),
                "start": Whole(0, step),
                "owner_residual": residual,
            }
        )

    def merge(self, step: int) -> dict[str, Any]:
        """Returns the state of a worker in a run of another number of workers: nothing is known of its data yet."""
        zeros = {"total": torch.zeros_like(self.total), "shift": torch.zeros_like(self.shift)}
        residual = None if self.owner_residual is None else torch.zeros_like(self.owner_residual)
        return {**zeros, "since": [], "start": step, "owner_residual": residual}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.total.copy_(saved["total"])
        self.shift.copy_(saved["shift"])
        if self.owner_residual is not None:
            residual = saved["owner_residual"]
            self.owner_residual.copy_(residual) if residual is not None else self.owner_residual.zero_()
        self.since, self.start = dict(map(tuple, saved["since"])), saved["start"]
