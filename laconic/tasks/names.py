"""Help for a mistyped name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near_misses(name: str, known: Iterable[str]) -> str:
    """The end of an error message: what may have been meant, and all there is."""
    choices = sorted(known)
    near = get_close_matches(name, choices)
    meant = f"; did you mean {' or '.join(near)}?" if near else ";"
    return f"{meant} there are: {', '.join(choices)}"
