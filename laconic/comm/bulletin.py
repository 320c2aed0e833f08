"""A board of short texts, one per rank, that every rank may read at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laconic.comm.store import JobStore


class Bulletin:
    """The board of one rank alone. A later text of a rank replaces its earlier one.

    >>> board = Bulletin(rank=0)
    >>> board.post("step 3")
    >>> board.read()
    {0: 'step 3'}
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own: dict[int, str] = {}

    def post(self, text: str) -> None:
        """Replaces this rank's text."""
        self._own[self._rank] = text

    def read(self) -> dict[int, str]:
        """Returns the last text of each rank that has posted one."""
        return dict(self._own)


class StoreBulletin(Bulletin):
    """The board in the job's store. The text of a rank that died stays.

    Args:
        store: a connection of its own, so that no other caller waits for it.
        rank: this worker.
        size: the number of workers.
    """

    def __init__(self, store: JobStore, rank: int, size: int) -> None:
        super().__init__(rank)
        self._store, self._size = store, size
        self._known: list[int] = []  # ranks that have posted

    def post(self, text: str) -> None:
        self._store.set(str(self._rank), text)

    def read(self) -> dict[int, str]:
        self._known += [
            rank for rank in range(self._size) if rank not in self._known and self._store.check([str(rank)])
        ]
        texts = self._store.multi_get([str(rank) for rank in self._known]) if self._known else []
        return {rank: text.decode() for rank, text in sorted(zip(self._known, texts, strict=True))}
