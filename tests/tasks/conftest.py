"""Synthetic datasets in the real file formats, in temporary folders: no test reads the user's data or cache."""

import gzip
import io
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from laconic.tasks.data import images, text
from laconic.tasks.data.dataset import Dataset, File, FileSet, digest


@pytest.fixture(autouse=True)
def data_folder(tmp_path, monkeypatch) -> Path:
    """Creates an empty data folder, and an empty cache folder next to it."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("LACONIC_DATA", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def with_digests(file_set: FileSet, contents: dict[str, bytes]) -> FileSet:
    """Returns the file set with the digests of `contents` instead of the real ones."""
    return replace(file_set, files=tuple(File(f.path, (digest("sha256", contents[f.path]),)) for f in file_set.files))


def write(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def only(dataset: Dataset, file_set: FileSet, contents: dict[str, bytes]) -> Dataset:
    """Returns the dataset with a single file set, which has the digests of `contents`."""
    expected = with_digests(file_set, contents)
    return replace(dataset, file_sets=(expected,), fetched=expected)


def synthetic_images(shape: tuple[int, ...], train: int = 80, test: int = 40) -> dict[str, np.ndarray]:
    """Returns images of ten classes that differ in brightness."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for part, count in (("train", train), ("test", test)):
        labels = np.arange(count) % 10
        pixels = labels.reshape(-1, *[1] * len(shape)) * 25 + rng.integers(0, 5, (count, *shape))
        arrays[f"x_{part}"], arrays[f"y_{part}"] = pixels.astype(np.uint8), labels
    return arrays


def npz(arrays: dict[str, np.ndarray]) -> bytes:
    """Returns an .npz archive with LZMA-compressed members, as in published copies."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return out.getvalue()


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def idx_files(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    """Returns the four files of Fashion-MNIST."""
    names = ("x_train", "y_train", "x_test", "y_test")
    return {
        f"fashion-mnist/{file}": gzip.compress(idx(arrays[name]))
        for file, name in zip(images.IDX_NAMES, names, strict=True)
    }


def cifar_batches(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    """Returns the six files of CIFAR-10."""
    parts = [
        *zip(np.split(arrays["x_train"], 5), np.split(arrays["y_train"], 5), strict=True),
        (arrays["x_test"], arrays["y_test"]),
    ]
    return {
        f"cifar-10-batches-bin/{name}": np.concatenate(
            [y[:, None].astype(np.uint8), x.transpose(0, 3, 1, 2).reshape(len(x), -1)], axis=1
        ).tobytes()
        for name, (x, y) in zip(images.BATCH_NAMES, parts, strict=True)
    }


PLAY = ("First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n" * 60).encode()

PAIRS = {
    "multi30k/train.en": "A dog runs.\nA cat sleeps.\nThe dog sleeps.\nThe cat runs.\n" * 8,
    "multi30k/train.de": "Ein Hund läuft.\nEine Katze schläft.\nDer Hund schläft.\nDie Katze läuft.\n" * 8,
    "multi30k/test_2016_flickr.en": "A dog sleeps.\nThe cat runs.\n",
    "multi30k/test_2016_flickr.de": "Ein Hund schläft.\nDie Katze läuft.\n",
}


@pytest.fixture
def synthetic_data(data_folder, monkeypatch) -> None:
    """Writes a tiny dataset for every task that needs one to the data folder."""
    fashion = {"fashion_mnist.npz": npz(synthetic_images((28, 28)))}
    whole = cifar_batches(synthetic_images((32, 32, 3)))
    subset = {"cifar10_10k.npz": npz(synthetic_images((32, 32, 3), train=40, test=20))}
    play = {"tinyshakespeare/input.txt": PLAY}
    pairs = {name: content.encode() for name, content in PAIRS.items()}
    for module, name, file_set, contents in (
        (images, "FASHION", images.FASHION_NPZ, fashion),
        (images, "CIFAR10", images.CIFAR10_BATCHES, whole),
        (images, "CIFAR10_SUBSET", images.CIFAR10_SUBSET.file_sets[0], subset),
        (text, "SHAKESPEARE", text.SHAKESPEARE_TEXT, play),
        (text, "MULTI30K", text.MULTI30K_TEXT, pairs),
    ):
        write(data_folder, contents)
        monkeypatch.setattr(module, name, only(getattr(module, name), file_set, contents))
