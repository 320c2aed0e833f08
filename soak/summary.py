"""Counts verdicts, and the time until faults were noticed."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

BAD = ["silent", "hang", "wrong result", "wrong name", "late", "false alarm", "left behind"]


def percentile(values: list[float], share: float) -> float:
    """Returns the smallest value that at least this share of all values does not exceed.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([1.0, 2.0, 3.0, 4.0], 0.99)
    (2.0, 4.0)
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def counted(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records of faults that count: another fault did not end the attempt before they were over."""
    return [line for line in lines if line["verdict"] != "superseded"]


def summarize(lines: list[dict[str, Any]]) -> str:
    """Returns a report in Markdown."""
    faults = counted(lines)
    verdicts = Counter(line["verdict"] for line in faults)
    others = [verdict for verdict in verdicts if verdict != "ok" and verdict not in BAD]
    parts = [f"{len(faults)} faults: {verdicts['ok']} ok"]
    parts += [f"{verdicts[verdict]} {verdict}" for verdict in [*BAD, *others]]
    text = [", ".join(parts) + f" ({len(lines) - len(faults)} superseded, not counted).", ""]
    text += ["| fault | number | ok | notices | median s | p99 s | most s |", "|---|---|---|---|---|---|---|"]
    for kind in sorted({line.get("fault", "none") for line in faults}):
        of_kind = [line for line in faults if line.get("fault", "none") == kind]
        text.append(
            f"| {kind} | {len(of_kind)} | {sum(line['verdict'] == 'ok' for line in of_kind)} | {_times(of_kind)} |"
        )
    text.append(f"| all | {len(faults)} | {verdicts['ok']} | {_times(faults)} |")
    failing = sorted({(line["seed"], line["episode"]) for line in faults if line["verdict"] != "ok"})
    text += ["", *(f"replay: python -m soak --replay {seed}:{episode}" for seed, episode in failing)]
    return "\n".join(text)


def _times(lines: list[dict[str, Any]]) -> str:
    seconds = [value for line in lines for value in line.get("seconds_by_rank", {}).values()]
    if not seconds:
        return "0 | | |"
    return f"{len(seconds)} | {statistics.median(seconds):.2f} | {percentile(seconds, 0.99):.2f} | {max(seconds):.2f}"
