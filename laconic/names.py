"""Looks up names that users type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")
LEAST, MARGIN = 0.65, 0.15  # similarity of a name that is suggested: at least, and below that of the nearest one


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
    raise ValueError(f"no {kind} is called {name!r}{suggestion(name, table) or ';'} there are: {', '.join(table)}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean …?" for a name with a typing error, or "" if no known name is similar.

    >>> suggestion("gren", ["blue", "green"])
    '; did you mean green?'
    """
    scores = {one: difflib.SequenceMatcher(None, name, one).ratio() for one in known}
    least = max(LEAST, max(scores.values(), default=0.0) - MARGIN)
    near = sorted((one for one in scores if scores[one] >= least), key=lambda one: -scores[one])[:3]
    return f"; did you mean {' or '.join(near)}?" if near else ""
