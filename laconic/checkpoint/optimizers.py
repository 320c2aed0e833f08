"""Collects, checks and loads the state of optimizers, and merges the states of several ranks.

The state of one optimizer is its `state_dict`; that of several is the list of theirs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.forms import Fields, Flag, Maybe, Plain, Real, Vector, short
from laconic.method import mean_of

# Settings that choose an implementation of the same step. Other flags change the step, or what its state contains.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
# State of torch's optimizers that is never negative: the next step would take its root, or divide by it.
NOT_NEGATIVE = {
    *("step", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg", "acc_delta", "step_size"),
    *("row_var", "col_var", "variance", "eta", "mu", "mu_product"),
}
OPTIONAL = ("momentum_buffer",)  # of SGD, which has it only after a step with momentum


def collect_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """Returns what a checkpoint contains of the optimizers."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    return states if len(states) > 1 else states[0]


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], saved: Any) -> None:
    """Raises a ValueError if the optimizers must not load this. Changes nothing."""
    states = saved if len(optimizers) > 1 else [saved]
    if not isinstance(states, list) or len(states) != len(optimizers):
        raise ValueError(f"optimizer must be a list of the state of {len(optimizers)} optimizers, not {short(saved)}")
    for optimizer, state in zip(optimizers, states, strict=True):
        check_optimizer(optimizer, state)


def load_optimizers(optimizers: Sequence[torch.optim.Optimizer], saved: Any) -> None:
    """Loads what `check_optimizers` has checked."""
    for optimizer, state in zip(optimizers, saved if len(optimizers) > 1 else [saved], strict=True):
        optimizer.load_state_dict(state)


def check_optimizer(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Raises a ValueError if the optimizer must not load this state. Changes nothing."""
    Fields({"state": Plain(), "param_groups": Plain()}).check("optimizer", saved)
    groups, own = saved["param_groups"], optimizer.param_groups
    sizes = [len(group["params"]) for group in own]
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError(f"optimizer.param_groups must be a list of dicts, not {short(groups)}")
    ids = [group.get("params") for group in groups]
    if not all(isinstance(some, list) for some in ids) or [len(some) for some in ids] != sizes:
        raise ValueError("the optimizer's parameter groups have other sizes than those of this run")
    numbers = [number for some in ids for number in some]
    if not all(type(number) is int for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError("optimizer.param_groups must number the parameters, each with another number")
    for i, (group, mine) in enumerate(zip(groups, own, strict=True)):
        _check_settings(f"optimizer.param_groups[{i}]", optimizer, group, mine)
    parameters = dict(zip(numbers, [p for group in own for p in group["params"]], strict=True))
    entries = saved["state"]
    if not isinstance(entries, dict) or not entries.keys() <= parameters.keys():
        raise ValueError(f"optimizer.state must be of the parameters {numbers}, not of {short(list(entries))}")
    expected = dict(zip(numbers, _expected_state(optimizer, groups, own), strict=False))
    for number, entry in entries.items():
        _check_entry(f"optimizer.state[{number}]", entry, parameters[number], expected.get(number))


def _check_settings(what: str, optimizer: torch.optim.Optimizer, group: dict[str, Any], own: dict[str, Any]) -> None:
    for name, mine in own.items():
        if name == "params" or name not in group:
            continue
        value, where = group[name], f"{what}.{name}"
        if name in IMPLEMENTATION:
            Maybe(Flag()).check(where, value)
        elif isinstance(mine, bool):
            if value is not mine:
                raise ValueError(f"{where} must be {mine} as in this run, not {short(value)}")
        elif isinstance(mine, float | int | Tensor):
            Real(0 if name == "lr" else -math.inf).check(where, _number(value))
        elif isinstance(mine, tuple) and (not isinstance(value, tuple | list) or len(value) != len(mine)):
            raise ValueError(f"{where} must have {len(mine)} entries, not {short(value)}")
    try:
        _rebuilt(optimizer, [group], [torch.zeros(1, requires_grad=True)])
    except (ValueError, TypeError) as error:  # the constructors of torch's optimizers know the ranges of settings
        raise ValueError(f"{what}: {error}") from error


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _rebuilt(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], parameters: list[Any]
) -> torch.optim.Optimizer | None:
    """Returns an optimizer of the same class with the settings of `groups`; None if the class is none of torch's."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return None
    known = set(inspect.signature(kind.__init__).parameters) - {"self", "params", *IMPLEMENTATION}
    settings = [{name: _number(value) for name, value in group.items() if name in known} for group in groups]
    if len(groups) == 1:
        return kind(parameters, **settings[0])
    return kind([{"params": some, **one} for some, one in zip(parameters, settings, strict=True)], **settings[0])


def _expected_state(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], own: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the state that a step would create for each parameter, made by a step of a copy without memory.

    The list is empty if the class is none of torch's, or steps in another way than from gradients alone.
    """
    parameters = []
    for group in own:
        some = [nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]]
        for parameter in some:
            parameter.grad = torch.empty_like(parameter)
        parameters.append(some)
    try:
        copy = _rebuilt(optimizer, groups, parameters if len(groups) > 1 else parameters[0])
        if copy is None:
            return []
        copy.step()
    except (RuntimeError, TypeError, NotImplementedError):
        return []
    return [dict(copy.state[p]) for some in parameters for p in some]


def _check_entry(what: str, entry: Any, parameter: Tensor, expected: dict[str, Any] | None) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{what} must be a dict, not {short(entry)}")
    if not entry:
        return
    missing = [name for name in expected or {} if name not in entry and name not in OPTIONAL]
    if missing:
        raise ValueError(f"{what} must have {', '.join(map(repr, missing))}")
    for name, value in entry.items():
        where, least = f"{what}.{name}", 0.0 if name in NOT_NEGATIVE and expected is not None else None
        if not isinstance(value, Tensor):
            Plain().check(where, value)
            if isinstance(value, int | float) and least is not None:
                Real(least).check(where, value)
            if expected is not None and isinstance(expected.get(name), Tensor) and not _may_be(name, value):
                raise ValueError(f"{where} must be a tensor, not {short(value)}")
            continue
        shape = tuple(value.shape)
        if expected is not None:
            like = expected.get(name)
            shapes = [tuple(like.shape)] if isinstance(like, Tensor) else [tuple(parameter.shape), (), (1,)]
            if shape not in shapes:
                raise ValueError(f"{where} must have the shape {shapes[0]}, not {shape}")
        Vector(shape, value.dtype, least).check(where, value)


def _may_be(name: str, value: Any) -> bool:
    """Returns whether a value that is no tensor may stand for one: a count, or a momentum that is not there yet."""
    return (name == "step" and type(value) in (int, float)) or (name in OPTIONAL and value is None)


def merge_optimizers(saved: list[Any]) -> Any:
    """Returns the mean of the ranks' moments, over the ranks that have them; counts of steps are the largest one."""
    if isinstance(saved[0], list):
        return [_merge(list(of_ranks)) for of_ranks in zip(*saved, strict=True)]
    return _merge(saved)


def _merge(saved: list[dict[str, Any]]) -> dict[str, Any]:
    state: dict[Any, Any] = {}
    for number in sorted({number for one in saved for number in one["state"]}):
        entries = [one["state"][number] for one in saved if one["state"].get(number)]
        names = dict.fromkeys(name for entry in entries for name in entry)
        state[number] = {name: _merged(name, [e[name] for e in entries if e.get(name) is not None]) for name in names}
    return {"state": state, "param_groups": saved[0]["param_groups"]}


def _merged(name: str, values: list[Any]) -> Any:
    if not values:
        return None
    if name == "step":
        return max(values, key=float)
    if all(isinstance(value, Tensor) and value.is_floating_point() for value in values):
        return mean_of(values)
    return values[0]
