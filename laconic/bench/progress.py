"""Shows the progress of a run: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from laconic.bench.record import Record
from laconic.bench.run import Plan
from laconic.bench.strategies import Contender
from laconic.bench.units import is_simulated, labelled_metric_text, metric_text, nbytes_text, seconds_text

REFRESH_SECONDS = 0.25
LINE_SECONDS = 10.0  # between two plain lines, where there is no terminal


class Display:
    """Shows what rank 0 writes to a small shared file: step, loss, payload bytes, total steps.

    A thread reads the file every quarter of a second, so showing progress costs the workers no communication.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def __call__(self, contender: Contender, plan: Plan) -> Iterator[Path]:
        """Shows progress during a `with` block; yields the path of the file that rank 0 must write."""
        with tempfile.NamedTemporaryFile(prefix="laconic-progress-") as file:
            file.write(np.zeros(4).tobytes())
            file.flush()
            seen = np.memmap(file.name, dtype=np.float64, mode="r")
            ended = threading.Event()
            show = self._live if self._console.is_terminal else self._plain
            name = run_name(contender.label, plan.seed)
            thread = threading.Thread(target=show, args=(name, plan.steps, seen, ended), daemon=True)
            thread.start()
            try:
                yield Path(file.name)
            finally:
                ended.set()
                thread.join()

    def show_result(self, record: Record) -> None:
        """Prints the result of a run that has ended."""
        self._line(run_name(record.name, record.seed), result_text(record))

    def _live(self, name: str, steps: int, seen: np.ndarray, ended: threading.Event) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(name, total=steps, text="starting")
            for text in watch(seen, ended):
                progress.update(task, completed=seen[0], text=text)
        self._line(name, text)

    def _plain(self, name: str, steps: int, seen: np.ndarray, ended: threading.Event) -> None:
        self._line(name, f"{steps} steps, starting")
        last = time.monotonic()
        for text in watch(seen, ended):
            if time.monotonic() - last > LINE_SECONDS:
                last = time.monotonic()
                self._line(name, text)
        self._line(name, text)

    def _line(self, name: str, text: str) -> None:
        self._console.print(f"{name}: {text}", highlight=False, soft_wrap=True)


def run_name(label: str, seed: int) -> str:
    """Returns the name of a run in progress displays; the seed is shown if it is not 0."""
    return f"{label} (seed {seed})" if seed else label


def result_text(record: Record) -> str:
    """Returns the result of a run in one line."""
    final = record.final()
    if record.status != "ok" or final is None:
        return f"failed: {record.reason.strip().splitlines()[-1]}"
    simulated = " (simulated)" if is_simulated(record.link) else ""
    text = f"{labelled_metric_text(record.metric, final)} after {seconds_text(record.seconds)}{simulated}"
    if record.target is None:
        return text
    reached = record.reached(record.target)
    goal = metric_text(record.metric, record.target)
    return f"{text}; {f'{goal} in {seconds_text(reached.seconds)}' if reached else f'{goal} not reached'}"


def watch(seen: np.ndarray, ended: threading.Event) -> Iterator[str]:
    """Yields a description of the progress every REFRESH_SECONDS, and once more at the end."""
    start = None
    finished = False
    while not finished:
        finished = ended.wait(REFRESH_SECONDS)
        if seen[0] and start is None:
            start = (time.monotonic(), float(seen[0]))
        yield describe_start(seen) if start is None else describe(seen, *start)


def describe_start(seen: np.ndarray) -> str:
    """Returns what happens before the first step. Until then, a worker that compiles writes its expected seconds."""
    return f"compiling kernels, once, about {seen[1]:.0f} s" if seen[1] else "starting"


def describe(seen: np.ndarray, start: float, first: float) -> str:
    """Returns step, loss, bytes, speed and remaining time as text.

    Args:
        seen: What rank 0 wrote: step, loss, payload bytes, total steps.
        start: When the first progress was seen, by `time.monotonic()`.
        first: The step that was seen then.
    """
    step, loss, payload, steps = seen
    text = f"step {step:.0f}/{steps:.0f}  loss {loss:.4f}  {nbytes_text(payload)} sent"
    elapsed = time.monotonic() - start
    if step > first and elapsed > 0:
        speed = (step - first) / elapsed
        text += f"  {speed:.1f} steps/s  ETA {(steps - step) / speed:.0f} s"
    return text
