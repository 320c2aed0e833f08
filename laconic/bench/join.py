"""Joins the runs of several output folders into one comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from laconic.bench.record import Record, RunsFile

CONDITIONS = ("task", "task_settings", "settings", "workers", "link", "steps")
"""Fields in which runs with the same name must agree: otherwise their mean would describe no run."""


def join_runs(directories: Sequence[Path]) -> list[Record]:
    """Returns the runs of all folders. A run that is in several folders is returned once.

    Args:
        directories: Output folders of `laconic compare`, `train` or `report`; at least one.

    Raises:
        FileNotFoundError: A folder or its `runs.jsonl` does not exist.
        ValueError: A file has no runs or is not of laconic, or two runs with the same name were made under different
            conditions or are different runs with the same seed.
    """
    joined: list[tuple[Path, Record]] = []
    for directory in directories:
        for record in _read(directory):
            if any(record == other for _, other in joined):
                continue
            for place, other in joined:
                if other.name == record.name:
                    _check_pair(record, directory, other, place)
            joined.append((directory, record))
    return [record for _, record in joined]


def common_target(records: Sequence[Record]) -> float | None:
    """Returns the target of the runs, or None if they have none.

    Raises:
        ValueError: The runs have different targets.
    """
    targets = sorted({record.target for record in records if record.target is not None})
    if len(targets) > 1:
        raise ValueError(f"the runs have different targets ({', '.join(map(str, targets))}): choose one with --target")
    return targets[0] if targets else None


def write_runs(records: Sequence[Record], directory: Path, overwrite: bool) -> None:
    """Writes runs to the `runs.jsonl` of a folder, which is created.

    Raises:
        FileExistsError: The folder is not empty, and `overwrite` is not set or the folder was not written by laconic.
    """
    file = RunsFile(directory)
    if directory.exists() and any(directory.iterdir()):
        if not file.path.exists():
            raise FileExistsError(f"{directory} is not empty and has no runs.jsonl: choose another folder")
        if not overwrite:
            raise FileExistsError(
                f"{directory} already has runs: choose another folder, name it among the folders to add to its runs, "
                "or give --overwrite to replace them"
            )
        file.path.unlink()
    directory.mkdir(parents=True, exist_ok=True)
    for record in records:
        file.append(record)


def _read(directory: Path) -> list[Record]:
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise FileNotFoundError(f"{directory} {what}: give the --out folder of laconic compare or laconic train")
    file = RunsFile(directory)
    if not file.path.exists():
        raise FileNotFoundError(
            f"{directory} has no runs.jsonl: give the --out folder of laconic compare or laconic train"
        )
    records = file.read()
    if not records:
        raise ValueError(f"{file.path} has no runs")
    return records


def _check_pair(record: Record, directory: Path, other: Record, place: Path) -> None:
    for key in CONDITIONS:
        mine, theirs = getattr(record, key), getattr(other, key)
        if mine != theirs:
            raise ValueError(
                f"{record.name} was run with {key} {theirs!r} in {place} and {mine!r} in {directory}: a report "
                "compares runs under the same conditions; draw one report for each"
            )
    if record.seed == other.seed:
        where = f"twice in {place}" if directory == place else f"in {place} and, with other results, in {directory}"
        raise ValueError(f"{record.name} with seed {record.seed} is {where}: keep one of the two runs")
