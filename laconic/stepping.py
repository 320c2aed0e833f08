"""Runs a worker's code in the step hooks of the user's optimizers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Stepping:
    """Calls a worker before and after each step; with several optimizers, a step is over when each has stepped once.

    A closure is evaluated here, before the worker begins the step, since the worker needs the gradients then.

    Args:
        optimizers: whose hooks are used.
        number: returns the number of the present step, for error messages.
        check: called first in a step, before a closure is evaluated.
        begin: called when all gradients are there, with the frame of torch's code that calls the hook; returns whether
            gradients must stay as they are until all optimizers have stepped.
        finish: called after the step of the last optimizer, before other hooks.
        end: called after all hooks of the last optimizer.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        number: Callable[[], int],
        check: Callable[[], None],
        begin: Callable[[FrameType], bool],
        finish: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self._optimizers, self._number = optimizers, number
        self._check, self._begin, self._finish, self._end = check, begin, finish, end
        self._call: FrameType | None = None  # the frame of the call of optimizer.step() that is running
        self._stepped: list[Optimizer] = []  # in the present step
        self._gradients: dict[int, tuple[int, int]] | None = None  # versions, by parameter, if they must stay
        self._hooks = []
        self._last_hooks = {}
        for optimizer in optimizers:
            hooks = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
                optimizer.register_step_post_hook(self._after_hooks),
            ]
            # The method's hook goes first: what other hooks do to x (clamping, an average of weights) must apply to the
            # x that the method leaves, whichever hook was registered first.
            optimizer._optimizer_step_post_hooks.move_to_end(hooks[1].id, last=False)  # type: ignore[attr-defined]
            self._hooks += hooks
            self._last_hooks[id(optimizer)] = hooks[2].id

    def remove(self) -> None:
        """Removes all hooks."""
        for hook in self._hooks:
            hook.remove()

    def forget(self) -> None:
        """Forgets a step that was not completed, after earlier parameters were loaded."""
        self._call, self._stepped = None, []

    def require_complete(self, what: str) -> None:
        """Raises a RuntimeError if some optimizers have stepped and others have not yet."""
        if self._stepped:
            raise RuntimeError(
                f"{what} must not be called in the middle of a step: {_names(self._stepped)} has stepped, and "
                f"{_names(self._missing())} has not"
            )

    def _missing(self) -> list[Optimizer]:
        return [one for one in self._optimizers if all(one is not other for other in self._stepped)]

    # No decorators on hooks: they would add a frame between the hook and optimizer.step().

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        caller = sys._getframe(1)
        if self._call is not None:
            if _is_within(self._call, caller):
                return None  # a step() that calls its parent class's step(): torch runs all hooks for both
            raise RuntimeError(f"optimizer.step() failed at step {self._number()}: continue from a checkpoint")
        if any(optimizer is one for one in self._stepped):
            raise RuntimeError(
                f"{type(optimizer).__name__} has stepped twice and {_names(self._missing())} has not: all optimizers "
                f"of a worker must step once in each step. For optimizers that step at different times, use one "
                f"Worker for each, with the submodule that it trains as its model"
            )
        if not self._stepped:
            self._check()
        arguments = self._evaluate_closure(optimizer, args, kwargs)
        if self._stepped:
            self._require_same_gradients(optimizer)
        elif self._begin(caller) and len(self._optimizers) > 1:
            self._gradients = {
                id(p): _version(p) for one in self._optimizers for group in one.param_groups for p in group["params"]
            }
        self._call = caller
        # The last hook of all, so that what the user's hooks do to x counts as a part of the step.
        optimizer._optimizer_step_post_hooks.move_to_end(self._last_hooks[id(optimizer)])  # type: ignore[attr-defined]
        return arguments

    def _evaluate_closure(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        """Evaluates the closure that was given to optimizer.step(), if any, and returns new arguments for step()."""
        # torch passes the optimizer itself as args[0]; any other argument must be a closure.
        closures = [one for one in (*args[1:], *kwargs.values()) if one is not None]
        if not closures:
            return None
        if len(closures) > 1 or not callable(closures[0]):
            raise ValueError(f"optimizer.step() takes nothing but a closure, not {closures}")
        if len(self._optimizers) > 1:
            raise ValueError(
                "with several optimizers, step() must be called without a closure: compute all gradients, then call "
                "step() of each"
            )
        closure: Callable[[], Any] = closures[0]
        with torch.enable_grad():
            result = closure()
        once = _Once(result, type(optimizer).__name__)
        others = (None if one is None else once for one in args[1:])
        return (args[0], *others), {name: None if one is None else once for name, one in kwargs.items()}

    def _require_same_gradients(self, optimizer: Optimizer) -> None:
        """Raises if gradients have changed since the method has averaged them: these are not averaged."""
        if self._gradients is None:
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                if _version(p) != self._gradients.get(id(p)):
                    raise RuntimeError(
                        f"gradients of {type(optimizer).__name__} have changed after {_names(self._stepped)} has "
                        f"stepped, and the method had averaged them before: compute, unscale and clip the gradients of "
                        f"all optimizers before the first of them steps. For optimizers that step at different times, "
                        f"use one Worker for each, with the submodule that it trains as its model"
                    )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if sys._getframe(1) is not self._call:
            return
        self._call = None
        self._stepped.append(optimizer)
        if not self._missing():
            self._stepped, self._gradients = [], None
            self._finish()

    def _after_hooks(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._call is None and not self._stepped:  # not in a step() that is called by another step()
            self._end()


class _Once:
    """A closure whose result is known. It cannot be evaluated again, at other parameters."""

    def __init__(self, result: Any, optimizer: str) -> None:
        self._result, self._optimizer, self._is_used = result, optimizer, False

    def __call__(self) -> Any:
        if self._is_used:
            raise RuntimeError(
                f"{self._optimizer} evaluates its closure several times in a step, and a worker communicates once: "
                f"use an optimizer that needs one gradient a step, such as SGD or AdamW"
            )
        self._is_used = True
        return self._result


def _version(parameter: torch.Tensor) -> tuple[int, int]:
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def _names(optimizers: Sequence[Optimizer]) -> str:
    return " and ".join(type(one).__name__ for one in optimizers)


def _is_within(call: FrameType, frame: FrameType | None) -> bool:
    """Returns whether `frame` is `call` or was called from it."""
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call
