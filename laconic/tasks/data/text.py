"""Tiny Shakespeare and Multi30k: their files, digests, sources and formats."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from laconic.tasks.data.archive import read_files
from laconic.tasks.data.bpe import BEGIN, END, learn
from laconic.tasks.data.dataset import Arrays, Dataset, File, FileSet, Source

GITHUB = "https://raw.githubusercontent.com"

# Tiny Shakespeare


def read_characters(contents: list[bytes]) -> Arrays:
    """Returns each character's index in the sorted alphabet, uint8. The last tenth of the text is the test set."""
    text = np.frombuffer(contents[0], np.uint8)
    alphabet, numbers = np.unique(text, return_inverse=True)
    train, test = np.split(numbers.astype(np.uint8), [len(text) * 9 // 10])
    return {"alphabet": alphabet, "train": train, "test": test}


def unpack_characters(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    return read_files("tinyshakespeare", paths, ("input.txt",))


SHAKESPEARE_TEXT = FileSet(
    (
        File(
            "tinyshakespeare/input.txt",
            ("sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",),
        ),
    ),
    read_characters,
)
SHAKESPEARE = Dataset(
    name="shakespeare",
    command="shakespeare",
    file_sets=(SHAKESPEARE_TEXT,),
    fetched=SHAKESPEARE_TEXT,
    sources=(Source((f"{GITHUB}/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",), unpack_characters),),
)

# Multi30k

PAIR_NAMES = ("train.en", "train.de", "test_2016_flickr.en", "test_2016_flickr.de")
VOCABULARY_SIZE = 4096


def read_pairs(contents: list[bytes]) -> Arrays:
    """Returns sentences as piece indices between BEGIN and END, concatenated to one int16 array with offsets (n + 1,).

    Both languages share one vocabulary, learned from both sides of the training set. The references stay text, because
    BLEU is computed on the original sentences.
    """
    sides = [content.decode().splitlines() for content in contents]
    train_source, train_target, test_source, test_target = sides
    if len(train_source) != len(train_target) or len(test_source) != len(test_target):
        raise ValueError(f"the two languages must have the same number of lines, not {[len(side) for side in sides]}")
    vocabulary = learn([*train_source, *train_target], VOCABULARY_SIZE)
    arrays: Arrays = {}
    for name, sentences in zip(("train_source", "train_target", "test_source", "test_target"), sides, strict=True):
        encoded = [[BEGIN, *vocabulary.encode(sentence), END] for sentence in sentences]
        arrays[name] = np.array([number for sentence in encoded for number in sentence], np.int16)
        arrays[f"{name}_offsets"] = np.cumsum([0, *map(len, encoded)])
    arrays["pieces"] = as_json(vocabulary.pieces)
    arrays["references"] = as_json(test_target)
    return arrays


def as_json(strings: list[str]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(json.dumps(strings).encode(), np.uint8)


def unpack_pairs(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    for path, name in zip(paths, PAIR_NAMES, strict=True):
        yield f"multi30k/{name}", gzip.decompress(path.read_bytes())


MULTI30K_TEXT = FileSet(
    tuple(
        File(f"multi30k/{name}", (f"sha256:{sha256}",))
        for name, sha256 in zip(
            PAIR_NAMES,
            (
                "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
                "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
                "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
                "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
            ),
            strict=True,
        )
    ),
    read_pairs,
)
MULTI30K = Dataset(
    name="translate",
    command="translate",
    file_sets=(MULTI30K_TEXT,),
    fetched=MULTI30K_TEXT,
    sources=(
        Source(
            tuple(f"{GITHUB}/multi30k/dataset/master/data/task1/raw/{name}.gz" for name in PAIR_NAMES), unpack_pairs
        ),
    ),
)
