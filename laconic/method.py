"""Defines what a communication method is: settings, state, and code that runs around each optimizer step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from laconic.comm import Comm
from laconic.rules import check_choice as check_choice
from laconic.rules import check_count as check_count
from laconic.rules import check_flag as check_flag
from laconic.rules import check_number as check_number
from laconic.rules import check_seed as check_seed


class Replica(Protocol):
    """One worker's copy of the model, as a method sees it.

    Vectors are flat and in the order of `parameters`; `d` is the number of trained entries.
    """

    @property
    def x(self) -> Tensor:
        """The trained parameters (d). This is the model's own memory: writing to it changes the model."""

    @property
    def x_and_scalar(self) -> Tensor:
        """x and one more entry (d + 1) in the same memory, so that a number can be sent with x without copying x."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order in which x holds them."""

    @property
    def comm(self) -> Comm:
        """The communication with the other workers; methods use no other network, threads or clock."""

    @property
    def step(self) -> int:
        """The current step, counted from 1; the same number in `before_step` and in `after_step`."""

    @property
    def lr(self) -> float:
        """The current learning rate; the largest one if the parameter groups differ."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer. Methods may read its settings, and reach its state through `moments`."""

    @property
    def generator(self) -> torch.Generator:
        """Random numbers that are the same on every rank. The worker's checkpoint includes their state."""

    def pack_gradient(self) -> Tensor:
        """Returns the gradient (d) followed by one flag per parameter: 1 if it has a gradient, else 0.

        The entries of a parameter without a gradient are 0.
        """

    def unpack_gradient(self, packed: Tensor) -> None:
        """Sets the gradients that the optimizer will use. A parameter whose flag is 0 gets no gradient."""

    def gradients(self) -> list[Tensor | None]:
        """Returns each parameter's gradient, or None. Writing to it changes what the optimizer will use."""

    def views(self, vector: Tensor) -> list[Tensor]:
        """Returns the part of a vector (d) that belongs to each parameter, in the parameter's shape."""

    def moments(self) -> dict[str, Tensor]:
        """Returns the optimizer state that has the parameters' shapes, each as one vector (d), by name.

        For Adam these are exp_avg and exp_avg_sq. The names are the same on all ranks; before the first step there are
        none. The vectors are the optimizer's own memory.
        """


def state(default: Any = None) -> Any:
    """Declares a field of a method as state: it is no setting, and is saved and loaded with the worker.

    Args:
        default: the value before `setup`.

    >>> import laconic
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Counting(laconic.Method):
    ...     every: int = 10
    ...     steps: int = laconic.state(0)
    >>> Counting(every=5)
    Counting(every=5)
    >>> Counting(every=5).state_dict()
    {'steps': 0}
    """
    return field(default=default, init=False, repr=False, compare=False, metadata={"state": True})


@dataclass
class Method:
    """Base class of all communication methods.

    A method is a dataclass. Its fields are settings, checked in `__post_init__`; fields declared with `state()` are
    saved in checkpoints and may hold tensors, numbers, strings, None, and lists or dicts of these. All ranks use the
    same settings: the worker compares them.

    >>> import laconic
    >>> class LocalSGDEvery8(laconic.Method):
    ...     def after_step(self, worker):
    ...         if worker.step % 8 == 0:
    ...             worker.comm.mean(worker.x, out=worker.x)
    """

    paper: ClassVar[str] = ""

    def setup(self, worker: Replica) -> None:
        """Allocates state. Runs once, when all workers hold the same parameters."""

    def before_step(self, worker: Replica) -> None:
        """Runs when the gradients are computed and the optimizer has not changed the parameters yet."""

    def after_step(self, worker: Replica) -> None:
        """Runs when the optimizer has changed `worker.x` by this worker's local step."""

    def drain(self, worker: Replica) -> None:
        """Waits for all messages in flight and applies them. Runs after the last step, on every rank."""

    def reset(self, worker: Replica) -> None:
        """Drops messages in flight, residuals and the like, and begins anew from the present x.

        Runs between two steps, on all ranks, when all hold the same x. What it drops stays as `setup` made it.
        """

    def common(self, worker: Replica) -> Literal["nothing", "step", "x"]:
        """Returns what all ranks have in common after `after_step`, so that the worker can compare them.

        "nothing": ranks step at their own pace, and are compared only in `consensus()`, `save()` and at the end.
        "step": all ranks take part in this step. "x": they do, and then hold the same x, bit for bit.
        """
        return "nothing"

    def changed_outside(self) -> str | None:
        """Returns what goes wrong if x is changed outside optimizer.step(), between two steps.

        None: nothing does. The change counts as a part of this worker's next step.
        """
        return None

    def metrics(self) -> dict[str, float]:
        """Returns numbers that describe the method's current behaviour, by name, for plots over the steps."""
        return {}

    def trains(self, rank: int) -> bool:
        """Returns whether this rank has data. A rank without data calls `worker.serve()` while the others train."""
        return True

    def await_step(self, worker: Replica) -> bool:
        """Waits, on a rank without data, until the others start a step (returns True) or pause (returns False)."""
        raise NotImplementedError(f"{type(self).__name__} has no rank that does not train")

    def pause(self, worker: Replica) -> None:
        """Runs between two steps, before all ranks meet in consensus(), save(), load() or at the end of the block."""

    def settings(self) -> dict[str, Any]:
        """Returns the settings by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}

    def state_dict(self) -> dict[str, Any]:
        """Returns the fields declared with `state()` by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("state")}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Tensors are copied into those that `setup` allocated."""
        for name, value in saved.items():
            mine = getattr(self, name)
            if isinstance(mine, Tensor) and isinstance(value, Tensor):
                mine.copy_(value)
            else:
                setattr(self, name, value)


def fresh(method: Method) -> Method:
    """Returns a copy of a method with the same settings and without state.

    Raises:
        ValueError: `method` is no instance of a method, or its class has fields and is no dataclass.
    """
    if not isinstance(method, Method):
        raise ValueError(f"method must be an instance of a laconic.Method, such as LocalSGD(8), not {method!r}")
    kind = type(method)
    if "__annotations__" in vars(kind) and "__dataclass_fields__" not in vars(kind):
        raise ValueError(f"{kind.__name__} has fields, so it must be decorated with @dataclass")
    return dataclasses.replace(method)


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a copy of nested dicts and lists in which each tensor is replaced by `change(tensor)`.

    >>> with_tensors({"a": [torch.ones(2), 3]}, lambda t: t + 1)
    {'a': [tensor([2., 2.]), 3]}
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_tensors(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [with_tensors(entry, change) for entry in value]
    return value
