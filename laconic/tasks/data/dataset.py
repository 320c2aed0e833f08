"""What a dataset is: the verified forms it may lie in on disk, and the places on the network that have it."""

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

from laconic.tasks.data.cache import cache_folder, unpacked

Arrays = dict[str, NDArray[Any]]


class DatasetError(ValueError):
    """A dataset is missing, corrupted or cannot be fetched; the message says what to do."""


def data_folder() -> Path:
    """Where datasets lie as fetched: $LACONIC_DATA, or the cache folder."""
    chosen = os.environ.get("LACONIC_DATA")
    return Path(chosen).expanduser() if chosen else cache_folder()


@dataclass(frozen=True)
class File:
    """A file below the data folder and the digests (`md5:…` or `sha256:…`) that it may have.

    For a `.gz` the digest may be that of the unpacked bytes: mirrors pack the same bytes with other headers.
    """

    path: str
    digests: tuple[str, ...]

    def check(self, content: bytes) -> None:
        """DatasetError unless the content is what this file should hold."""
        if self._matches(content):
            return
        if self.path.endswith(".gz"):
            try:
                if self._matches(gzip.decompress(content)):
                    return
            except (OSError, EOFError, zlib.error):
                pass  # not even gzip: reported by digest below, like any other damage
        found = ", ".join(digest(kind, content) for kind in sorted(self._kinds()))
        raise DatasetError(f"{self.path} is corrupted: its digest is {found}, not {' or '.join(self.digests)}")

    def _kinds(self) -> set[str]:
        return {digest.partition(":")[0] for digest in self.digests}

    def _matches(self, content: bytes) -> bool:
        return any(digest(kind, content) in self.digests for kind in self._kinds())


@dataclass(frozen=True)
class Form:
    """One way a dataset may lie in the data folder: its files, and how their contents, in that order, become arrays."""

    files: tuple[File, ...]
    read: Callable[[list[bytes]], Arrays]


@dataclass(frozen=True)
class Source:
    """One place on the network that has a whole dataset; `unpack` turns the downloads into (path, content) of files."""

    urls: tuple[str, ...]
    unpack: Callable[[list[Path]], Iterable[tuple[str, bytes]]]


@dataclass(frozen=True)
class Dataset:
    """`forms` are tried in order; `fetched` is the one that `laconic data COMMAND` makes, from any of the `sources`."""

    name: str
    command: str
    forms: tuple[Form, ...]
    fetched: Form
    sources: tuple[Source, ...]

    def arrays(self) -> Arrays:
        """The dataset as read-only memory-mapped arrays, verified when first unpacked, shared by all processes."""
        # The key is what was verified, so a cached copy is right wherever LACONIC_DATA points now.
        digests = [digest for form in self.forms for file in form.files for digest in file.digests]
        key = f"{self.name}-{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:12]}"
        try:
            return unpacked(key, self._read)
        except OSError as error:
            where = f"unpacked copies go to {cache_folder()}; XDG_CACHE_HOME chooses another place"
            raise DatasetError(f"cannot unpack {self.name}: {error} ({where})") from error

    def present(self) -> Form | None:
        """The first form of which all files exist."""
        folder = data_folder()
        return next((form for form in self.forms if all((folder / f.path).is_file() for f in form.files)), None)

    def _read(self) -> Arrays:
        form = self.present()
        if form is None:
            wanted = " or ".join(form.files[0].path for form in self.forms)
            raise DatasetError(
                f"{self.name} is not in {data_folder()}: run `laconic data {self.command}`, "
                f"or set LACONIC_DATA to the folder with {wanted}"
            )
        return form.read(self.contents(form))

    def contents(self, form: Form) -> list[bytes]:
        """The verified contents of a form's files."""
        contents = []
        for file in form.files:
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
    """`kind:hexdigest` of the content."""
    return f"{kind}:{hashlib.new(kind, content, usedforsecurity=False).hexdigest()}"
