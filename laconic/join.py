"""Lets ranks run out of data at different steps: a rank that is done goes on answering, and does not count in means.

Before every step that communicates, all ranks send each other three numbers (a census): the last step that this rank
trained in, whether it has run out of data, and its learning rate. So all ranks know who counts in the step: the ranks
that have trained since everything they did was last sent, which each method defines (`Method.sent_until`). A rank that
is done makes steps without training until all are done and everything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.comm import Comm


class Join:
    """What this rank knows of the others inside a `worker.join()` block.

    Args:
        comm: the channel of the census.
        step: the last step before the block.

    Attributes:
        last: the last step in which this rank has trained.
        lasts: the same of every rank, as of the last census.
        counted: the ranks that count in the means of the present step.
        is_done: whether this rank has run out of data.
        anyone_done: whether any rank has.
        lr: the learning rate of the rank that trains longest.
    """

    def __init__(self, comm: Comm, step: int) -> None:
        self._comm = comm
        self.counted = list(range(comm.size))
        self.is_done = self.anyone_done = False
        self.lr = 0.0
        self._all_done = False
        self.last = step
        self.lasts = [step] * comm.size

    def take_census(self, sent_until: int, lr: float) -> None:
        """Exchanges the numbers of all ranks before the next step that communicates.

        Args:
            sent_until: see `Method.sent_until`.
            lr: the learning rate of this rank's optimizers.
        """
        own = torch.tensor([self.last, self.is_done, lr], dtype=torch.float64)
        lasts, done, rates = torch.stack(self._comm.all_gather(own)).unbind(1)
        self.lasts = [int(last) for last in lasts.tolist()]
        self.anyone_done, self._all_done = bool(done.any()), bool(done.all())
        self.counted = [rank for rank, last in enumerate(self.lasts) if last > sent_until]
        self.lr = float(rates[self.last_to_train])

    def is_over(self, sent_until: int) -> bool:
        """Returns whether all ranks are done and everything is sent: the same on all ranks in the same step."""
        return self._all_done and max(self.lasts) <= sent_until

    @property
    def last_to_train(self) -> int:
        """The first of the ranks that have trained longest."""
        return self.lasts.index(max(self.lasts))


@torch.no_grad()
def copy_training_state(
    comm: Comm, x: Tensor, optimizers: Sequence[torch.optim.Optimizer], source: int, what: str
) -> None:
    """Copies x and the optimizers' state, but not their settings, from rank `source` to all ranks.

    Args:
        comm: the channel to copy over.
        x: the trained parameters (d), overwritten in place.
        optimizers: whose state is replaced.
        source: the rank to copy from.
        what: names the meeting in error messages.
    """
    comm.broadcast(x, root=source, out=x)
    for optimizer in optimizers:
        saved = optimizer.state_dict()
        own = [[number, {name: _form(v) for name, v in entry.items()}] for number, entry in saved["state"].items()]
        forms = comm.meet(what, own if comm.rank == source else None)[source]
        state: dict[Any, dict[str, Any]] = {}
        for number, entry in forms:
            state[number] = {
                name: _made(form, saved["state"].get(number, {}).get(name), x) for name, form in entry.items()
            }
        for entry in state.values():
            for name, value in entry.items():
                if isinstance(value, Tensor):
                    entry[name] = comm.broadcast(value.to(x.device), root=source).to(value.device)
        if comm.rank != source:
            optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})


def _form(value: Any) -> Any:
    return (
        [list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]
        if isinstance(value, Tensor)
        else value
    )


def _made(form: Any, own: Any, x: Tensor) -> Any:
    """Returns a tensor of this form for `broadcast`, or the value that is no tensor."""
    if not isinstance(form, list):
        return form
    shape, dtype, device = form
    if isinstance(own, Tensor) and list(own.shape) == shape:
        return own
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=x.device if device == x.device.type else device)
