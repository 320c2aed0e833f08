"""Finds out which ranks an error message accuses."""

from __future__ import annotations

import re

# Ranks that a message mentions without blaming them: the rank that speaks, the peer of an operation, the list of ranks
# that had to come, details in parentheses at the end.
_NEUTRAL = [
    r"(?:^|(?<=: )|(?<=; ))rank \d+: ",
    r"\bwith rank \d+",
    r"\bsays rank \d+",
    r"\bto all \d+ ranks",
    r"the workers \[[\d, ]*\] have no path to \[[\d, ]*\]",
    r"\([^()]*\)$",
]
_RANKS = re.compile(r"\branks? (\d+(?:(?:, | and )\d+)*)|\(usually (\d+)\)")


def accused(text: str) -> set[int]:
    """Returns the ranks that a message accuses: all it mentions, but for those in a neutral place.

    >>> sorted(accused("rank 0: mean at step 4 cannot complete: rank 1 failed at step 3: KeyError: 'x'"))
    [1]
    >>> sorted(accused("rank 0: mean at step 3 failed, no sign of life from ranks 1, 2 (the wire to rank 3: reset)"))
    [1, 2]
    """
    text = text.strip()
    for pattern in _NEUTRAL:
        text = re.sub(pattern, "", text)
    found = (first or second for first, second in _RANKS.findall(text))
    return {int(number) for numbers in found for number in re.findall(r"\d+", numbers)}
