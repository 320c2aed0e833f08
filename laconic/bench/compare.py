"""Runs several methods and baselines, one after another, on the same task, data order, seeds and network."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from laconic.bench.record import Record, RunsFile, StepTime, mean_step_time
from laconic.bench.run import Plan, run
from laconic.bench.strategies import Contender, parse_contender
from laconic.rules import check_number


class ProgressDisplay(Protocol):
    """Shows the progress of runs."""

    def __call__(self, contender: Contender, plan: Plan) -> AbstractContextManager[Path | None]:
        """Shows a run during a `with` block, and yields the file to which rank 0 writes its progress."""

    def show_result(self, record: Record) -> None:
        """Shows the result of a run that has ended, or that an earlier comparison has made."""


def compare(
    contenders: Sequence[Contender],
    plan: Plan,
    seeds: int,
    directory: Path,
    display: ProgressDisplay,
    finished: Sequence[Record] = (),
) -> list[Record]:
    """Runs every contender with every seed.

    Each run is appended to `runs.jsonl` as soon as it ends. A run that fails is recorded as failed; the others go on.

    Args:
        contenders: What to compare.
        plan: What all runs have in common; its seed is the first one.
        seeds: The number of seeds.
        directory: The folder of `runs.jsonl`.
        display: Shows the progress.
        finished: Runs of an earlier, interrupted comparison, which are not made again.

    Returns:
        One record per run, the finished ones included.
    """
    file = RunsFile(directory)
    known = {(record.name, record.seed): record for record in finished}
    planned = [(contender.label, plan.seed + seed) for seed in range(seeds) for contender in contenders]
    records = [record for key, record in known.items() if key not in planned]
    for seed in range(seeds):
        for contender in contenders:
            seeded = dataclasses.replace(plan, seed=plan.seed + seed)
            if (contender.label, seeded.seed) in known:
                records.append(known[contender.label, seeded.seed])
                display.show_result(records[-1])
                continue
            with display(contender, seeded) as progress:
                record = run(contender, seeded, progress)
            _infer_baseline_waiting(record, records)
            file.append(record)
            records.append(record)
            display.show_result(record)
    return records


def rate_for(rho: float, plan: Plan) -> str:
    """Returns the link rate at which a ring all-reduce of all fp32 gradients takes `rho` times a step's compute time.

    Measures the compute time in 30 steps of the baseline `none` on loopback.

    Raises:
        ValueError: `rho` is not positive, or there is only one worker.
    """
    check_number("rho", rho, above=0)
    if plan.workers < 2:
        raise ValueError("rho needs at least 2 workers: one worker alone sends nothing")
    short = dataclasses.replace(plan, link="none", steps=30, evaluations=1, checkpoint=None)
    measured = run(parse_contender("none"), short)
    if measured.status != "ok" or measured.step_time is None:
        raise RuntimeError(f"measuring the compute time failed: {measured.reason}")
    nbytes = 2 * (plan.workers - 1) / plan.workers * 4 * measured.parameters
    return f"{nbytes * 8 / (rho * measured.step_time.total) / 1e6:.3f}mbit"


def _infer_baseline_waiting(record: Record, earlier: list[Record]) -> None:
    """Splits a baseline's step time into computing and waiting.

    DDP does not report how long it waits. The step time of `none` with the same seed is the compute time; the rest is
    waiting.
    """
    alone = next((r for r in earlier if r.method == "none" and r.seed == record.seed and r.status == "ok"), None)
    if alone is None or record.step_time is None or record.step_time.compute is not None:
        return
    pairs = zip(record.worker_step_times, alone.worker_step_times, strict=True)
    record.worker_step_times = [
        StepTime(time.total, compute := min(own.total, time.total), time.total - compute, 0.0) for time, own in pairs
    ]
    record.step_time = mean_step_time(record.worker_step_times)


def prepare_folder(directory: Path, overwrite: bool) -> None:
    """Creates the output folder.

    Raises:
        FileExistsError: The folder is not empty, and `overwrite` is not set or the folder was not written by laconic.
    """
    if directory.exists() and any(directory.iterdir()):
        if not overwrite:
            raise FileExistsError(f"{directory} exists and is not empty: choose another folder, or give --overwrite")
        if not (directory / "runs.jsonl").exists():
            raise FileExistsError(
                f"{directory} has no runs.jsonl, so laconic did not write it and does not delete it: "
                "remove it, or choose another folder"
            )
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
