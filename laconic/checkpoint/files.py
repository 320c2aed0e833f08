"""The files of checkpoints: their names, how they are written so that they are whole or absent, and what is removed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laconic.agreement import Fingerprint
from laconic.forms import short

NAME = re.compile(r"(\d{6,12})-step(\d+)")
FILE = re.compile(r"rank-\d{5}\.pt")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says about a checkpoint."""

    format: int
    laconic: str  # the version that wrote it
    workers: int
    fingerprint: Fingerprint
    files: list[dict[str, Any]]  # of each rank: file, nbytes, sha256, step


def folders(directory: Path) -> list[Path]:
    """Returns the checkpoints in a directory, complete or not, in the order of their numbers."""
    found = directory.glob("*-step*") if directory.is_dir() else []
    return sorted((path for path in found if NAME.fullmatch(path.name)), key=lambda path: (number_of(path), path.name))


def complete(directory: Path) -> list[Path]:
    """Returns the complete checkpoints in a directory, in the order of their numbers."""
    return [path for path in folders(directory) if (path / MANIFEST).exists()]


def number_of(path: Path) -> int:
    return int(path.name.split("-")[0])


def claim(folder: Path, token: str) -> None:
    """Marks the folder as one of this save. Ranks meet between this and `require_unclaimed`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"save-{token}").touch()


def require_unclaimed(folder: Path, token: str) -> None:
    """Raises a ValueError if another job writes to the same folder."""
    others = [path.name for path in folder.glob("save-*") if path.name != f"save-{token}"]
    if others or (folder / MANIFEST).exists():
        (folder / f"save-{token}").unlink(missing_ok=True)
        raise ValueError(f"another job saves to {folder} at this moment: give each job its own directory")


def write_rank(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Writes and syncs a rank's file; returns its entry in the manifest."""
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # fails now rather than when it is needed
    return {"file": path.name, "nbytes": path.stat().st_size, "sha256": sha256(path)}


def write_manifest(folder: Path, manifest: dict[str, Any], rank: int) -> None:
    """Makes the checkpoint complete. Several ranks may write the same manifest."""
    with replacing(folder / MANIFEST, str(rank)) as part:
        part.write_text(json.dumps(manifest, indent=1))
    for marker in folder.glob("save-*"):
        marker.unlink(missing_ok=True)


class replacing:
    """Gives a path to write to, in a `with` block; the file then exists with all of its content or not at all."""

    def __init__(self, path: Path, suffix: str) -> None:
        self._path, self._part = path, path.with_name(f"{path.name}.{suffix}")

    def __enter__(self) -> Path:
        return self._part

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                _sync(self._part)
                os.replace(self._part, self._path)
                for folder in (self._path.parent, self._path.parent.parent):  # the names too
                    _sync(folder)
        finally:
            self._part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Removes a checkpoint. Its manifest goes first: what is left after a crash does not count."""
    try:
        (folder / MANIFEST).unlink(missing_ok=True)
    except OSError:
        return  # on a file system that has become read-only the rest cannot be removed either
    shutil.rmtree(folder, ignore_errors=True)  # another rank may be removing it too


def prune(directory: Path, newest: int, keep: int) -> None:
    """Removes all but the newest `keep` complete checkpoints, of those up to number `newest`."""
    kept = [path for path in complete(directory) if number_of(path) <= newest][-keep:]
    for path in folders(directory):
        if number_of(path) <= newest and path not in kept:
            remove(path)


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest.

    Raises:
        ValueError: it is not one of laconic, or has been damaged.
    """
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text())
        theirs = data["fingerprint"]
        version = str(data.get("laconic") or theirs.get("laconic", "unknown"))
        found = Manifest(data["format"], version, data["workers"], theirs, data["files"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a manifest of laconic: {error!r}") from error
    is_plain = type(found.format) is int and type(found.workers) is int and isinstance(theirs, dict)
    if not is_plain or not isinstance(found.files, list) or not 0 < len(found.files) == found.workers:
        raise ValueError(f"{path} is not a manifest of laconic: it must list one file for each of its workers")
    for entry in found.files:
        _check_entry(path, entry)
        entry.setdefault("step", data.get("step"))
    if len({entry["file"] for entry in found.files}) < len(found.files):
        raise ValueError(f"{path} is not a manifest of laconic: two ranks have the same file")
    return found


def _check_entry(path: Path, entry: Any) -> None:
    kinds = {"file": str, "nbytes": int, "sha256": str}
    if not isinstance(entry, dict) or any(type(entry.get(name)) is not kind for name, kind in kinds.items()):
        raise ValueError(f"{path} is not a manifest of laconic: it has {short(entry)} where a file is described")
    if not FILE.fullmatch(entry["file"]):
        raise ValueError(f"{path} must name files such as rank-00000.pt beside it, not {entry['file']!r}")


def read_rank(folder: Path, entry: dict[str, Any], *, mmap: bool) -> Any:
    """Returns the content of a rank's file, after checking that the file is the one that was written."""
    path = folder / entry["file"]
    if path.stat().st_size != entry["nbytes"] or sha256(path) != entry["sha256"]:
        raise ValueError(f"{path} is damaged: its content is not the {entry['nbytes']} bytes that were written")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
