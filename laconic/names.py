"""Look a name up in a table, with the near misses in the error."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def look_up(kind: str, name: str, table: Mapping[str, T]) -> T:
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"no {kind} is called {name!r}; {hint}there are: {', '.join(table)}")
