"""The logger `laconic`: every record has the rank of the process that wrote it, as `%(rank)s` in a format."""

from __future__ import annotations

import logging
import os
import warnings

import torch.distributed as dist


class RankFilter(logging.Filter):
    """Adds `rank` to each record, and remembers the last warning or error for the live view.

    Attributes:
        problems: how many records of level WARNING or above there were.
        last_problem: the text of the last one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problems = 0
        self.last_problem = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "rank"):
            record.rank = own_rank()
        if record.levelno >= logging.WARNING:
            self.note(record.getMessage())
        return True

    def note(self, problem: str) -> None:
        self.problems += 1
        self.last_problem = problem


logger = logging.getLogger("laconic")
rank_filter = RankFilter()
logger.addFilter(rank_filter)


def own_rank() -> int:
    """Returns the rank of this process: of torch.distributed if it is initialised, else by the launcher's RANK.

    >>> own_rank()
    0
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def warn(text: str, stacklevel: int = 1) -> None:
    """Issues a UserWarning, as `warnings.warn`, and writes the same text to the logger.

    A process that has not configured logging sees the text once: the logger is used only if it has a handler, which
    its own or the root logger's may be.
    """
    if logger.hasHandlers():
        logger.warning(text)
    else:
        rank_filter.note(text)
    warnings.warn(text, stacklevel=stacklevel + 1)
