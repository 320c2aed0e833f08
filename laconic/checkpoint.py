"""Checkpoints of all ranks: one file a rank and a manifest, so that a crash at any moment leaves a readable one.

    directory/000007-step1200/rank-00000.pt …       written and synced first, by every rank
    directory/000007-step1200/manifest.json         appears last, by rename: the checkpoint counts from here on

Only then are older ones removed. Every rank writes the manifest, the same bytes, so the directory may be shared by all
machines or be one on each. Loading takes the newest that is complete for every rank.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laconic.agreement import compare

if TYPE_CHECKING:
    from laconic.worker import Worker

FORMAT = 4
NAME = re.compile(r"(\d{6})-step(\d+)")


def save(worker: Worker, directory: Path, extra: dict[str, Any]) -> None:
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
    note: dict[str, Any] = {"file": f"rank-{worker.rank:05d}.pt"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / note["file"], "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        note["nbytes"] = (folder / note["file"]).stat().st_size
        note["sha256"] = _sha256(folder / note["file"])
        torch.load(folder / note["file"], map_location="cpu", weights_only=True, mmap=True)  # what can be read again
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:  # torch reports a full disk as RuntimeError
        note["error"] = f"{type(error).__name__}: {error}"
    files = worker.comm.meet("save()", note)
    members = worker.comm.members  # ranks that gossip has dropped are not in the checkpoint: it is one of fewer workers
    errors = [f"rank {rank}: {note['error']}" for rank, note in zip(members, files, strict=True) if "error" in note]
    if errors:
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(f"cannot save to {directory}: {'; '.join(errors)}")
    manifest = {
        "format": FORMAT,
        "step": worker.step,
        "workers": len(files),
        "fingerprint": worker.fingerprint,
        "files": files,
    }
    _write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1), worker.rank)
    worker.comm.meet("save()")
    for path in _folders(directory):
        if _number(path) < number:
            shutil.rmtree(path, ignore_errors=True)  # another rank may be removing it too


def load(worker: Worker, directory: Path) -> dict[str, Any]:
    complete = sorted(path.name for path in _folders(directory) if (path / "manifest.json").exists())
    everywhere = set.intersection(*map(set, worker.comm.meet("load()", complete)))
    if not everywhere:
        raise FileNotFoundError(f"no complete checkpoint of all {worker.size} ranks is in {directory}")
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


def _read(worker: Worker, folder: Path) -> dict[str, Any]:
    """This rank's file, after checking that it is whole and fits."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        version, workers, theirs, files = (manifest[key] for key in ("format", "workers", "fingerprint", "files"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'manifest.json'} is not a manifest of laconic: {error!r}") from error
    if version != FORMAT:
        raise ValueError(f"{folder} has format {version}, and this version of laconic reads {FORMAT}")
    if workers != worker.size:
        raise ValueError(f"{folder} was saved by {workers} workers, and these are {worker.size}")
    difference = compare([theirs, worker.fingerprint])
    if difference:
        described = difference.replace("on rank 0", "in the checkpoint").replace("on rank 1", "in this run")
        raise ValueError(f"{folder} does not fit this run, they differ in {described}")
    note = files[worker.rank]
    path = folder / note["file"]
    if path.stat().st_size != note["nbytes"] or _sha256(path) != note["sha256"]:
        raise ValueError(f"{path} is torn: its bytes are not the {note['nbytes']} that were written")
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    require_same_form("model", content["model"], _bare(worker.model).state_dict())
    require_same_form("worker", content["worker"], worker.state_dict())
    saved_groups, groups = content["optimizer"]["param_groups"], worker.optimizer.param_groups
    if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in groups]:
        raise ValueError(f"{folder} has an optimizer of other parameter groups")
    return content


def require_same_form(what: str, saved: dict[str, Any], own: dict[str, Any]) -> None:
    """The same keys, and tensors of the same shapes and dtypes under them."""
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
    return with_tensors(value, Tensor.clone)


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a checkpoint holds, with each of its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_tensors(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [with_tensors(entry, change) for entry in value]
    return value


def _random_state(device: torch.device) -> dict[str, Any]:
    """Torch's own random numbers, which dropout draws from."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _require_plain(extra: dict[str, Any]) -> None:
    """What could be saved but not be loaded again is refused now, not on the day it is needed."""
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ValueError(f"extra must be tensors and plain data, and torch would not load it: {error}") from error


def _bare(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper."""
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
    part = path.with_name(f"{path.name}.{rank}")
    with open(part, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    for folder in (path.parent, path.parent.parent):  # the names too must be on the disk before others are removed
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
