"""What each verb sends: how many bytes, in how many rounds. The meter counts by it, and simulated links delay by it.

A round is a message that is sent after the one before it has arrived, so each costs the delay of the path once. With
gloo a message is sent only when the receiver has announced its buffer, which costs a round of its own.

gloo's ring passes 2n segments around, two at a time: a buffer is announced when the segment two before it has arrived.
So each of the n − 1 steps of a pass costs two rounds, and while the second of two segments is sent, the announcement
for the next is on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ANNOUNCEMENT_ROUNDS = 1  # of gloo: from the receiver, before the first message
SMALL_NBYTES = 2**16  # up to here, blocking verbs of the foreground bypass gloo's rings


@dataclass(frozen=True)
class Rounds:
    """How often the messages of a verb wait for each other.

    Args:
        count: rounds, where sending bytes takes no time.
        hidden: the share of the bytes' time in which other rounds' messages are on their way.
        least: rounds that are left, however long the bytes take.
    """

    count: int
    hidden: float = 0.0
    least: int = 0


def _ring(size: int, passes: int) -> Rounds:
    """Returns the rounds of gloo's ring."""
    if size == 1:
        return Rounds(0)
    steps = size - 1
    return Rounds(2 * passes * steps, (steps - 1) / (2 * steps), 2 * passes)


def is_direct(nbytes: int | None, *, background: bool) -> bool:
    """Returns whether messages go straight to all ranks, on connections of their own, and not around gloo's ring.

    Args:
        nbytes: an upper bound on every message, if all ranks know one.
        background: whether the channel is a background channel.
    """
    return background or (nbytes is not None and nbytes <= SMALL_NBYTES)


def mean_nbytes(nbytes: int, size: int) -> int:
    """Returns how many bytes each of `size` ranks sends to average `nbytes`, by a ring or by direct messages.

    >>> mean_nbytes(1000, 4)
    1500
    """
    return round(2 * (size - 1) * nbytes / size)


def mean_rounds(size: int, *, direct: bool) -> Rounds:
    """Returns the rounds of a mean: to the ranks that average a share each, and back; or twice around the ring.

    >>> mean_rounds(5, direct=True), mean_rounds(5, direct=False)
    (Rounds(count=2, hidden=0.0, least=0), Rounds(count=16, hidden=0.375, least=4))
    """
    return Rounds(2) if direct else _ring(size, passes=2)


def all_gather_nbytes(nbytes: int, size: int) -> int:
    """Returns how many bytes a rank sends so that all others receive its `nbytes`.

    >>> all_gather_nbytes(1000, 4)
    3000
    """
    return (size - 1) * nbytes


def all_gather_rounds(size: int, *, direct: bool) -> Rounds:
    """Returns the rounds of an all_gather: one, or once around the ring.

    >>> all_gather_rounds(8, direct=True).count, all_gather_rounds(8, direct=False).count
    (1, 14)
    """
    return Rounds(1) if direct else _ring(size, passes=1)


def all_to_all_nbytes(lengths: Sequence[int], place: int, element_size: int) -> int:
    """Returns how many bytes the rank at `place` sends in an all_to_all.

    >>> all_to_all_nbytes([5, 6, 7], place=1, element_size=4)
    48
    """
    return (sum(lengths) - lengths[place]) * element_size


def all_to_all_rounds(*, direct: bool) -> Rounds:
    """Returns the rounds of an all_to_all, or of an exchange of two ranks.

    >>> all_to_all_rounds(direct=True).count, all_to_all_rounds(direct=False).count
    (1, 2)
    """
    return Rounds(1 if direct else 1 + ANNOUNCEMENT_ROUNDS)


def broadcast_nbytes(nbytes: int, place: int, size: int) -> int:
    """Returns how many bytes a rank sends in the binomial tree by which gloo broadcasts.

    Args:
        nbytes: of the tensor.
        place: of the rank, counted from the root.
        size: the number of ranks.

    >>> [broadcast_nbytes(100, place, 4) for place in range(4)]
    [200, 100, 0, 0]
    """
    children, bit = 0, 1
    while bit < size:
        if place < bit and place + bit < size:
            children += 1
        bit <<= 1
    return children * nbytes


def broadcast_rounds(size: int) -> Rounds:
    """Returns the rounds of a broadcast: the depth of its tree, and the announcement, which all send at once.

    >>> [broadcast_rounds(size).count for size in (1, 2, 4, 5)]
    [0, 2, 3, 4]
    """
    return Rounds((size - 1).bit_length() + ANNOUNCEMENT_ROUNDS if size > 1 else 0)


MEETING_ROUNDS = 6  # to the store and back: looking for all notes, and reading them (torch asks twice)
# Of gossip: the worker that comes last replaces the board (2) and wakes up its partner (2), which reads the board (2).
PAIRING_ROUNDS = 6
