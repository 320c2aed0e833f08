"""Saves and loads checkpoints of all ranks. A crash at any moment leaves a complete checkpoint on disk.

    directory/000007-step1200/rank-00000.pt …       written and synced first, by every rank
    directory/000007-step1200/manifest.json         renamed into place last; without it a checkpoint does not count

Older checkpoints are removed only after that. Every rank writes the manifest, with the same bytes, so `directory` may
be shared by all machines or be local to each. Loading takes the newest checkpoint that is complete and whole on every
rank. A file is not trusted: all of it is checked before the first change (`content.py`, and the forms that each method
declares), and nothing is changed unless all ranks can load.

The number of a checkpoint also tells jobs apart that use one directory. A worker knows the newest number that it has
written or seen while loading. If it finds a complete checkpoint with a higher one, another job is using the directory,
and saving is refused. Nothing of this is left behind by a crash: whoever loads may go on.

A checkpoint depends on FORMAT, not on the version of laconic that wrote it. FORMAT is raised when the content of a
rank's file changes: its layout, or the state of a method.
"""

from __future__ import annotations

import io
import os
import pickle
import secrets
import zipfile
from pathlib import Path
from typing import Any

import torch

from laconic.agreement import compare
from laconic.checkpoint import files
from laconic.checkpoint.content import DIFFERENT, Saveable, apply, bare, check_content, collect, digest, merge, snapshot
from laconic.checkpoint.content import check_worker as check_worker
from laconic.comm.finite import is_finite, raise_together
from laconic.forms import short
from laconic.log import warn
from laconic.method import check_count, with_tensors
from laconic.version import __version__

FORMAT = 5
# What reading a damaged file may raise.
DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError),
    *(OSError, EOFError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile),
)


class _Unfit(ValueError):
    """The checkpoint is whole, but not of this run; an older one would not be either."""


def save(worker: Saveable, directory: Path, extra: dict[str, Any], keep: int, known: dict[Path, int]) -> None:
    """Writes a checkpoint of all ranks; every rank calls it.

    Args:
        worker: what to save.
        directory: where to write.
        extra: the user's own state.
        keep: how many complete checkpoints to keep, this one included.
        known: by directory, the number of the newest checkpoint that this job has written or seen while loading.

    Raises:
        ValueError: `extra` holds objects that torch would refuse to load, or another job saves to the directory.
        OSError: a rank could not write its file or the manifest. Everything of this save is removed.
        FloatingPointError: parameters are not finite, and could not be loaded again; names the ranks.
        All are raised on every rank, and earlier checkpoints stay.
    """
    check_count("keep", keep)
    place = directory.resolve()
    complete = [files.number_of(path) for path in files.complete(directory)]
    note = {
        "number": max(map(files.number_of, files.folders(directory)), default=0),
        "step": worker.step,
        "token": secrets.token_hex(8),
        "error": _refusal(directory, extra, max(complete, default=0), known.get(place, 0)),
    }
    notes = _meet(worker, "save()", note | {"finite": is_finite(worker.x)})
    _raise_errors(worker, notes, ValueError, "")
    culprits = [rank for rank, one in zip(worker.comm.members, notes, strict=True) if not one["finite"]]
    if culprits:
        text = (
            f"save() at step {worker.step}: NaN or infinity in the parameters of rank {', '.join(map(str, culprits))}; "
            f"nothing was saved: lower the learning rate or clip gradients, and continue from an earlier checkpoint"
        )
        raise_together(worker.comm, FloatingPointError(text))
    number, step = 1 + max(one["number"] for one in notes), max(one["step"] for one in notes)
    folder, token = directory / f"{number:06d}-step{step}", notes[0]["token"]

    _attempt(worker, directory, folder, lambda: files.claim(folder, token))
    error = None
    try:
        files.require_unclaimed(folder, token)
    except ValueError as found:
        error = str(found)
    _raise_errors(worker, _meet(worker, "save()", {"error": error}), ValueError, "")

    path = folder / f"rank-{worker.comm.rank:05d}.pt"
    described = {"step": worker.step, "place": _place(worker)}
    written = lambda: files.write_rank(path, collect(worker, extra)) | described  # noqa: E731
    entries = _attempt(worker, directory, folder, written)
    # Ranks that gossip has dropped are not in the checkpoint, which is then one of fewer workers.
    manifest = {
        "format": FORMAT,
        "laconic": __version__,
        "step": step,
        "workers": len(entries),
        "fingerprint": worker.fingerprint,
        "files": entries,
    }
    _attempt(worker, directory, folder, lambda: files.write_manifest(folder, manifest, worker.comm.rank))
    known[place] = number
    files.prune(directory, number, keep)


def _refusal(directory: Path, extra: dict[str, Any], newest: int, known: int) -> str | None:
    """Returns why nothing must be saved, or None."""
    buffer = io.BytesIO()
    try:
        torch.save(extra, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # noqa: BLE001  whatever the objects in it raise
        return f"extra must be tensors and plain data, and torch would refuse to load it: {error}"
    if newest > known:
        since = f"since this one loaded or saved number {known}" if known else "that this one has not loaded"
        return (
            f"directory must be of one job, and {directory} has checkpoint number {newest} of another job, {since}: "
            f"end the other job, call worker.load() to continue from there, or choose another directory"
        )
    return None


def _attempt(worker: Saveable, directory: Path, folder: Path, write: Any) -> list[Any]:
    """Runs `write` on every rank and returns all results; if it fails on one, removes the folder and raises on all."""
    note: dict[str, Any] = {}
    try:
        note["result"] = write()
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:  # torch reports a full disk as RuntimeError
        note["error"] = f"{type(error).__name__}: {error}"
    notes = _meet(worker, "save()", note)
    if any("error" in one for one in notes):
        files.remove(folder)
        _raise_errors(worker, notes, OSError, f"cannot save to {directory}: ")
    return [one["result"] for one in notes]


def _meet(worker: Saveable, what: str, note: dict[str, Any]) -> list[dict[str, Any]]:
    return worker.comm.meet(what, note)


def _place(worker: Saveable) -> int:
    """Returns this rank's place in its node; 0 without nodes."""
    return worker.node.rank if worker.node is not None else 0


def _raise_errors(worker: Saveable, notes: list[dict[str, Any]], kind: type[Exception], start: str) -> None:
    """Raises, on every rank, the errors that the notes of all ranks name."""
    texts = _errors(worker, notes)
    if texts:
        raise kind(start + "; ".join(texts))


def _errors(worker: Saveable, notes: list[dict[str, Any]]) -> list[str]:
    ranks = zip(worker.comm.members, notes, strict=True)
    return [f"rank {rank}: {note['error']}" for rank, note in ranks if note.get("error")]


def load(worker: Saveable, directory: Path, known: dict[Path, int]) -> dict[str, Any]:
    """Restores the newest checkpoint that all ranks can load, and returns its `extra`; every rank calls it.

    If the newest one is damaged on some rank, all ranks take the one before it, and the first rank warns.

    Raises:
        FileNotFoundError: there is no checkpoint that is complete on every rank.
        ValueError: no checkpoint can be loaded, or the newest is of another setup. Raised on every rank with the
            reason, and nothing is changed.
    """
    own = [path.name for path in files.complete(directory)]
    found = worker.comm.meet("load()", own)
    everywhere = set.intersection(*map(set, found))
    if not everywhere:
        raise FileNotFoundError(f"no complete checkpoint of all {worker.comm.size} ranks is in {directory}")
    names = sorted(set().union(*found), key=lambda name: files.number_of(Path(name)), reverse=True)
    problems: list[str] = []
    for name in names:
        if name not in everywhere:
            missing = [str(rank) for rank, some in zip(worker.comm.members, found, strict=True) if name not in some]
            problems.append(f"{name} is not complete on rank {', '.join(missing)}")
            continue
        content, notes = _try(worker, directory / name)
        errors = _errors(worker, notes)
        # In nodes, each rank saves the method's state of its slice of x, the same as its rail's.
        if not errors and len({(one["place"], one["digest"]) for one in notes}) > len({one["place"] for one in notes}):
            errors = [f"{directory / name}: {DIFFERENT}"]
        if not errors:
            assert content is not None
            errors = _commit(worker, content)
            if not errors:
                known[directory.resolve()] = files.number_of(Path(names[0]))
                if problems and worker.comm.rank == worker.comm.members[0]:
                    warn(f"continuing from {name}, since {'; '.join(problems)}", stacklevel=3)
                extra: dict[str, Any] = content["extra"]
                return extra
        problems.append("; ".join(errors))
        if any(one["unfit"] for one in notes):
            break
    raise ValueError("; ".join(problems))


def _try(worker: Saveable, folder: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Reads and checks this rank's part; returns it, and what all ranks say about theirs."""
    content = None
    note: dict[str, Any] = {"error": None, "unfit": False, "digest": None, "place": _place(worker)}
    try:
        content = _read(worker, folder)
        note["digest"] = digest(worker, content)
    except DAMAGE as error:
        text = str(error) if isinstance(error, ValueError | OSError) else f"{folder} is damaged: {error!r}"
        note |= {"error": text, "unfit": isinstance(error, _Unfit)}
    return content, _meet(worker, "load()", note)


def _commit(worker: Saveable, content: dict[str, Any]) -> list[str]:
    """Puts the content into the worker on all ranks; if that fails on one, puts everything back and returns why."""
    before, error = snapshot(worker), None
    try:
        apply(worker, content)
    except Exception as found:  # noqa: BLE001  of a model, optimizer or method with a load_state_dict of its own
        error = f"{type(found).__name__}: {found}"
    notes = _meet(worker, "load()", {"error": error})
    errors = _errors(worker, notes)
    if errors:
        apply(worker, before)
    return errors


def _read(worker: Saveable, folder: Path) -> dict[str, Any]:
    """Returns the content for this rank, after checking that it is whole and fits this run."""
    manifest = files.read_manifest(folder)
    if manifest.format != FORMAT:
        raise _Unfit(
            f"{folder} has checkpoint format {manifest.format}, and laconic {__version__} reads format {FORMAT}: go on "
            f"with the version that wrote it, laconic {manifest.laconic}"
        )
    # A setting that the checkpoint does not name was added to laconic after it was written.
    theirs, ours = {"ranks per node": 1} | manifest.fingerprint, worker.fingerprint
    difference = compare([theirs, {field: value for field, value in ours.items() if field in theirs}])
    if difference:
        described = difference.replace("on rank 0", "in the checkpoint").replace("on rank 1", "in this run")
        raise _Unfit(f"{folder} does not fit this run: they differ in {described}")
    if manifest.workers == worker.comm.size:
        place = manifest.files[worker.comm.rank].get("place", 0)
        if place != _place(worker):
            raise _Unfit(
                f"{folder} was saved with rank {worker.comm.rank} at place {place} of its node, and in this run its "
                f"place is {_place(worker)}: use the same local groups"
            )
        content = _read_rank(folder, manifest.files[worker.comm.rank], mmap=False)
    else:
        for entry in manifest.files:
            if not (folder / entry["file"]).exists():
                raise _Unfit(
                    f"{folder} was saved by {manifest.workers} workers, and this run has {worker.comm.size}. Then "
                    f"every rank needs the files of all, and {entry['file']} is not here: use a directory that all "
                    f"machines share, or as many workers as saved it"
                )
        # Not all files need to be in memory at once. The result must not depend on files that will be removed.
        saved = [_read_rank(folder, entry, mmap=True) for entry in manifest.files]
        content = cloned(merge(worker, saved, [entry.get("place", 0) for entry in manifest.files]))
    try:
        check_content(worker, content)
    except ValueError as error:
        raise ValueError(f"{folder} cannot be loaded: {error}") from error
    return content


def _read_rank(folder: Path, entry: dict[str, Any], *, mmap: bool) -> dict[str, Any]:
    content: dict[str, Any] = files.read_rank(folder, entry, mmap=mmap)
    if not isinstance(content, dict) or not isinstance(content.get("worker"), dict):
        raise ValueError(f"{folder / entry['file']} must be the state of a worker, not {short(content)}")
    if content["worker"].get("step") != entry["step"]:
        raise ValueError(
            f"{folder / entry['file']} is of step {short(content['worker'].get('step'))}, not {entry['step']}"
        )
    return content


def export(worker: Saveable, path: Path) -> None:
    """Writes the model's state_dict to one file, on the first rank; every rank calls it.

    Raises:
        OSError: the file could not be written; on every rank, and a file that was there before stays.
    """
    error = None
    if worker.comm.rank == worker.comm.members[0]:
        try:
            # Copies, since parameters are views of one vector: torch would save all of it with each.
            state = with_tensors(dict(bare(worker.model).state_dict()), lambda tensor: tensor.detach().cpu().clone())
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.replacing(path, f"{os.getpid()}.part") as part:
                torch.save(state, part)
        except (OSError, RuntimeError) as found:
            error = f"{type(found).__name__}: {found}"
    _raise_errors(worker, _meet(worker, "export()", {"error": error}), OSError, f"cannot export to {path}: ")


def cloned(value: Any) -> Any:
    """Returns a copy of nested dicts and lists in which all tensors are cloned."""
    return with_tensors(value, torch.Tensor.clone)
