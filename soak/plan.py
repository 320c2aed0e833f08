"""The schedule of an episode: a pure function of the seed and the episode's number."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from soak.rows import BY_NAME, ROWS, Row

EVERY = 8  # steps between two checkpoints; consensus() is halfway
ATTEMPTS = 4  # starts of the ranks; the last one ends undisturbed
STEPS = EVERY * (ATTEMPTS + 3)
HOSTS = 6  # of an emulated network: five for ranks, one for a store outside of the ranks

# What a run must survive as if nothing had happened.
HARMLESS = ["pause", "slow", "reset", "cut_heal", "strangers", "disk_full", "disk_full_on_one"]
# What ends an attempt of all methods but gossip. "restart" kills all ranks at once, as torchrun does after a failure.
FATAL = ["kill", "kill_in", "stop", "cut", "exception", "nan", "restart", "restart_in", "stop_store"]
# What the gossip method goes on after, without the victim.
SURVIVABLE = ["kill", "kill_in", "stop", "cut", "exception", "nan"]
ON_EMULATED_HOSTS = ["cut_heal", "cut", "stop_store"]
PHASES = ["consensus", "save", "load", "end"]
POINTS = ["before", "meeting", "timer"]  # of "kill_in": the others are there already; in its n-th meeting; at any time


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        number: in its episode.
        kind: one of HARMLESS, FATAL.
        victim: the rank.
        step: at which it happens; in a phase, the step after which the phase comes.
        phase: "start", "step" or one of PHASES.
        point: one of POINTS, for a phase.
        delay: seconds after that.
        seconds: that it lasts, if it ends.
        amount: strangers, KiB left on the disk, number of the meeting, ….
    """

    number: int
    kind: str
    victim: int
    step: int
    phase: str = "step"
    point: str = "timer"
    delay: float = 0.0
    seconds: float = 0.0
    amount: int = 0


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks.

    Args:
        workers: how many.
        timeout: of the Worker, in seconds.
        store: who holds the store: "launcher", "rank 0" or "host" (another emulated host).
        faults: in the order of their steps; the last may be fatal.
        until: the step after which the block ends.
    """

    workers: int
    timeout: float
    store: str
    faults: tuple[Fault, ...]
    until: int = STEPS


@dataclass(frozen=True)
class Episode:
    seed: int
    index: int
    row: str
    emulated: bool
    attempts: tuple[Attempt, ...]

    @property
    def method(self) -> Row:
        return BY_NAME[self.row]

    def count(self) -> int:
        """Returns the number of faults; another number of workers than before is one too."""
        pairs = zip(self.attempts, self.attempts[1:], strict=False)
        return sum(len(a.faults) for a in self.attempts) + sum(a.workers != b.workers for a, b in pairs)


def make_episode(seed: int, index: int) -> Episode:
    """Returns an episode. Episodes go through all methods in turn, every other round on emulated hosts."""
    chance = random.Random(f"{seed}/{index}")
    row = ROWS[index % len(ROWS)]
    emulated = (index // len(ROWS)) % 2 == 1
    return Episode(seed, index, row.name, emulated, tuple(_attempts(chance, row, emulated)))


def _attempts(chance: random.Random, row: Row, emulated: bool) -> list[Attempt]:
    workers = chance.choice([3, 4, 5] if not row.gossips else [4, 5])
    resized = chance.randrange(1, ATTEMPTS) if chance.random() < 0.5 and not row.gossips else None
    number, attempts = 0, []
    for i in range(ATTEMPTS):
        if i == resized:
            workers = chance.choice([n for n in (3, 4, 5) if n != workers])
        if row.gossips:
            store, first = "host" if emulated else "launcher", 2 * EVERY * i
        else:
            store, first = chance.choice(["rank 0", "host" if emulated else "launcher"]), EVERY * i
        is_last = i == ATTEMPTS - 1
        steps = (first + 1, first + 3) if not is_last or row.gossips else range(first + 2, STEPS - 4, 4)
        faults = [_harmless(chance, row, workers, emulated, step) for step in steps]
        until = STEPS
        if row.gossips:
            faults += _losses(chance, row, workers, emulated, first) if i % 3 else []
            until = first + 2 * EVERY + 4
        elif not is_last:
            faults.append(_fatal(chance, row, workers, emulated, store, i))
            until = faults[-1].step if faults[-1].phase == "end" else until
        faults = [replace(fault, number=number + j) for j, fault in enumerate(_one_full_disk_per_save(faults))]
        number += len(faults)
        attempts.append(Attempt(workers, chance.choice([4.0, 4.0, 8.0]), store, tuple(faults), until))
    return attempts


def _one_full_disk_per_save(faults: list[Fault]) -> list[Fault]:
    seen: set[int] = set()
    result = []
    for fault in faults:
        if fault.kind.startswith("disk_full"):
            save = -(-fault.step // EVERY)
            if save in seen:
                fault = replace(fault, kind="slow", phase="step", seconds=0.2)
            seen.add(save)
        result.append(fault)
    return result


def _victim(chance: random.Random, row: Row, workers: int, *, trains: bool) -> int:
    return chance.choice([rank for rank in range(workers) if row.trains(rank) or not trains])


def _harmless(chance: random.Random, row: Row, workers: int, emulated: bool, step: int) -> Fault:
    kind = chance.choice([kind for kind in HARMLESS if emulated or kind not in ON_EMULATED_HOSTS])
    victim = _victim(chance, row, workers, trains=kind in ("slow", "reset"))
    fault = Fault(0, kind, victim, step, delay=chance.uniform(0, 0.02))
    if kind in ("pause", "slow", "cut_heal"):
        return replace(fault, seconds=chance.uniform(0.05, 1.0))
    if kind == "strangers":
        return replace(fault, phase="start", amount=chance.choice([3, 10, 100]))
    if kind == "disk_full":
        return replace(fault, phase="save", amount=chance.randrange(0, 160, 4))
    if kind == "disk_full_on_one":
        return replace(fault, phase="save", amount=chance.randrange(0, 16))
    return fault


def _fatal(chance: random.Random, row: Row, workers: int, emulated: bool, store: str, attempt: int) -> Fault:
    usable = [kind for kind in FATAL if emulated or kind not in ON_EMULATED_HOSTS]
    if store != "host" and emulated:
        usable.remove("stop_store")
    kind = chance.choice([*usable, "kill_in", "kill_in"])
    fault = _lethal(chance, row, workers, kind, EVERY * attempt + chance.randrange(5, 13))
    # The first attempt loads nothing.
    return replace(fault, phase="save") if fault.phase == "load" and attempt == 0 else fault


def _losses(chance: random.Random, row: Row, workers: int, emulated: bool, first: int) -> list[Fault]:
    """Returns faults that cost the gossip method one or two of its workers, at least three apart in steps."""
    kinds = [kind for kind in SURVIVABLE if emulated or kind not in ON_EMULATED_HOSTS]
    victims = chance.sample(range(workers), 2 if workers == 5 else 1)
    return [
        replace(_lethal(chance, row, workers, chance.choice(kinds), first + 6 + 4 * i), victim=victim)
        for i, victim in enumerate(victims)
    ]


def _lethal(chance: random.Random, row: Row, workers: int, kind: str, step: int) -> Fault:
    victim = _victim(chance, row, workers, trains=kind in ("nan", "exception"))
    fault = Fault(0, kind, victim, step, delay=chance.uniform(0, 0.03))
    if kind.endswith("_in"):
        phase = chance.choice(PHASES)
        point = chance.choice(POINTS)
        return replace(fault, phase=phase, point=point, amount=chance.randrange(4))
    if kind == "stop":
        return replace(fault, seconds=chance.choice([0.0, 1.0]))  # 1: it is continued when all others are done
    return fault
