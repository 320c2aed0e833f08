"""The live view of a job as a table for a terminal."""

from __future__ import annotations

import http.client
import json
from typing import Any

from rich.table import Table
from rich.text import Text

ANSWER_SECONDS = 5.0
MOST_BYTES = 1 << 24


def fetch(host: str, port: int) -> dict[str, Any]:
    """Returns the status that a dashboard serves.

    Raises:
        RuntimeError: there is none at this address.
    """
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", "/status.json")
        answer = connection.getresponse()
        content = answer.read(MOST_BYTES)
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}: {clean(content.decode(errors='replace'))[:200]}")
        status: dict[str, Any] = json.loads(content)
        return status
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RuntimeError(
            f"no dashboard answers at {host}:{port} ({error}): the job has ended, or its Worker was created without "
            f"dashboard={port}"
        ) from error
    finally:
        connection.close()


def draw(status: dict[str, Any]) -> Table:
    """Returns a status as a table."""
    rows = status["ranks"]
    training = sum(row["state"] == "training" for row in rows)
    table = Table(title=Text(clean(f"{status['method']}: {training} of {status['size']} ranks train")))
    for name in ("rank", "host", "state", "step", "step time", "waiting", "doing", "link rate", "sent", "last seen"):
        table.add_column(name, justify="left" if name in ("host", "state", "doing") else "right", no_wrap=True)
    table.add_column("last error", overflow="fold")
    for row in rows:
        is_well = row["state"] in ("training", "finished")
        doing = row["doing"] or "–"
        if row["doing_seconds"]:
            doing += f", {_seconds(row['doing_seconds'])}"
        share, age = row["waiting_share"], row["last_seen_seconds"]
        texts = [
            str(row["rank"]),
            row["host"] or "–",
            row["state"],
            "–" if row["step"] is None else f"{row['step']:,}",
            _seconds(row["step_seconds"]),
            "–" if share is None else f"{share:.0%}",
            doing,
            _bytes(row["bytes_per_second"], "/s"),
            _bytes(None if row["step"] is None else sum(row["nbytes"].values())),
            "–" if age is None else f"{age:.0f} s ago",
            row["error"] or "–",
        ]
        table.add_row(*(Text(clean(text)) for text in texts), style="" if is_well else "bold yellow")
    return table


def clean(text: str) -> str:
    """Returns a text without characters that control a terminal.

    >>> clean("a\\x1b[2Jb\\nc")
    'a [2Jb c'
    """
    return "".join(character if character.isprintable() else " " for character in text)


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.1f} s"


def _bytes(value: float | None, suffix: str = "") -> str:
    if value is None:
        return "–"
    units = ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.3g} {units[0]}{suffix}"
