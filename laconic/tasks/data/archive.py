"""Reads the archives in which mirrors distribute datasets: Debian packages, tar files and PNG images."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


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
    """Returns the pixels of an 8-bit RGB image without interlacing, (height, width, 3). Rejects all other PNG kinds."""
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError("not a PNG image")
    offset = 8
    header = b""
    packed: list[bytes] = []
    while offset + 8 <= len(content):
        nbytes, kind = struct.unpack_from(">I4s", content, offset)
        chunk = content[offset + 8 : offset + 8 + nbytes]
        if kind == b"IHDR":
            header = chunk
        elif kind == b"IDAT":
            packed.append(chunk)
        offset += nbytes + 12
    if len(header) != 13 or header[8:] != b"\x08\x02\x00\x00\x00":
        raise ValueError("not an 8-bit RGB image without interlacing")
    width, height = struct.unpack_from(">II", header)
    try:
        rows = np.frombuffer(zlib.decompress(b"".join(packed)), np.uint8).reshape(height, 1 + 3 * width)
    except zlib.error as error:
        raise ValueError(f"damaged PNG image: {error}") from None
    pixels = np.zeros((height, 3 * width), np.uint8)
    _compiled_unfilter()(rows, pixels)
    return pixels.reshape(height, width, 3)


@cache
def _compiled_unfilter() -> Callable[..., None]:
    from laconic.compress.jit import njit

    compiled: Callable[..., None] = njit()(_unfilter)
    return compiled


def _unfilter(rows: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    # PNG 1.2, section 6: each byte is stored as the difference from a prediction made of its left and upper neighbours.
    for y in range(rows.shape[0]):
        kind = rows[y, 0]
        for x in range(out.shape[1]):
            left = int(out[y, x - 3]) if x >= 3 else 0
            up = int(out[y - 1, x]) if y > 0 else 0
            corner = int(out[y - 1, x - 3]) if x >= 3 and y > 0 else 0
            if kind == 1:
                prediction = left
            elif kind == 2:
                prediction = up
            elif kind == 3:
                prediction = (left + up) // 2
            elif kind == 4:
                estimate = left + up - corner
                to_left, to_up, to_corner = abs(estimate - left), abs(estimate - up), abs(estimate - corner)
                if to_left <= to_up and to_left <= to_corner:
                    prediction = left
                elif to_up <= to_corner:
                    prediction = up
                else:
                    prediction = corner
            else:
                prediction = 0
            out[y, x] = (int(rows[y, x + 1]) + prediction) % 256
