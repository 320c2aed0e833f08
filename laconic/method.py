"""What a method is: settings, state, and what it does around each step of the user's optimizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from laconic.comm import Comm


class Replica(Protocol):
    """What a method sees of the worker it runs in. All vectors are flat, in the order of the parameters, `d` long."""

    @property
    def x(self) -> Tensor:
        """The parameters (d): the model's own memory, so writing here changes the model."""

    @property
    def x_and_scalar(self) -> Tensor:
        """x and one entry behind it (d + 1), in the same memory: a number may travel with x without a copy of x."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained, in the order in which they lie in x."""

    @property
    def comm(self) -> Comm: ...

    @property
    def step(self) -> int:
        """The step under way, counted from 1: the same number in `before_step` and in `after_step`."""

    @property
    def lr(self) -> float:
        """The learning rate now (the largest, where parameter groups differ)."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's. Its settings may be read; `moments` is the way to its state."""

    @property
    def generator(self) -> torch.Generator:
        """Random numbers that are the same on every rank, and saved with the worker."""

    def pack_gradient(self) -> Tensor:
        """The gradient (d), then one flag for each parameter: 1 where it has a gradient, else 0 (and zeros above)."""

    def unpack_gradient(self, packed: Tensor) -> None:
        """Make these the gradients the optimizer sees; where the flag is 0 the parameter has none."""

    def gradients(self) -> list[Tensor | None]:
        """Each parameter's own gradient, as the optimizer will see it: writing here changes it."""

    def views(self, vector: Tensor) -> list[Tensor]:
        """The part of a vector (d) that belongs to each parameter, in its shape."""

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state of the parameters' shapes, by name, each as one vector (d): Adam's exp_avg, …

        The same names on all ranks; empty before the first step. The vectors are the optimizer's own memory.
        """


def state(default: Any = None) -> Any:
    """A field of a method that is not a setting but state: it is saved and loaded with the worker."""
    return field(default=default, init=False, repr=False, compare=False, metadata={"state": True})


@dataclass
class Method:
    """One way for workers to talk. Fields are settings; fields made by `state()` are saved in checkpoints.

    Settings are checked in `__post_init__`. State may hold tensors, numbers, strings, None, and lists or dicts of them.
    """

    paper: ClassVar[str] = ""

    def setup(self, worker: Replica) -> None:
        """Once, when all workers hold the same parameters: allocate state here."""

    def before_step(self, worker: Replica) -> None:
        """Gradients are there; the optimizer has not moved yet."""

    def after_step(self, worker: Replica) -> None:
        """The optimizer has moved `worker.x` by this worker's own step."""

    def drain(self, worker: Replica) -> None:
        """The last step is over on every rank: wait for everything in flight and apply it."""

    def metrics(self) -> dict[str, float]:
        """What a report may plot over the steps, by name: the numbers that say how the method is doing now."""
        return {}

    def trains(self, rank: int) -> bool:
        """Whether this rank has data. One that has none calls `worker.serve()` where the others train."""
        return True

    def await_step(self, worker: Replica) -> bool:
        """On a rank that does not train: wait until the others make a step (True) or pause (False)."""
        raise NotImplementedError(f"{type(self).__name__} has no rank that does not train")

    def pause(self, worker: Replica) -> None:
        """All ranks are between two steps and about to meet: consensus(), save(), load() or the end."""

    def settings(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}

    def state_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("state")}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Tensors are copied into the ones `setup` allocated."""
        for name, value in saved.items():
            mine = getattr(self, name)
            if isinstance(mine, Tensor) and isinstance(value, Tensor):
                mine.copy_(value)
            else:
                setattr(self, name, value)


def fresh(method: Method) -> Method:
    """A copy with the same settings and no state."""
    if not isinstance(method, Method):
        raise ValueError(f"method must be an instance of a laconic.Method, such as LocalSGD(8), not {method!r}")
    kind = type(method)
    if "__annotations__" in vars(kind) and "__dataclass_fields__" not in vars(kind):
        raise ValueError(f"{kind.__name__} has fields, so it must be decorated with @dataclass")
    return dataclasses.replace(method)


def check_choice(name: str, value: object, choices: tuple[str | int | None, ...]) -> None:
    if isinstance(value, bool) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")


def check_count(name: str, value: object, least: int = 1) -> None:
    """A whole number; `True` and 2.0 are not."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, not {value!r}")
