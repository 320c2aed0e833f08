"""Reads the archives in which mirrors distribute datasets: Debian packages, tar files and PNG images."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from laconic.extras import need


def read_files(folder: str, paths: list[Path], names: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yields (folder/name, content) of each downloaded file, unchanged."""
    for path, name in zip(paths, names, strict=True):
        yield f"{folder}/{name}", path.read_bytes()


def tar_members(content: bytes, suffixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yields (file name without folders, content) of the regular files whose names end with one of `suffixes`.

    Works in memory, so that names inside an untrusted archive never become paths on disk.
    """
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith(suffixes):
                file = tar.extractfile(member)
                assert file is not None
                yield member.name.rpartition("/")[2], file.read()


def deb_data(content: bytes) -> bytes:
    """Returns the data.tar.* of a Debian package: an `ar` archive with 60-byte headers, members padded to even size."""
    if not content.startswith(b"!<arch>\n"):
        raise ValueError("not a Debian package")
    offset = 8
    while offset + 60 <= len(content):
        name = content[offset : offset + 16].decode().rstrip(" /")
        nbytes = int(content[offset + 48 : offset + 58])
        offset += 60
        if name.startswith("data.tar"):
            return content[offset : offset + nbytes]
        offset += nbytes + nbytes % 2
    raise ValueError("the Debian package has no data.tar")


def decode_png(content: bytes) -> NDArray[np.uint8]:
    """Returns the pixels of an 8-bit RGB image, (height, width, 3). Rejects all other kinds of images."""
    image = need("PIL.Image", "tasks")
    try:
        with image.open(io.BytesIO(content), formats=["PNG"]) as opened:
            if opened.mode != "RGB":
                raise ValueError(f"not an 8-bit RGB image: its mode is {opened.mode}")
            return np.asarray(opened)
    except (OSError, SyntaxError) as error:  # what Pillow raises for a damaged file
        raise ValueError(f"not a PNG image: {error}") from None
