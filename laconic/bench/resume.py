"""Finds the runs of an interrupted comparison that need not be made again."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laconic.bench.record import Record, RunsFile, to_json
from laconic.bench.run import Plan, evaluated_steps, new_record
from laconic.bench.strategies import Contender

CONDITIONS = ("task", "task_settings", "parameters", "workers", "rho", "steps")
"""Fields in which all runs of a comparison agree. `link` too, unless `rho` determines it."""


def finished_runs(directory: Path, contenders: Sequence[Contender], plan: Plan) -> list[Record]:
    """Returns the complete runs in a folder, with the target of the plan. Failed runs are left out, to be made again.

    Args:
        directory: The folder of `runs.jsonl`; it may be empty or missing.
        contenders: What the resumed comparison compares.
        plan: What its runs have in common.

    Raises:
        ValueError: The folder has a run that was made with other settings.
    """
    file = RunsFile(directory)
    if not file.path.exists():
        return []
    expected = {contender.label: new_record(contender, plan) for contender in contenders}
    any_expected = next(iter(expected.values()))
    evaluations = len(evaluated_steps(0, plan.steps, plan.evaluations))
    kept = []
    for record in file.read():
        if record.status != "ok":
            continue
        wanted = expected.get(record.name)
        conditions = [*CONDITIONS, *(["link"] if plan.rho is None else [])]
        pairs = {name: (getattr(record, name), getattr(any_expected, name)) for name in conditions}
        pairs["evaluations"] = (len(record.points), evaluations)
        if wanted is not None:
            pairs["settings"] = (record.settings, wanted.settings)
        for name, (found, asked) in pairs.items():
            if _as_saved(found) != _as_saved(asked):
                raise ValueError(
                    f"{file.path} has a run of {record.name} with {name} {_difference(found, asked)}: give the same "
                    "options to resume, or another --out"
                )
        kept.append(dataclasses.replace(record, target=plan.target))
    return kept


def keep_only(directory: Path, records: Sequence[Record]) -> None:
    """Replaces the `runs.jsonl` of a folder by one with these runs only, atomically."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".runs-") as folder:
        file = RunsFile(Path(folder))
        for record in records:
            file.append(record)
        os.replace(file.path, RunsFile(directory).path)


def _as_saved(value: Any) -> Any:
    """Returns a value as it is after writing and reading a record: a tuple becomes a list."""
    return json.loads(json.dumps(to_json(value)))


def _difference(found: Any, asked: Any) -> str:
    if not (isinstance(found, dict) and isinstance(asked, dict)):
        return f"{found!r}, not {asked!r}"
    keys = [key for key in {**found, **asked} if _as_saved(found.get(key)) != _as_saved(asked.get(key))]
    return ", ".join(f"{key}={found.get(key)!r}, not {asked.get(key)!r}" for key in keys)
