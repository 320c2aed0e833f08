"""Several ways to train, one after another, on the same task, data order, seeds and network."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from laconic.bench.record import Record, RunsFile, Split
from laconic.bench.run import Plan, run
from laconic.bench.ways import Asked, ask


class Watch(Protocol):
    """Shows how a run is doing: entered before each run, it gives the file in which rank 0 leaves its progress."""

    def __call__(self, asked: Asked, plan: Plan) -> AbstractContextManager[Path | None]: ...


def compare(asked: Sequence[Asked], plan: Plan, seeds: int, directory: Path, watch: Watch) -> list[Record]:
    """Run every way with every seed; each run is in `runs.jsonl` as soon as it ends. One that fails is recorded so."""
    file = RunsFile(directory)
    records: list[Record] = []
    for seed in range(seeds):
        for way in asked:
            this = dataclasses.replace(plan, seed=plan.seed + seed)
            with watch(way, this) as progress:
                record = run(way, this, progress)
            _split_peer(record, records)
            file.append(record)
            records.append(record)
    return records


def rate_for(rho: float, plan: Plan) -> str:
    """The link rate at which a full all-reduce takes `rho` times the computing of a step, measured now on loopback."""
    if not rho > 0:
        raise ValueError(f"rho must be more than 0, not {rho}")
    if plan.workers < 2:
        raise ValueError("rho needs at least 2 workers: one alone sends nothing")
    measured = run(ask("none"), dataclasses.replace(plan, link="none", steps=30, evaluations=1, checkpoint=None))
    if measured.status != "ok" or measured.split is None:
        raise RuntimeError(f"the compute time cannot be measured: {measured.reason}")
    nbytes = 2 * (plan.workers - 1) / plan.workers * 4 * measured.parameters
    return f"{nbytes * 8 / (rho * measured.split.step) / 1e6:.3f}mbit"


def _split_peer(record: Record, before: list[Record]) -> None:
    """A peer does not tell waiting from computing; what it takes beyond the `none` run of its seed is waiting."""
    floor = next((r for r in before if r.way == "none" and r.seed == record.seed and r.split), None)
    if record.split is not None and record.split.compute is None and floor is not None and floor.split is not None:
        compute = min(floor.split.step, record.split.step)
        record.split = Split(record.split.step, compute, record.split.step - compute, 0.0)


def prepare(directory: Path, overwrite: bool) -> None:
    """An output folder that is there is kept, unless it is to be overwritten."""
    if directory.exists() and any(directory.iterdir()):
        if not overwrite:
            raise FileExistsError(f"{directory} exists and is not empty: choose another folder, or give --overwrite")
        if not (directory / "runs.jsonl").exists():
            raise FileExistsError(f"{directory} has no runs.jsonl, so laconic did not make it: remove it yourself")
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
