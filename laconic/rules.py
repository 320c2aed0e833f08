"""Checks of arguments. Each raises a ValueError that names the argument, the rule and the value."""

from __future__ import annotations

import math
from collections.abc import Collection

MOST = 2**31 - 1  # counts beyond it are typing errors, and would overflow somewhere later
MOST_SEED = 2**64 - 1


def check_count(name: str, value: object, least: int = 1, most: int = MOST) -> None:
    """Raises unless `value` is an int from `least` to `most`. `True` is no int here.

    >>> check_count("period", 2.0)
    Traceback (most recent call last):
    ...
    ValueError: period must be a whole number, at least 1, not 2.0
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        is_lower_bound = most == MOST and not (isinstance(value, int) and value > most)
        rule = f", at least {least}" if is_lower_bound else f" from {least} to {most}"
        raise ValueError(f"{name} must be a whole number{rule}, not {value!r}")


def check_number(
    name: str, value: object, least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf
) -> None:
    """Raises unless `value` is a finite number from `least` (or above `above`) to `most`.

    >>> check_number("lr", float("nan"), above=0)
    Traceback (most recent call last):
    ...
    ValueError: lr must be a finite number above 0, not nan
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and least <= value <= most and value > above and math.isfinite(value):  # type: ignore[operator,arg-type]
        return
    rules = [
        *([f"above {above:g}"] if above > -math.inf else []),
        *([f"at least {least:g}"] if least > -math.inf else []),
        *([f"at most {most:g}"] if most < math.inf else []),
    ]
    raise ValueError(f"{name} must be a finite number{' ' if rules else ''}{' and '.join(rules)}, not {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raises unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def check_choice(name: str, value: object, choices: Collection[str | int | None]) -> None:
    """Raises unless `value` is one of the choices. `True` is not 1 here.

    >>> check_choice("moments", "mean", ("local", "averaged"))
    Traceback (most recent call last):
    ...
    ValueError: moments must be one of local, averaged, not 'mean'
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")


def check_seed(value: object, name: str = "seed") -> None:
    """Raises unless `value` is an int of 64 bits, at least 0."""
    check_count(name, value, least=0, most=MOST_SEED)


def check_text(name: str, value: object, example: str) -> None:
    """Raises unless `value` is a text. `example`: one that is valid.

    >>> check_text("topology", 8, "ring")
    Traceback (most recent call last):
    ...
    ValueError: topology must be a text such as 'ring', not 8
    """
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text such as {example!r}, not {value!r}")
