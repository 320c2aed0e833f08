"""`laconic.track`: writes a worker's metrics to an experiment tracker while it trains."""

from __future__ import annotations

from typing import Any

from laconic.log import logger
from laconic.rules import check_count, check_text
from laconic.tracking.metrics import Readings, Tracked
from laconic.tracking.tracking import Tracking
from laconic.tracking.writers import CsvWriter, Write, writer_for


class Track:
    """One writer of one worker. A writer that raises is switched off, with one warning; training goes on."""

    def __init__(self, worker: Tracked, write: Write, every: int) -> None:
        self._readings, self._write, self._every = Readings(worker), write, every
        self._rank, self._is_on = worker.comm.rank, True
        self._has_steps = False  # since the last row

    def end_step(self, step: int) -> None:
        self._has_steps = True
        if step % self._every == 0:
            self._try_to_write(step)

    def close(self, step: int) -> None:
        """Writes the steps since the last row, if there are any, so that all rows add up to the run."""
        if self._has_steps:
            self._try_to_write(step)
        self._close_file()

    def _close_file(self) -> None:
        if isinstance(self._write, CsvWriter):
            self._write.close()

    def _try_to_write(self, step: int) -> None:
        if not self._is_on:
            return
        self._has_steps = False
        try:
            self._write(step, self._readings.read())
        except Exception as error:  # noqa: BLE001  whatever a tracker raises must not stop training
            self._is_on = False
            self._close_file()
            logger.warning(
                f"rank {self._rank}, step {step}: tracking is switched off, training goes on: the writer raised "
                f"{type(error).__name__}: {error}"
            )


def track(
    worker: Tracked,
    writer: Any,
    every: int = 10,
    *,
    rank: int | None = 0,
    prefix: str = "laconic/",
) -> None:
    """Writes `worker.metrics()` to a tracker, every so many steps; steps that are left at the end come last.

    Call it inside the worker's block, on all ranks or only on those that write. Each call has counters of its own, so
    several writers and calls of `worker.metrics()` do not disturb each other. A writer that raises is switched off
    with one warning in the logger `laconic`, and training goes on.

    Args:
        worker: the worker, in its block.
        writer: TensorBoard's `SummaryWriter` (anything with `add_scalar`), the module `mlflow` (`log_metrics`), a run
            of Weights & Biases or its module (`log`), a path that ends in `.csv`, or a function of the step and the
            dict. Ignored, and may be None, on ranks that do not write.
        every: write after steps that are multiples of this.
        rank: the rank that writes; None for all ranks, each with a writer of its own.
        prefix: comes before each key, except in a CSV file and for a function. Values that a method does not have
            (NaN) are left out there.

    Raises:
        ValueError: `writer` is nothing that can be written to, or another argument is wrong.
        OSError: the CSV file cannot be opened.

    >>> import torch, laconic
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> log = {}
    >>> with laconic.Worker(model, optimizer, laconic.LocalSGD(period=2)) as worker:
    ...     laconic.track(worker, lambda step, metrics: log.update({step: metrics["steps"]}), every=2)
    ...     for _ in range(5):
    ...         model(torch.ones(3)).backward()
    ...         optimizer.step()
    >>> log
    {2: 2.0, 4: 2.0, 5: 1.0}
    """
    tracking = getattr(worker, "tracking", None)
    if not isinstance(tracking, Tracking):
        raise ValueError(f"worker must be a laconic.Worker, not {worker!r}")
    if tracking.is_over:
        raise ValueError("laconic.track() must be called inside the worker's block, and it has ended")
    check_count("every", every)
    size = worker.comm.size
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size):
        raise ValueError(f"rank must be a rank from 0 to {size - 1}, or None for all ranks, not {rank!r}")
    check_text("prefix", prefix, "laconic/")
    if rank is None or rank == worker.comm.rank:
        tracking.tracks.append(Track(worker, writer_for(writer, prefix, list(Readings(worker).read())), every))
