"""Describes what saved state must look like, so that it can be checked before anything is changed.

A file may be damaged or edited, so nothing in it is trusted. Whoever has state says its form beside it:

>>> form = Fields({"period": Whole(1, 64), "variance": Maybe(Real(0))})
>>> form.check("method", {"period": 4, "variance": None})
>>> form.check("method", {"period": 65, "variance": None})
Traceback (most recent call last):
...
ValueError: method.period must be a whole number from 1 to 64, not 65
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

MOST = 1 << 53  # a whole number that a double holds exactly


class Form(Protocol):
    """What a saved value must look like."""

    def check(self, what: str, value: Any) -> None:
        """Raises a ValueError that names `what` if the value does not have this form."""


@dataclass(frozen=True)
class Whole:
    """A whole number within bounds."""

    least: int = 0
    most: int = MOST

    def check(self, what: str, value: Any) -> None:
        if type(value) is not int or not self.least <= value <= self.most:
            raise ValueError(f"{what} must be a whole number from {self.least} to {self.most}, not {short(value)}")


@dataclass(frozen=True)
class Real:
    """A finite number within bounds."""

    least: float = -math.inf
    most: float = math.inf

    def check(self, what: str, value: Any) -> None:
        number = type(value) in (int, float) and abs(value) < math.inf
        if not number or not self.least <= value <= self.most:
            raise ValueError(f"{what} must be a finite number from {self.least:g} to {self.most:g}, not {short(value)}")


@dataclass(frozen=True)
class Flag:
    """True or False."""

    def check(self, what: str, value: Any) -> None:
        if type(value) is not bool:
            raise ValueError(f"{what} must be True or False, not {short(value)}")


@dataclass(frozen=True)
class Choice:
    """One of some values."""

    values: tuple[Any, ...]

    def check(self, what: str, value: Any) -> None:
        if not any(type(value) is type(one) and value == one for one in self.values):
            raise ValueError(f"{what} must be one of {', '.join(map(repr, self.values))}, not {short(value)}")


@dataclass(frozen=True)
class Vector:
    """A tensor of a shape and dtype, with finite entries that are not less than `least`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    least: float | None = None

    def check(self, what: str, value: Any) -> None:
        form = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
        if form != (self.shape, self.dtype) or value.layout != torch.strided:
            raise ValueError(f"{what} must be {(self.shape, self.dtype)}, and the saved one is {form}")
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{what} must be finite, and has NaN or infinity")
        if self.least is not None and value.numel() and not bool((value >= self.least).all()):
            raise ValueError(f"{what} must not be less than {self.least:g}, and has {value.min():g}")


@dataclass(frozen=True)
class Maybe:
    """None, or something of a form."""

    form: Form

    def check(self, what: str, value: Any) -> None:
        if value is not None:
            self.form.check(what, value)


@dataclass(frozen=True)
class Each:
    """A list of any length up to `most`, whose entries have one form."""

    form: Form
    most: int = MOST

    def check(self, what: str, value: Any) -> None:
        if type(value) is not list or len(value) > self.most:
            raise ValueError(f"{what} must be a list of at most {self.most} entries, not {short(value)}")
        for i, entry in enumerate(value):
            self.form.check(f"{what}[{i}]", entry)


@dataclass(frozen=True)
class Row:
    """A list with a form for each entry."""

    forms: tuple[Form, ...]

    def check(self, what: str, value: Any) -> None:
        if type(value) is not list or len(value) != len(self.forms):
            raise ValueError(f"{what} must be a list of {len(self.forms)} entries, not {short(value)}")
        for i, (form, entry) in enumerate(zip(self.forms, value, strict=True)):
            form.check(f"{what}[{i}]", entry)


@dataclass(frozen=True)
class Fields:
    """A dict with these keys and a form for each. Those of `optional` may be missing."""

    forms: Mapping[str, Form]
    optional: Mapping[str, Form] = field(default_factory=dict)

    def check(self, what: str, value: Any) -> None:
        if not isinstance(value, dict) or value.keys() - self.optional.keys() != self.forms.keys():
            keys = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{what}: the saved state must have the keys {sorted(self.forms)}, not {keys}")
        for name, form in (*self.forms.items(), *self.optional.items()):
            if name in value:
                form.check(f"{what}.{name}", value[name])


@dataclass(frozen=True)
class Plain:
    """Tensors, numbers, texts, None, and lists, tuples and dicts of these; all numbers finite."""

    def check(self, what: str, value: Any) -> None:
        if isinstance(value, Tensor):
            Vector(tuple(value.shape), value.dtype).check(what, value)
        elif isinstance(value, dict):
            for key, entry in value.items():
                self.check(f"{what}.{key}", entry)
        elif isinstance(value, list | tuple):
            for i, entry in enumerate(value):
                self.check(f"{what}[{i}]", entry)
        elif isinstance(value, float):
            Real().check(what, value)
        elif value is not None and not isinstance(value, str | int | bool):
            raise ValueError(f"{what} must be tensors and plain data, not {type(value).__name__}")


def form_of(value: Any, least: float | None = None) -> Form:
    """Returns the form of a value: the same kind, and tensors of the same shape and dtype.

    >>> form_of(3).check("steps", 2.5)
    Traceback (most recent call last):
    ...
    ValueError: steps must be a whole number from -9007199254740992 to 9007199254740992, not 2.5
    """
    if isinstance(value, Tensor):
        return Vector(tuple(value.shape), value.dtype, least)
    if isinstance(value, bool):
        return Flag()
    if isinstance(value, int):
        return Whole(-MOST)
    if isinstance(value, float):
        return Real()
    return Plain()


def short(value: Any) -> str:
    """Returns a value for an error message."""
    text = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
