"""`laconic data`: downloads datasets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from laconic.bench.units import nbytes_text
from laconic.cli.command import Command, make_console
from laconic.cli.options import POSITIONAL

if TYPE_CHECKING:
    from laconic.tasks.data.fetch import Progress

LINE_SECONDS = 10.0  # between two lines where there is no terminal


@dataclass
class Data(Command):
    """Download a dataset and verify it.

    Args:
        name: cifar10, fashion, shakespeare or translate
    """

    name: Annotated[str, POSITIONAL]

    def run(self) -> int:
        from laconic.tasks import fetch

        console = make_console()
        with show_download(console) as progress:
            paths = fetch(self.name, progress)
        for path in paths:
            console.print(str(path), highlight=False, soft_wrap=True)
        return 0

    def after_interrupt(self) -> str:
        return f"laconic data {self.name} continues the download"


@contextmanager
def show_download(console: Console) -> Iterator[Progress]:
    """Shows downloads during a `with` block: as a bar on a terminal, else a line at the start and every few seconds."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=console) as bars:
        tasks = {}

        def show(url: str, nbytes: int, total: int | None) -> None:
            if url not in tasks:
                tasks[url] = bars.add_task(url, total=total)
            bars.update(tasks[url], completed=nbytes, total=total)

        yield show


class _Lines:
    """Prints the progress of downloads as lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._url, self._last = "", 0.0

    def __call__(self, url: str, nbytes: int, total: int | None) -> None:
        complete = total is not None and nbytes >= total
        if url == self._url and not complete and time.monotonic() - self._last < LINE_SECONDS:
            return
        self._url, self._last = url, time.monotonic()
        whole = "" if total is None else f" of {nbytes_text(total)}"
        self._console.print(f"{url}: {nbytes_text(nbytes)}{whole}", highlight=False, soft_wrap=True)
