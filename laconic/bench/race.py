"""Shows a comparison as a race to a target, while it runs and as a table of results at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from laconic.bench.headline import REFERENCE, factor_text, headline, reached_without_communication
from laconic.bench.progress import REFRESH_SECONDS, Display, watch
from laconic.bench.record import Record
from laconic.bench.strategies import Contender
from laconic.bench.summary import Summary, summarize
from laconic.bench.table import final_text, title_text
from laconic.bench.units import ABSENT, metric_name, metric_text, nbytes_text, seconds_text

BAR_CHARACTERS = 40
WINNER = "★"


class Race(Display):
    """Shows one lane for each contender: a bar as long as its training time until the target, on a common scale.

    The lane of the run that is under way grows with its training time. Without a terminal, progress is shown as plain
    lines, as `Display` does.
    """

    def __init__(self, console: Console, contenders: Sequence[Contender], target: float) -> None:
        super().__init__(console)
        self._target = target
        self._lanes: dict[str, list[Record]] = {contender.label: [] for contender in contenders}

    def show_result(self, record: Record) -> None:
        self._lanes.setdefault(record.name, []).append(record)
        if not self._console.is_terminal:
            super().show_result(record)

    def _live(self, name: str, steps: int, seen: np.ndarray, ended: threading.Event) -> None:
        label = name.partition(" (seed")[0]
        start = None
        with Live(console=self._console, transient=True, refresh_per_second=1 / REFRESH_SECONDS) as live:
            for text in watch(seen, ended):
                if seen[0] and start is None:
                    start = time.monotonic()
                live.update(self.lanes(label, 0.0 if start is None else time.monotonic() - start, text))

    def lanes(self, running: str, seconds: float, text: str) -> RenderableType:
        """Returns the race as it stands.

        Args:
            running: The contender whose run is under way.
            seconds: The training time of that run so far.
            text: The progress of that run, in words.
        """
        times = {name: self._times(records) for name, records in self._lanes.items()}
        longest = max([seconds, *(max(known) for known in times.values() if known)]) or 1.0
        table = Table.grid(padding=(0, 1))
        for name, known in times.items():
            mean = sum(known) / len(known) if known else None
            shown = seconds if name == running else mean or 0.0
            bar = Text("█" * round(BAR_CHARACTERS * shown / longest), style="yellow" if name == running else "green")
            table.add_row(Text(name), bar, Text(self._status(name, mean)))
        return Group(table, Text(f"{running}: {text}", style="dim"))

    def _times(self, records: Sequence[Record]) -> list[float]:
        points = [record.reached(self._target) for record in records]
        return [point.seconds for point in points if point is not None]

    def _status(self, name: str, mean: float | None) -> str:
        records = self._lanes[name]
        if not records:
            return ""
        if any(record.status != "ok" for record in records):
            return "failed"
        return "not reached" if mean is None else seconds_text(mean)


def race_table(records: Sequence[Record], target: float) -> RenderableType:
    """Returns the result of a race: a table sorted by the time to the target, and below it what each column means.

    The winner is marked. A target that workers reach without communication has no winner and no speed-up.

    Args:
        records: The runs.
        target: A value of the metric.
    """
    summaries = sorted(summarize(records), key=lambda summary: summary.rank(target))
    trivial = reached_without_communication(summaries, target)
    first = summaries[0]
    cost = first.to_target(target)
    has_winner = trivial is None and cost is not None and cost.by_all
    reference = next((s.to_target(target) for s in summaries if s.method == REFERENCE), None)
    compares = trivial is None and reference is not None and reference.by_all
    columns = column_meanings(records, target, compares)
    table = Table(title=title_text(records))
    table.add_column("method", no_wrap=True)
    for header in columns:
        table.add_column(header, justify="right")
    for summary in summaries:
        if not summary.runs:
            continue
        wins = has_winner and summary is first
        cells = [_time(summary, target), _sent(summary, target), *_step(summary), final_text(summary)]
        if compares:
            assert reference is not None
            own = summary.to_target(target)
            cells.insert(1, factor_text(reference.seconds / own.seconds) if own and own.by_all else ABSENT)
        table.add_row(f"{WINNER} {summary.name}" if wins else f"  {summary.name}", *cells, style="bold" if wins else "")
    for record in (record for summary in summaries for record in summary.failed):
        table.add_row(f"  {record.name} (seed {record.seed})", "failed")
    words = headline(summaries, target)
    legend = Table.grid(padding=(0, 2))
    if has_winner:
        legend.add_row(WINNER, "the fastest, by the mean over seeds")
    for header, meaning in columns.items():
        legend.add_row(header, meaning)
    return Group(table, legend, Text(""), Text(" ".join([words.sentence, *words.details])))


def column_meanings(records: Sequence[Record], target: float, compares: bool) -> dict[str, str]:
    """Returns the columns of the table, and what each of them means.

    Args:
        records: The runs.
        target: A value of the metric.
        compares: Whether there is a column of speed-ups.
    """
    metric = metric_name(records[0].metric)
    goal = metric_text(records[0].metric, target)
    crossing = f"training time until two successive evaluations reach {goal} ({metric}): mean and range over seeds"
    meanings = {f"time to {goal}": crossing}
    if compares:
        meanings["against DDP"] = "how many times faster than PyTorch's DistributedDataParallel"
    return meanings | {
        "sent": "bytes that one worker sends until then, with one average if that was needed; else in the whole run",
        "ms/step": "duration of a training step",
        "waiting": "share of the step in which the worker waits for the network or for other workers",
        metric: f"final {metric} on held-out data, mean (± standard deviation) of seeds",
    }


def _time(summary: Summary, target: float) -> str:
    cost = summary.to_target(target)
    if cost is None:
        return "not reached"
    text = seconds_text(cost.seconds)
    if not cost.by_all:
        return f"{text} ({cost.reached} of {cost.seeds} seeds)"
    if cost.seeds > 1:
        text += f" ({seconds_text(cost.lowest_seconds)} – {seconds_text(cost.highest_seconds)})"
    return text


def _sent(summary: Summary, target: float) -> str:
    cost = summary.to_target(target)
    if cost is not None:
        return nbytes_text(cost.payload_nbytes)
    return nbytes_text(sum(run.points[-1].payload_nbytes for run in summary.runs) / len(summary.runs))


def _step(summary: Summary) -> list[str]:
    step = summary.step_time
    if step is None:
        return [ABSENT, ABSENT]
    share = ABSENT if step.waiting is None else f"{100 * step.waiting / step.total:.0f} %"
    return [f"{1e3 * step.total:.1f}", share]
