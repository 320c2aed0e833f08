"""How a run is doing: a live line on a terminal, plain lines elsewhere."""

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

from laconic.bench.run import Plan
from laconic.bench.units import nbytes_text
from laconic.bench.ways import Asked

REFRESH_SECONDS = 0.25
LINE_SECONDS = 10.0  # between two plain lines


class Display:
    """Rank 0 writes (step, loss, payload bytes, steps) into a small file; a thread here reads it now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def __call__(self, asked: Asked, plan: Plan) -> Iterator[Path]:
        with tempfile.NamedTemporaryFile(prefix="laconic-progress-") as file:
            file.write(np.zeros(4).tobytes())
            file.flush()
            seen = np.memmap(file.name, dtype=np.float64, mode="r")
            over = threading.Event()
            show = self._live if self._console.is_terminal else self._plain
            name = f"{asked.text} (seed {plan.seed})" if plan.seed else asked.text
            thread = threading.Thread(target=show, args=(name, plan.steps, seen, over), daemon=True)
            thread.start()
            try:
                yield Path(file.name)
            finally:
                over.set()
                thread.join()

    def _live(self, name: str, steps: int, seen: np.ndarray, over: threading.Event) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(name, total=steps, text="starting")
            for text in watch(seen, over):
                progress.update(task, completed=seen[0], text=text)
        self._line(name, text)

    def _plain(self, name: str, steps: int, seen: np.ndarray, over: threading.Event) -> None:
        self._line(name, f"{steps} steps")
        last = time.monotonic()
        for text in watch(seen, over):
            if time.monotonic() - last > LINE_SECONDS:
                last = time.monotonic()
                self._line(name, text)
        self._line(name, text)

    def _line(self, name: str, text: str) -> None:
        self._console.print(f"{name}: {text}", highlight=False, soft_wrap=True)


def watch(seen: np.ndarray, over: threading.Event) -> Iterator[str]:
    """How the run is doing, now and then, and at its end."""
    start = None
    ended = False
    while not ended:
        ended = over.wait(REFRESH_SECONDS)
        if seen[0] and start is None:
            start = (time.monotonic(), float(seen[0]))
        yield "starting" if start is None else describe(seen, *start)


def describe(seen: np.ndarray, start: float, first: float) -> str:
    """Step, loss, speed, bytes and the time that is left, from what rank 0 wrote since `start`, at step `first`."""
    step, loss, payload, steps = seen
    text = f"step {step:.0f}/{steps:.0f}  loss {loss:.4f}  {nbytes_text(payload)} sent"
    elapsed = time.monotonic() - start
    if step > first and elapsed > 0:
        speed = (step - first) / elapsed
        text += f"  {speed:.1f} steps/s  ETA {(steps - step) / speed:.0f} s"
    return text
