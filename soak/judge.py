"""The checks of each fault, and the verdict that follows from them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from soak.job import Log, Outcome
from soak.names import accused
from soak.plan import HARMLESS, Attempt, Fault
from soak.rows import Row, local_steps

DEATH_SECONDS = 5.0  # in which a death must be noticed; a rank that hangs, within the time-out + this
MEAN_TOLERANCE = 1e-5  # of the mean of all models
CLOCK_TOLERANCE = 1e-3  # with gossip: δ is mixed in by each worker's own clock, so the mean of x is not at one time
EXIT_SECONDS = 15.0  # in which the process of a rank that has raised must end
LASTING = ("stop", "cut", "stop_store")  # faults that only a time-out can notice
MASSACRES = ("restart", "restart_in")  # kill all ranks
ERRORS = {"PeerError", "StoreGone", "Dropped", "FloatingPointError"}

# The checks that each kind of fault must have passed. A check that was not made is a failure.
SURVIVED = ["survived", "consistent", "clean"]
NOTICED = ["noticed", "named", "in time", "ended", "consistent", "resumed", "clean"]
DROPPED = ["survived", "named", "in time", "consistent", "clean"]
REQUIRED = {
    **dict.fromkeys(HARMLESS, SURVIVED),
    **{kind: [*SURVIVED, "agreed", "named"] for kind in ("disk_full", "disk_full_on_one")},
    **dict.fromkeys(("kill", "kill_in", "stop", "cut", "exception", "nan", "stop_store"), NOTICED),
    **{kind: ["consistent", "resumed", "clean"] for kind in MASSACRES},
    "resize": ["resumed", "consistent", "clean"],
    "none": ["survived", "consistent", "clean"],
}
# The verdict for the first check that failed, in this order.
VERDICTS = {
    "ended": "hang",
    "noticed": "silent",
    "survived": "false alarm",
    "consistent": "wrong result",
    "resumed": "wrong result",
    "agreed": "wrong result",
    "named": "wrong name",
    "in time": "late",
    "clean": "left behind",
}


@dataclass
class Record:
    """One fault, what was seen of it, and the checks made."""

    fault: Fault
    gossips: bool = False
    checks: dict[str, bool] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)  # until each rank noticed
    named: dict[int, list[int]] = field(default_factory=dict)  # by each rank
    notes: list[str] = field(default_factory=list)
    superseded: bool = False  # another fault came before this one was over: not counted

    def check(self, name: str, passed: bool, note: str = "") -> None:
        """Records a check; made twice, it must pass twice."""
        self.checks[name] = self.checks.get(name, True) and passed
        if not passed and note:
            self.notes.append(f"{name}: {note}")

    @property
    def required(self) -> list[str]:
        lethal = self.gossips and self.fault.kind not in (*HARMLESS, "resize", "none")
        return DROPPED if lethal else REQUIRED[self.fault.kind]

    @property
    def verdict(self) -> str:
        if self.superseded:
            return "superseded"
        if self.checks.get("ended") is False:
            return "hang"
        for name, verdict in VERDICTS.items():
            if self.checks.get(name) is False:
                return verdict
        missing = [name for name in self.required if name not in self.checks]
        return f"unchecked: {', '.join(missing)}" if missing else "ok"


@dataclass
class Reference:
    """An undisturbed run: fingerprints by rank and step."""

    steps: list[dict[int, str]]
    consensus: list[dict[int, str]]
    end: str
    until: int


def find_inconsistencies(row: Row, attempt: Attempt, outcome: Outcome, reference: Reference | None) -> list[str]:
    """Returns what differs between ranks that must agree, and from the undisturbed run."""
    found = []
    logs = outcome.logs
    for step in sorted({step for log in logs for step in log.consensus}):
        hashes = {rank: log.consensus[step] for rank, log in enumerate(logs) if step in log.consensus}
        if len(set(hashes.values())) > 1:
            found.append(f"consensus() at step {step} differs between ranks: {hashes}")
    ends = {rank: log.end["hash"] for rank, log in enumerate(logs) if log.end is not None}
    if len(set(ends.values())) > 1:
        found.append(f"the models at the end differ between ranks: {ends}")
    for rank, log in enumerate(logs):
        for entry in (log.origin, log.end):
            if entry is not None and not torch.tensor(entry["x"]).isfinite().all():
                found.append(f"x of rank {rank} at step {entry['step']} is not finite")
    if row.identical:
        for step in sorted({step for log in logs for step in log.steps}):
            if len({log.steps[step] for log in logs if step in log.steps}) > 1:
                found.append(f"x at step {step} differs between ranks")
                break
    if reference is not None:
        found += _compare_with(reference, attempt, outcome)
    return found


def _compare_with(reference: Reference, attempt: Attempt, outcome: Outcome) -> Iterable[str]:
    poisoned = {f.victim: f.step for f in attempt.faults if f.kind == "nan" and f.number in outcome.injected}
    for rank, log in enumerate(outcome.logs):
        if log.origin is not None and log.origin["step"] > 0 and reference.steps[rank]:
            step = log.origin["step"]
            if log.origin["hash"] != reference.steps[rank].get(step):
                yield f"rank {rank} resumed at step {step} with another x than the undisturbed run has there"
        for name, ours, theirs in (
            ("x", log.steps, reference.steps[rank]),
            ("consensus()", log.consensus, reference.consensus[rank]),
        ):
            last = poisoned.get(rank, attempt.until + 1)  # a local step with a NaN is still the user's business
            wrong = [step for step, seen in ours.items() if theirs.get(step) != seen and step < last]
            if wrong:
                yield f"{name} of rank {rank} differs from the undisturbed run from step {min(wrong)} on"
        if log.end is not None and attempt.until == reference.until and log.end["hash"] != reference.end:
            yield f"the model of rank {rank} at the end is not that of the undisturbed run"


@dataclass
class Anchor:
    """A step after which the mean of all models is known to move by the local steps only."""

    step: int
    mean: Tensor


def find_lost_mean(anchor: Anchor, attempt: Attempt, outcome: Outcome, tolerance: float) -> str:
    """Returns how far the mean of all models of the linear task is from where the local steps lead it, if too far."""
    ends = [log.end for log in outcome.logs if log.end is not None]
    if len(ends) < attempt.workers:
        return ""
    first, last = anchor.step + 1, ends[0]["step"]
    moved = torch.zeros_like(anchor.mean)
    if last >= first:
        moved = torch.stack([local_steps(rank, first, last) for rank in range(attempt.workers)]).mean(0)
    away = (mean_of([end["x"] for end in ends]) - anchor.mean - moved).abs().max().item()
    return f"the mean of all models is off by {away:.2g}" if away > tolerance else ""


def mean_of(vectors: list[list[float]]) -> Tensor:
    return torch.tensor(vectors, dtype=torch.float64).mean(0)


def judge(
    row: Row, attempt: Attempt, outcome: Outcome, reference: Reference | None, anchor: Anchor | None
) -> list[Record]:
    """Returns a record for each fault of the attempt that happened. `resumed` and `clean` are checked later."""
    happened = [fault for fault in attempt.faults if fault.number in outcome.injected]
    wrong = find_inconsistencies(row, attempt, outcome, reference)
    lethal = [fault for fault in happened if fault.kind not in HARMLESS]
    if not row.deterministic and not lethal and anchor is not None:
        lost = find_lost_mean(anchor, attempt, outcome, CLOCK_TOLERANCE if row.gossips else MEAN_TOLERANCE)
        wrong += [lost] if lost else []
    ends_at = min((outcome.injected[fault.number] for fault in lethal), default=None)
    records = []
    for fault in happened:
        record = Record(fault, row.gossips)
        if fault.kind in HARMLESS:
            _judge_harmless(record, attempt, outcome, ends_at)
        elif row.gossips:
            _judge_dropped(record, lethal, attempt, outcome)
        elif fault.kind not in MASSACRES:
            _judge_noticed(record, attempt, outcome)
        record.check("consistent", not wrong, "; ".join(wrong[:3]))
        records.append(record)
    if not happened:
        record = Record(Fault(-1, "none", -1, 0), row.gossips)
        _judge_harmless(record, attempt, outcome, None)
        record.check("consistent", not wrong, "; ".join(wrong[:3]))
        records.append(record)
    return records


def _judge_harmless(record: Record, attempt: Attempt, outcome: Outcome, ends_at: float | None) -> None:
    """All ranks must go on after the fault: no error, and another step or a proper end."""
    fault = record.fault
    begun = outcome.injected.get(fault.number, outcome.started)
    over = outcome.healed.get(fault.number, begun)
    until = float("inf") if ends_at is None else ends_at
    stuck, alarmed = [], []
    for rank, log in enumerate(outcome.logs):
        if log.error is not None and log.error[0] < until:
            alarmed.append(f"rank {rank}: {log.error[1]}: {log.error[2]}")
        elif log.hung:
            record.check("ended", False, f"rank {rank} hung\n{outcome.stacks}")
        elif not (
            log.end is not None
            or any(over < when <= until for when in log.step_times)
            or any(over < when <= until for when, _, _ in log.phases)
        ):
            stuck.append(rank)
    if stuck and ends_at is not None and not alarmed:
        record.superseded = True
        return
    record.check("survived", not alarmed and not stuck, "; ".join([*alarmed, *(f"rank {r} is stuck" for r in stuck)]))
    if fault.kind.startswith("disk_full"):
        _judge_full_disk(record, outcome)


def _judge_full_disk(record: Record, outcome: Outcome) -> None:
    begun, over = outcome.injected[record.fault.number], outcome.healed.get(record.fault.number, float("inf"))
    failed = {
        rank: next((entry for entry in log.not_saved.values() if begun <= entry[0]), None)
        for rank, log in enumerate(outcome.logs)
    }
    texts = {entry[1] for entry in failed.values() if entry is not None}
    everyone = all(failed.values())
    record.check("agreed", everyone or not texts, f"only some ranks could not save: {failed}")
    record.check("agreed", len(texts) <= 1 or _same_but_for_speaker(texts), f"different errors: {texts}")
    named = {rank: sorted(_unable(entry[1])) for rank, entry in failed.items() if entry is not None}
    record.named = named
    record.seconds = {rank: entry[0] - begun for rank, entry in failed.items() if entry is not None}
    if record.fault.kind == "disk_full_on_one":
        right = all(names == [record.fault.victim] for names in named.values())
    else:
        right = all(names for names in named.values())
    record.check("named", right and over > begun, f"{texts}")


def _unable(text: str) -> set[int]:
    """Returns the ranks that could not save, which the error lists as "rank 1: OSError: …; rank 2: …"."""
    return {int(number) for number in re.findall(r"\brank (\d+): \w*Error", text)} or accused(text)


def _same_but_for_speaker(texts: set[str]) -> bool:
    return len({re.sub(r"^rank \d+: ", "", text) for text in texts}) == 1


def _judge_noticed(record: Record, attempt: Attempt, outcome: Outcome) -> None:
    """Every survivor must raise in time an error that accuses the victim and nobody else."""
    fault = record.fault
    begun = outcome.injected[fault.number]
    limit = DEATH_SECONDS + (attempt.timeout if fault.kind in LASTING else 0.0)
    for rank, log in enumerate(outcome.logs):
        if rank == fault.victim and fault.kind not in ("cut", "nan", "stop_store"):
            if fault.kind == "stop" and fault.number in outcome.healed:
                record.check("ended", not log.hung, f"rank {rank}, continued, did not end\n{outcome.stacks}")
            continue
        record.check("ended", not log.hung, f"rank {rank} hung\n{outcome.stacks}")
        if log.hung:
            continue
        if log.error is None:
            # A rank that was lost on its way out of the block may have given all that the others needed.
            complete = log.end is not None and _was_leaving(outcome.logs[fault.victim])
            record.check("noticed", complete, f"rank {rank} ended without an error")
            if complete:
                record.check("named", True)
                record.check("in time", True)
            continue
        _judge_error(record, rank, log, begun, limit)


def _was_leaving(log: Log) -> bool:
    return any((what, phase) == ("enter", "end") for _, what, phase in log.phases)


def _judge_error(record: Record, rank: int, log: Log, begun: float, limit: float) -> None:
    assert log.error is not None
    fault = record.fault
    when, kind, text = log.error
    record.check("noticed", when >= begun, f"rank {rank} raised before the fault: {kind}: {text}")
    names = accused(text)
    record.named[rank], record.seconds[rank] = sorted(names), when - begun
    if fault.kind == "stop_store":
        right = "store" in text
    elif fault.kind == "cut" and rank == fault.victim:
        right = True  # from there, all others are unreachable
    elif fault.kind == "nan" and rank == fault.victim:
        right = names in ({rank}, set()) and f"rank {rank}" in text  # its message may begin with itself
    else:
        right = names == {fault.victim}
    record.check("named", right and kind in ERRORS, f"rank {rank}: {kind}: {text}")
    record.check("in time", when - begun <= limit, f"rank {rank} noticed after {when - begun:.1f} s, not {limit:g} s")
    ended = log.ended_at is not None and log.ended_at - when <= EXIT_SECONDS
    record.check("ended", ended, f"the process of rank {rank} did not end after its error")


def _judge_dropped(record: Record, lethal: list[Fault], attempt: Attempt, outcome: Outcome) -> None:
    """With gossip the survivors go on: they warn of each lost rank, and end with the same model."""
    fault = record.fault
    begun = outcome.injected[fault.number]
    limit = DEATH_SECONDS + (attempt.timeout if fault.kind in LASTING else 0.0)
    victims = {f.victim for f in lethal}
    for rank, log in enumerate(outcome.logs):
        if rank in victims:
            if fault.kind in ("cut", "exception", "nan") and rank == fault.victim:
                record.check("ended", not log.hung, f"rank {rank} hung\n{outcome.stacks}")
            continue
        record.check("ended", not log.hung, f"rank {rank} hung\n{outcome.stacks}")
        problem = "" if log.error is None else f"rank {rank}: {log.error[1]}: {log.error[2]}"
        record.check("survived", log.end is not None and log.error is None, problem or f"rank {rank} did not end")
        if log.end is None:
            continue
        warned = {
            number: when
            for when, text in log.warnings
            for number in range(attempt.workers)
            if text.startswith(f"rank {number} was dropped")
        }
        record.named[rank] = sorted(warned)
        kept = fault.victim in log.end["members"] and _was_leaving(outcome.logs[fault.victim])
        right = set(warned) <= victims and (kept or fault.victim in warned)
        record.check("named", right, f"rank {rank} warned of {sorted(warned)}, and {sorted(victims)} were lost")
        if fault.victim in warned:
            record.seconds[rank] = warned[fault.victim] - begun
        record.check("in time", kept or record.seconds.get(rank, float("inf")) <= limit, f"rank {rank} was late")


def note_of(log: Log) -> dict[str, Any]:
    """Returns the last that a rank reported, for the records of failures."""
    return {
        "steps": max(log.steps, default=0),
        "error": log.error and f"{log.error[1]}: {log.error[2]}",
        "exit": log.exit_code,
        "warnings": [text for _, text in log.warnings][:4],
        "phases": [f"{what} {phase}" for _, what, phase in log.phases][-3:],
    }
