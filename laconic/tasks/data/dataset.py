"""Describes a dataset: the sets of files that may hold it, their checksums, and where to download them."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from laconic.tasks.data.cache import cache_folder, cached_arrays

Arrays = dict[str, NDArray[Any]]


class DatasetError(ValueError):
    """Raised when a dataset is missing, corrupted or cannot be downloaded. The message says what to do."""


def data_folder() -> Path:
    """Returns the folder of downloaded datasets: $LACONIC_DATA, or the cache folder if that is not set."""
    chosen = os.environ.get("LACONIC_DATA")
    return Path(chosen).expanduser() if chosen else cache_folder()


@dataclass(frozen=True)
class File:
    """A file below the data folder, and the digests that it may have.

    Args:
        path: Relative to the data folder.
        digests: Accepted checksums, `md5:…` or `sha256:…`. For a `.gz` file they may be those of the uncompressed
            bytes, because mirrors compress the same bytes with different headers.
    """

    path: str
    digests: tuple[str, ...]

    def check(self, content: bytes) -> None:
        """Raises DatasetError unless the content has one of the accepted digests."""
        if self._matches(content):
            return
        if self.path.endswith(".gz"):
            try:
                if self._matches(gzip.decompress(content)):
                    return
            except (OSError, EOFError, zlib.error):
                pass  # not a gzip file: reported below like any other corruption
        found = ", ".join(digest(kind, content) for kind in sorted(self._kinds()))
        raise DatasetError(f"{self.path} is corrupted: its digest is {found}, not {' or '.join(self.digests)}")

    def _kinds(self) -> set[str]:
        return {digest.partition(":")[0] for digest in self.digests}

    def _matches(self, content: bytes) -> bool:
        return any(digest(kind, content) in self.digests for kind in self._kinds())


@dataclass(frozen=True)
class FileSet:
    """Files that together hold a whole dataset.

    Args:
        files: The files.
        read: Converts their contents, in the order of `files`, to arrays.
    """

    files: tuple[File, ...]
    read: Callable[[list[bytes]], Arrays]


@dataclass(frozen=True)
class Source:
    """A place from which a whole dataset can be downloaded.

    Args:
        urls: The files to download.
        unpack: Converts the paths of the downloads to pairs of (path below the data folder, content).
    """

    urls: tuple[str, ...]
    unpack: Callable[[list[Path]], Iterable[tuple[str, bytes]]]


@dataclass(frozen=True)
class Dataset:
    """A dataset on disk and on the network.

    Args:
        name: The name in error messages and of the cached copy.
        command: The NAME in `laconic data NAME` that downloads it.
        file_sets: The sets of files that may hold it; the first complete one is used.
        fetched: The set of files that `laconic data NAME` writes.
        sources: Where to download it; tried in order.
    """

    name: str
    command: str
    file_sets: tuple[FileSet, ...]
    fetched: FileSet
    sources: tuple[Source, ...]

    def arrays(self) -> Arrays:
        """Returns the dataset as read-only memory-mapped arrays, shared by all processes.

        Files are verified when they are first unpacked; later calls read the cached copy.

        Raises:
            DatasetError: The files are missing or corrupted, or the cache cannot be written.
        """
        # The key consists of the verified digests, so a cached copy stays valid when LACONIC_DATA changes.
        digests = [digest for file_set in self.file_sets for file in file_set.files for digest in file.digests]
        key = f"{self.name}-{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:12]}"
        try:
            return cached_arrays(key, self._read)
        except OSError as error:
            where = f"unpacked copies are written to {cache_folder()}; set XDG_CACHE_HOME to use another folder"
            raise DatasetError(f"cannot unpack {self.name}: {error} ({where})") from error

    def present(self) -> FileSet | None:
        """Returns the first set of files that is complete on disk, or None. Does not verify digests."""
        folder = data_folder()
        complete = (one for one in self.file_sets if all((folder / file.path).is_file() for file in one.files))
        return next(complete, None)

    def _read(self) -> Arrays:
        file_set = self.present()
        if file_set is None:
            wanted = " or ".join(one.files[0].path for one in self.file_sets)
            raise DatasetError(
                f"{self.name} is not in {data_folder()}: run `laconic data {self.command}`, "
                f"or set LACONIC_DATA to the folder with {wanted}"
            )
        return file_set.read(self.contents(file_set))

    def contents(self, file_set: FileSet) -> list[bytes]:
        """Returns the contents of a set of files, after verifying their digests."""
        contents = []
        for file in file_set.files:
            path = data_folder() / file.path
            content = path.read_bytes()
            try:
                file.check(content)
            except DatasetError as error:
                raise DatasetError(
                    f"{error} (in {data_folder()}; delete it and run `laconic data {self.command}`)"
                ) from None
            contents.append(content)
        return contents


def digest(kind: str, content: bytes) -> str:
    """Returns `kind:hexdigest` of the content.

    Example:
        >>> digest("md5", b"")
        'md5:d41d8cd98f00b204e9800998ecf8427e'
    """
    return f"{kind}:{hashlib.new(kind, content, usedforsecurity=False).hexdigest()}"
