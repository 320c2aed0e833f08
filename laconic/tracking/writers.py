"""Where metrics can be written. Trackers are recognised by their functions, so none of them is imported here."""

from __future__ import annotations

import contextlib
import csv
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LONGEST_HEADER = 1 << 20  # characters
Write = Callable[[int, Mapping[str, float]], object]  # the step, and the metrics


def writer_for(writer: Any, prefix: str, names: list[str]) -> Write:
    """Returns a function that writes metrics to a tracker, to a CSV file, or to a function of the user.

    Args:
        writer, prefix: as in `laconic.track`.
        names: of the metrics.

    Raises:
        ValueError: `writer` is none of these, or the CSV file is of other metrics.
        OSError: the CSV file cannot be opened.
    """
    if isinstance(writer, str | os.PathLike):
        path = Path(writer)
        if path.suffix != ".csv":
            raise ValueError(f"a writer that is a path must end in .csv, not {str(path)!r}")
        return CsvWriter(path, names)
    if callable(getattr(writer, "add_scalar", None)):
        return _Scalars(writer, prefix)
    # Before `log`: loggers of other frameworks have both.
    if callable(getattr(writer, "log_metrics", None)):
        return _Metrics(writer, prefix)
    if callable(getattr(writer, "log", None)):
        return _Run(writer, prefix)
    if callable(writer):
        function: Write = writer
        return function
    raise ValueError(
        f"writer must be a SummaryWriter (add_scalar), a W&B run (log), the module mlflow (log_metrics), a path that "
        f"ends in .csv or a function of step and metrics, not {writer!r}"
    )


class _Scalars:
    """TensorBoard's SummaryWriter, and what has its `add_scalar`."""

    def __init__(self, writer: Any, prefix: str) -> None:
        self._writer, self._prefix = writer, prefix

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in known(metrics, self._prefix).items():
            self._writer.add_scalar(name, value, step)


class _Metrics:
    """The module mlflow, and what has its `log_metrics`."""

    def __init__(self, writer: Any, prefix: str) -> None:
        self._writer, self._prefix = writer, prefix

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        self._writer.log_metrics(known(metrics, self._prefix), step=step)


class _Run:
    """A run of Weights & Biases, or its module.

    W&B counts calls of `log` and drops a call whose `step` is behind that count. The user's own calls advance it by
    any number, so laconic passes no step: it declares its key `step` as the x-axis of its charts.
    """

    def __init__(self, writer: Any, prefix: str) -> None:
        self._writer, self._prefix = writer, prefix
        self._is_declared = False

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._is_declared and callable(getattr(self._writer, "define_metric", None)):
            self._writer.define_metric(f"{self._prefix}step")
            self._writer.define_metric(f"{self._prefix}*", step_metric=f"{self._prefix}step")
        self._is_declared = True
        self._writer.log(known(metrics, self._prefix))


class CsvWriter:
    """Appends one row for each call to a CSV file; a value that is not known is an empty cell.

    Args:
        path: a new file, or one with the same columns, to which a resumed run adds.
        columns: the names of the metrics.
    """

    def __init__(self, path: Path, columns: list[str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+", newline="")
        self._rows = csv.DictWriter(self._file, columns)
        self._file.seek(0)
        header = next(csv.reader([self._file.readline(LONGEST_HEADER)]), None)
        self._file.seek(0, os.SEEK_END)
        if not header:
            self._rows.writeheader()
        elif header != columns:
            self._file.close()
            raise ValueError(f"{path} has other columns than this run would write: name another file, or delete it")

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rows.writerow({name: "" if math.isnan(value) else f"{value:.10g}" for name, value in metrics.items()})
        self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of rows that could not be written, which was an error before
            self._file.close()


def known(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Returns the metrics that have a value, with the prefix before their names.

    >>> known({"bits": 4.0, "period": math.nan}, "laconic/")
    {'laconic/bits': 4.0}
    """
    return {f"{prefix}{name}": value for name, value in metrics.items() if not math.isnan(value)}
