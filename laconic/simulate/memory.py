"""Predicts the memory of a simulation before it begins, from its first workers."""

from __future__ import annotations

from pathlib import Path

MEASURED_WORKERS = 2  # the first fills caches that all share, such as data; the second shows what one more takes
LEAST_NBYTES = 1 << 18  # of a worker, however small its model
# Of a worker when it trains, relative to when it starts: then come gradients, the optimizer's state and messages.
GROWTH = 3


class MemoryWatch:
    """Compares the memory that all workers will take with the memory that is free.

    Args:
        workers: how many there will be.

    The prediction is checked when the first workers wait for the others, with their models built; the rest have not
    started by then. Where the system does not say how much memory is free, nothing is checked.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._used: list[int] = []  # after each of the first workers has started

    def add_worker(self) -> None:
        """Notes that another worker has started, and waits.

        Raises:
            MemoryError: all workers together are predicted to take more memory than there is.
        """
        used, available = _used_nbytes(), _available_nbytes()
        if used is None or available is None or len(self._used) >= MEASURED_WORKERS:
            return
        self._used.append(used)
        if len(self._used) == MEASURED_WORKERS:
            self.check(self._used[-1] - self._used[-2], available)

    def check(self, worker_nbytes: int, available: int) -> None:
        """Raises a MemoryError if workers that start with so many bytes will need more than is available."""
        nbytes = max(LEAST_NBYTES, GROWTH * worker_nbytes)
        if nbytes * self._workers > available:
            raise MemoryError(
                f"{self._workers} simulated workers would take about {nbytes * self._workers / 2**30:.1f} GiB, "
                f"{nbytes / 2**20:.1f} MiB each, and {available / 2**30:.1f} GiB are free: simulate at most "
                f"{available // nbytes} workers, or a smaller model"
            )


def _used_nbytes() -> int | None:
    """Returns the memory of this process without mapped files, such as data, or None if the system does not say."""
    return _kibibytes(Path("/proc/self/status"), "RssAnon:")


def _available_nbytes() -> int | None:
    """Returns the memory that processes can still take, or None if the system does not say."""
    return _kibibytes(Path("/proc/meminfo"), "MemAvailable:")


def _kibibytes(path: Path, name: str) -> int | None:
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None
