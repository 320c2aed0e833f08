"""Looks up names that users type."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def look_up(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Returns the entry of a table by its name.

    Args:
        kind: what the table lists, for the error message.
        name: the name as the user typed it.
        table: the entries by name.

    Raises:
        ValueError: there is no such name; the message suggests similar names.

    >>> look_up("color", "gren", {"blue": 1, "green": 2})
    Traceback (most recent call last):
    ...
    ValueError: no color is called 'gren'; did you mean green? there are: blue, green
    """
    if not isinstance(name, str):
        raise ValueError(f"the name of a {kind} must be a text, not {name!r}; there are: {', '.join(table)}")
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"no {kind} is called {name!r}; {hint}there are: {', '.join(table)}")
