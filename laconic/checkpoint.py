"""Saves and loads checkpoints of all ranks. A crash at any moment leaves a complete checkpoint on disk.

    directory/000007-step1200/rank-00000.pt …       written and synced first, by every rank
    directory/000007-step1200/manifest.json         renamed into place last; without it a checkpoint does not count

Older checkpoints are removed only after that. Every rank writes the manifest, with the same bytes, so `directory` may
be shared by all machines or be local to each. Loading takes the newest checkpoint that is complete on every rank.

A checkpoint depends on FORMAT, not on the version of laconic that wrote it. FORMAT is raised when the content of a
rank's file changes: the layout below, or the state of a method.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from laconic.agreement import Fingerprint, compare
from laconic.comm import Comm
from laconic.method import with_tensors
from laconic.version import __version__

FORMAT = 5
NAME = re.compile(r"(\d{6})-step(\d+)")


class Saveable(Protocol):
    """The parts of a `laconic.Worker` that a checkpoint is made of."""

    comm: Comm
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int
    fingerprint: Fingerprint

    @property
    def x(self) -> Tensor: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


def save(worker: Saveable, directory: Path, extra: dict[str, Any]) -> None:
    """Writes a checkpoint of all ranks; every rank calls it.

    Raises:
        ValueError: `extra` holds objects that torch would refuse to load.
        OSError: a rank could not write its file; raised on every rank, and the previous checkpoint stays.
    """
    _require_plain(extra)
    numbers = [_number(path) for path in _folders(directory)]
    number = 1 + max(worker.comm.meet("save()", max(numbers, default=0)))
    folder = directory / f"{number:06d}-step{worker.step}"
    content = {
        "model": _bare(worker.model).state_dict(),
        "optimizer": worker.optimizer.state_dict(),
        "worker": worker.state_dict(),
        "random": _random_state(worker.x.device),
        "extra": extra,
    }
    entry: dict[str, Any] = {"file": f"rank-{worker.comm.rank:05d}.pt"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / entry["file"]
        with open(path, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        entry |= {"nbytes": path.stat().st_size, "sha256": _sha256(path)}
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # fails now rather than when it is needed
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:  # torch reports a full disk as RuntimeError
        entry["error"] = f"{type(error).__name__}: {error}"
    entries = worker.comm.meet("save()", entry)
    # Ranks that gossip has dropped are not in the checkpoint, which is then one of fewer workers.
    members = worker.comm.members
    errors = [f"rank {rank}: {e['error']}" for rank, e in zip(members, entries, strict=True) if "error" in e]
    if errors:
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(f"cannot save to {directory}: {'; '.join(errors)}")
    manifest = {
        "format": FORMAT,
        "laconic": __version__,
        "step": worker.step,
        "workers": len(entries),
        "fingerprint": worker.fingerprint,
        "files": entries,
    }
    _write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1), worker.comm.rank)
    worker.comm.meet("save()")
    for path in _folders(directory):
        if _number(path) < number:
            shutil.rmtree(path, ignore_errors=True)  # another rank may be removing it too


def load(worker: Saveable, directory: Path) -> dict[str, Any]:
    """Restores the newest checkpoint that is complete on every rank, and returns its `extra`; every rank calls it.

    Raises:
        FileNotFoundError: there is no checkpoint that is complete on every rank.
        ValueError: a rank cannot use its part; raised on every rank with the reason, and nothing is changed.
    """
    complete = sorted(path.name for path in _folders(directory) if (path / "manifest.json").exists())
    everywhere = set.intersection(*map(set, worker.comm.meet("load()", complete)))
    if not everywhere:
        raise FileNotFoundError(f"no complete checkpoint of all {worker.comm.size} ranks is in {directory}")
    content, problem = None, None
    try:
        content = _read(worker, directory / max(everywhere))
    except (ValueError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        problem = str(error)
    problems = worker.comm.meet("load()", problem)
    if any(problems):
        raise ValueError(
            "; ".join(f"rank {rank}: {text}" for rank, text in zip(worker.comm.members, problems, strict=True) if text)
        )
    assert content is not None
    _bare(worker.model).load_state_dict(content["model"])
    worker.optimizer.load_state_dict(content["optimizer"])
    worker.load_state_dict(content["worker"])
    _set_random_state(content["random"])
    extra: dict[str, Any] = content["extra"]
    return extra


def _read(worker: Saveable, folder: Path) -> dict[str, Any]:
    """Returns the content of this rank's file, after checking that the file is complete and fits this run."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        number, workers, theirs, entries = (manifest[key] for key in ("format", "workers", "fingerprint", "files"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'manifest.json'} is not a manifest of laconic: {error!r}") from error
    if number != FORMAT:
        raise ValueError(
            f"{folder} has checkpoint format {number}, and laconic {__version__} reads format {FORMAT}: go on with "
            f"the version that wrote it, laconic {manifest.get('laconic') or theirs.get('laconic', 'unknown')}"
        )
    if workers != worker.comm.size:
        raise ValueError(f"{folder} was saved by {workers} workers, and this run has {worker.comm.size}")
    # A setting that the checkpoint does not name was added to laconic after it was written.
    difference = compare([theirs, {field: value for field, value in worker.fingerprint.items() if field in theirs}])
    if difference:
        described = difference.replace("on rank 0", "in the checkpoint").replace("on rank 1", "in this run")
        raise ValueError(f"{folder} does not fit this run: they differ in {described}")
    entry = entries[worker.comm.rank]
    path = folder / entry["file"]
    if path.stat().st_size != entry["nbytes"] or _sha256(path) != entry["sha256"]:
        raise ValueError(f"{path} is damaged: its content is not the {entry['nbytes']} bytes that were written")
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    require_same_form("model", content["model"], _bare(worker.model).state_dict())
    require_same_form("worker", content["worker"], worker.state_dict())
    saved_groups, groups = content["optimizer"]["param_groups"], worker.optimizer.param_groups
    if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in groups]:
        raise ValueError(f"{folder} does not fit this run: the optimizer's parameter groups have other sizes")
    return content


def require_same_form(what: str, saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Raises a ValueError unless both dicts have the same keys, with tensors of the same shapes and dtypes."""
    if not isinstance(saved, dict) or saved.keys() != own.keys():
        keys = sorted(saved) if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(f"{what}: the saved state must have the keys {sorted(own)}, not {keys}")
    for key, mine in own.items():
        theirs = saved[key]
        if isinstance(mine, dict):
            require_same_form(f"{what}.{key}", theirs, mine)
        elif isinstance(mine, Tensor):
            form = (tuple(theirs.shape), theirs.dtype) if isinstance(theirs, Tensor) else type(theirs).__name__
            if form != (tuple(mine.shape), mine.dtype):
                raise ValueError(
                    f"{what}.{key}: must be {(tuple(mine.shape), mine.dtype)}, and the saved one is {form}"
                )


def cloned(value: Any) -> Any:
    """Returns a copy of nested dicts and lists in which all tensors are cloned."""
    return with_tensors(value, Tensor.clone)


def _random_state(device: torch.device) -> dict[str, Any]:
    """Returns the state of torch's default generators, which dropout draws from."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _require_plain(extra: dict[str, Any]) -> None:
    """Raises a ValueError if torch could save `extra` but would refuse to load it."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ValueError(f"extra must be tensors and plain data, and torch would refuse to load it: {error}") from error


def _bare(model: nn.Module) -> nn.Module:
    """Returns the module inside torch.compile's wrapper."""
    bare: nn.Module = getattr(model, "_orig_mod", model)
    return bare


def _folders(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*-step*") if NAME.fullmatch(path.name)] if directory.is_dir() else []


def _number(path: Path) -> int:
    return int(path.name[:6])


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_atomically(path: Path, text: str, rank: int) -> None:
    """Writes a file so that it exists with all of its content or not at all. Several ranks may write the same one."""
    part = path.with_name(f"{path.name}.{rank}")
    with open(part, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    for folder in (path.parent, path.parent.parent):  # sync the names too, before older ones are removed
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
