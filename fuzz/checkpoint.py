"""Edits saved checkpoints at random and loads them: what is refused must change nothing, the rest must train.

    python -m fuzz.checkpoint --seconds 60 --seed 0

Two real processes train each method and save. Then a random value anywhere in a rank's file is replaced, and the
manifest gets the new checksum, so that the loader sees the edit. A find is one of: an error that is no ValueError; a
refused file that has changed something; ranks that do not agree; parameters that are not finite, or an error, in one of
the steps after loading. Each find is printed with the seed and the number that repeat it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import laconic
from laconic.checkpoint.content import Saveable, snapshot
from laconic.compress import TopK, Uniform
from tests.helpers import OPTIMIZERS, build_model, train_step

METHODS: list[tuple[laconic.Method, str]] = [
    (laconic.Divisible(8, 3, TopK(0.3), delay=2, hops=1), "sgd"),
    (laconic.Divisible(8, 3, Uniform(4), delay=2, hops=2, corrected=True), "adam"),
    (laconic.Divisible(8, 3, None, delay=2), "adam"),
    (laconic.Divisible(8), "adam"),
    (laconic.ADPSGD(initial_period=2, calibration=3, compressor=Uniform(4)), "sgd"),
    (laconic.LocalSGD(period=3, moments="averaged"), "adam"),
    (laconic.DiLoCo(4, fragments=2, delay=3, compressor=Uniform(4)), "adam"),
    (laconic.DiLoCo(4, fragments=2, delay=3), "sgd"),
    (laconic.EfficientAdam(), "adam"),
    (laconic.A2CiD2(background=False), "sgd"),
    (laconic.QSGD(), "adam"),
    (laconic.EfficientAdam(delay=2), "adam"),
]
STEPS = 5
Place = tuple[Any, ...]


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yields where the values of nested dicts and lists are, the containers included."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in items:
        yield from places(entry, (*place, key))


def at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def edited(value: Any, place: Place, new: Any) -> Any:
    """Returns a copy in which the value at `place` is another one."""
    if not place:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[place[0]] = edited(value[place[0]], place[1:], new)
    return changed


def another(value: Any, draw: random.Random) -> Any:
    """Returns a wrong or merely different value for this one."""
    anything: list[Any] = [None, True, -1, 2**70, math.nan, "../../etc/passwd", [], {}, torch.zeros(3)]
    if isinstance(value, Tensor):
        return draw.choice([*_other_tensors(value, draw), *anything])
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return draw.choice([*anything, "log:4", ""])
    if isinstance(value, int):
        return draw.choice([-value - 1, value + 1, value - 1, 0, 2**40, -(2**40), float(value), *anything])
    if isinstance(value, float):
        return draw.choice([-1e30, 1e30, 0.0, math.inf, -value - 1.0, int(value), *anything])
    if isinstance(value, list | tuple):
        entries = list(value)
        return draw.choice([type(value)(entries[:-1]), type(value)(entries * 2), entries[::-1], *anything])
    if isinstance(value, dict):
        first = next(iter(value), "key")
        return draw.choice([{k: v for k, v in value.items() if k != first}, {**value, "other": 1}, *anything])
    return draw.choice(anything)


def _other_tensors(tensor: Tensor, draw: random.Random) -> list[Tensor]:
    found = [tensor[..., :-1] if tensor.dim() else tensor.reshape(1), torch.cat([tensor.reshape(-1)] * 2)]
    found += [tensor.to(torch.float64), tensor.to(torch.int64), tensor.reshape(-1, 1), torch.zeros_like(tensor)]
    if tensor.numel():
        for wrong in (math.nan, math.inf, -3.0) if tensor.is_floating_point() else (255, 127, 1):
            changed = tensor.clone()
            changed.view(-1)[draw.randrange(tensor.numel())] = wrong
            found.append(changed)
    if tensor.dtype == torch.uint8:
        noise = [draw.randrange(256) for _ in range(tensor.numel())]
        found.append(torch.tensor(noise, dtype=torch.uint8).reshape(tensor.shape))
    return found


def rewrite(path: Path, content: Any) -> None:
    """Writes a rank's file, and its checksum into the manifest."""
    torch.save(content, path)
    manifest = json.loads(path.with_name("manifest.json").read_text())
    entry = next(one for one in manifest["files"] if one["file"] == path.name)
    entry |= {"nbytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    path.with_name("manifest.json").write_text(json.dumps(manifest))


def edit(folder: Path, draw: random.Random) -> str:
    """Edits one value of a checkpoint; returns what was done."""
    if draw.random() < 0.1:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        place = draw.choice(list(places(manifest)))
        new = another(at(manifest, place), draw)
        if isinstance(new, Tensor):
            new = new.tolist()
        path.write_text(json.dumps(edited(manifest, place, new)))
        return f"manifest {place}: {new!r}"
    path = draw.choice(sorted(folder.glob("rank-*.pt")))
    content = torch.load(path, weights_only=True)
    # `extra` belongs to the user and may be anything.
    part = draw.choice(["worker", "worker", "worker", "optimizer", "model", "random"])
    candidates = [place for place in places(content[part], (part,)) if "generator" not in place]
    place = draw.choice(candidates)
    new = another(at(content, place), draw)
    rewrite(path, edited(content, place, new))
    return f"{path.name} {place}: {str(new)[:200]}"


def checksum(worker: laconic.Worker) -> str:
    """Returns a checksum of everything that loading may change."""
    found = hashlib.sha256()
    content = snapshot(worker)
    for place in places(content):
        value = at(content, place)
        found.update(repr(place).encode())
        found.update(_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
    return found.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def load_edited(worker: Saveable, directory: Path) -> str | None:
    """Loads, and returns what is wrong with the outcome; None if nothing is."""
    assert isinstance(worker, laconic.Worker)
    before = checksum(worker)
    try:
        worker.load(directory)
    except (ValueError, FileNotFoundError):
        return None if checksum(worker) == before else "refused, but something has changed"
    except Exception as error:  # noqa: BLE001  whatever it is, it is a find
        return f"raised {type(error).__name__}: {error}"
    if not bool(worker.x.isfinite().all()):
        return "loaded parameters that are not finite"
    for step in range(3):
        train_step(worker.model, worker.optimizer, worker.rank, step)
        if not bool(worker.x.isfinite().all()):
            return "parameters are not finite after a step"
    return "loaded"


def fuzz(directory: str, method: laconic.Method, optimizer: str, seed: int, edits: int, seconds: float) -> list[str]:
    """Runs on each rank; returns what happened, one line for each edit."""
    model = build_model()
    worker = laconic.Worker(model, OPTIMIZERS[optimizer](model), method, timeout=20)
    whole = Path(directory) / "whole"
    for step in range(STEPS):
        train_step(model, worker.optimizer, worker.rank, step)
    worker.save(whole)
    outcomes: list[str] = []
    start = time.monotonic()
    for number in range(edits):
        over = worker.comm.meet("fuzz", time.monotonic() - start > seconds)
        if any(over):
            break
        copy = Path(directory) / f"edit-{number}"
        text = ""
        if worker.rank == 0:
            shutil.copytree(whole, copy)
            (folder,) = copy.iterdir()
            text = edit(folder, random.Random(f"{seed}-{number}"))
        text = worker.comm.meet("fuzz", text)[0]
        try:
            found = load_edited(worker, copy)
        except Exception as error:  # noqa: BLE001  in a step after loading
            found = f"then failed with {type(error).__name__}: {error}"
        everyone = worker.comm.meet("fuzz", found)
        if everyone.count(everyone[0]) != len(everyone):
            found = f"the ranks disagree: {everyone}"
        outcomes.append(f"{method} seed {seed} edit {number}, {text}: {found or 'refused'}")
        if found not in (None, "loaded"):
            break  # the ranks may no longer be together
        worker.load(whole)
        if worker.rank == 0:
            shutil.rmtree(copy)
    return outcomes


def run(
    seed: int, edits: int, seconds: float, methods: list[tuple[laconic.Method, str]] = METHODS
) -> tuple[Counter[str], list[str]]:
    """Fuzzes methods. Returns how often edits were refused or loaded, and the finds."""
    counts: Counter[str] = Counter()
    finds = []
    for method, optimizer in methods:
        with TemporaryDirectory() as directory:
            try:
                lines = laconic.spawn(fuzz, 2, directory, method, optimizer, seed, edits, seconds)[0]
            except laconic.WorkerFailed as error:
                lines = [f"{method} seed {seed}: {error}"]
        for line in lines:
            outcome = line.rsplit(": ", 1)[-1]
            counts[outcome if outcome in ("refused", "loaded") else "finds"] += 1
            if outcome not in ("refused", "loaded"):
                finds.append(line)
    return counts, finds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz.checkpoint")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start, seed = time.monotonic(), options.seed
    total: Counter[str] = Counter()
    while time.monotonic() - start < options.seconds:
        counts, finds = run(seed, 10**6, max(1.0, options.seconds / len(METHODS)))
        total += counts
        for find in finds:
            print(find)
        if finds:
            raise SystemExit(1)
        seed += 1
    print(
        f"checkpoint: {total['refused']} edits refused, {total['loaded']} loaded and trained, 0 finds, "
        f"seeds {options.seed} to {seed - 1}"
    )


if __name__ == "__main__":
    # Imported by name: functions of __main__ would be sent to the workers by value.
    from fuzz import checkpoint

    checkpoint.main()
