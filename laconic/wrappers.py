"""Finds the bare model and torch's optimizers inside the wrappers that frameworks put around them.

Wrappers of optimizers are recognised by what they have, not by their class, so that no framework is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

INSIDE = ("optimizer", "_optimizer")  # where wrappers keep their optimizer: Accelerate, Lightning
MOST_WRAPPERS = 16
logger = logging.getLogger("laconic")


class BareModel:
    """The module inside a DistributedDataParallel, compiled or not, whose gradient averaging can be switched off.

    A method averages in its own way, so DDP must neither average gradients nor broadcast buffers while a worker runs.

    Inside a node it may average gradients: over the ranks of the node.

    Args:
        model: the user's model.
        in_node: whether the wrapper is to be left as it is, and to average inside a node.

    Attributes:
        module: the module inside, whose parameters are those of `model`; `model` itself if it is not wrapped.
        averages: whether the wrapper averages gradients inside the node.

    Raises:
        ValueError: the wrapper communicates in a way that cannot be switched off.
    """

    def __init__(self, model: nn.Module, *, in_node: bool = False) -> None:
        inner = getattr(model, "_orig_mod", model)  # torch.compile(DistributedDataParallel(…))
        self._wrapper = inner if isinstance(inner, DistributedDataParallel) else None
        self.module: nn.Module = model if self._wrapper is None else self._wrapper.module
        self._before = (True, True)
        self.averages = in_node and self._wrapper is not None
        if self._wrapper is None or in_node:
            return
        for option in ("static_graph", "mixed_precision"):
            if getattr(self._wrapper, option, None):
                raise ValueError(
                    f"model is in a DistributedDataParallel with {option}, whose communication cannot be switched "
                    f"off: create it without {option}, or pass and train the module inside it"
                )

    def require_group(self, members: Sequence[int]) -> None:
        """Raises a ValueError if the wrapper averages over other ranks than those of this node."""
        if not self.averages:
            return
        assert self._wrapper is not None
        found = sorted(dist.get_process_group_ranks(self._wrapper.process_group))
        if found != list(members):
            raise ValueError(
                f"with nodes, DistributedDataParallel must average inside the node, over ranks {list(members)}, not "
                f"over {found}: create it with process_group=group of this node's ranks "
                f"(torch.distributed.new_subgroups), or pass the bare module"
            )

    def switch_off(self, rank: int) -> None:
        """Switches the wrapper's communication off, unless it is inside a node. Rank 0 logs it."""
        if self._wrapper is None or self.averages:
            return
        self._before = self._wrapper.require_backward_grad_sync, self._wrapper.require_forward_param_sync
        self._wrapper.require_backward_grad_sync = self._wrapper.require_forward_param_sync = False
        if rank == 0:
            logger.warning(
                "the model is in a DistributedDataParallel: its averaging of gradients and its broadcast of buffers "
                "are switched off until the worker ends, since the worker's method does the averaging"
            )

    def check(self, step: int) -> None:
        """Raises a RuntimeError if the averaging of gradients is on and must be off; inside a node, the other way."""
        if self.averages:
            assert self._wrapper is not None
            if not self._wrapper.require_backward_grad_sync:
                raise RuntimeError(
                    f"optimizer.step() before step {step + 1} is inside no_sync() of DistributedDataParallel, so its "
                    f"gradients are not averaged inside the node: make the last backward pass and the step outside"
                )
            return
        if self._wrapper is not None and self._wrapper.require_backward_grad_sync:
            raise RuntimeError(
                f"something has switched the gradient averaging of DistributedDataParallel on again before step "
                f"{step + 1} (require_backward_grad_sync), so gradients would be averaged twice: pass and train the "
                f"module inside it"
            )

    def restore(self) -> None:
        """Switches on what `switch_off` has switched off."""
        if self._wrapper is not None and not self.averages:
            self._wrapper.require_backward_grad_sync, self._wrapper.require_forward_param_sync = self._before


def bare_optimizers(given: object) -> list[torch.optim.Optimizer]:
    """Returns torch's optimizers inside one optimizer or a list of them, wrapped or not.

    Raises:
        ValueError: there is none, one is given twice, or one evaluates its closure several times in a step.

    >>> class Wrapped:
    ...     def __init__(self, optimizer):
    ...         self.optimizer = optimizer
    >>> adam = torch.optim.Adam([torch.zeros(1)])
    >>> bare_optimizers(Wrapped(adam))[0] is adam
    True
    """
    several = list(given) if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) else [given]
    if not several:
        raise ValueError("optimizer must be a torch.optim.Optimizer or a list of them, not an empty list")
    found = [_bare_optimizer(one, "" if one is given else f" in the list {given}") for one in several]
    if len(set(map(id, found))) < len(found):
        raise ValueError("each optimizer must be given once, and the list has one of them twice")
    for optimizer in found:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "optimizer must evaluate its closure at most once in a step, and LBFGS does so several times, each at "
                "other parameters: use an optimizer that needs one gradient a step, such as SGD or AdamW"
            )
    return found


def _bare_optimizer(given: object, place: str) -> torch.optim.Optimizer:
    found = given
    for _ in range(MOST_WRAPPERS):
        # A wrapper may be an Optimizer by its class, without what Optimizer's constructor makes.
        if isinstance(found, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in vars(found):
            return found
        found = next((inner for name in INSIDE if (inner := getattr(found, name, None)) is not None), None)
    raise ValueError(
        f"optimizer must be a torch.optim.Optimizer, a wrapper that has one as .optimizer, or a list of these, not "
        f"{given if not isinstance(given, torch.optim.Optimizer) else type(given).__name__!r}{place}"
    )
