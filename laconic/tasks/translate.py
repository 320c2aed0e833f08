"""The task `translate`: image captions from English to German (Multi30k, Elliott et al. 2016); the metric is BLEU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laconic.extras import need
from laconic.tasks.data import text
from laconic.tasks.data.bpe import BEGIN, END, PAD, decode
from laconic.tasks.data.dataset import Arrays
from laconic.tasks.order import Indices, Order, generator
from laconic.tasks.partition import parse_partition, shard_indices
from laconic.tasks.task import Batch, Shard, Task, device_of, evaluation_mode
from laconic.tasks.transformer import Translator

MAX_LENGTH = 48
POOL = 16  # batches whose sentence pairs are sorted by length together
EVALUATION_BATCH = 125


@dataclass(frozen=True)
class Translate(Task):
    """Trains an encoder-decoder: 2 + 2 layers, width 128, 1.45 M parameters.

    Both languages share a vocabulary of 4096 subword pieces. A sample is a pair of sentences, truncated to 48 pieces.
    `evaluate` translates the 1000 captions of the 2016 test set by greedy decoding.
    """

    name: ClassVar[str] = "translate"
    metric: ClassVar[str] = "bleu"
    higher_is_better: ClassVar[bool] = True
    dataset: ClassVar[str | None] = "translate"
    partitions: ClassVar[tuple[str, ...]] = ("iid", "contiguous")

    batch_size: int = 32
    lr: float = 3e-3
    optimizer: Literal["adam", "adamw", "sgd"] = "adamw"
    weight_decay: float = 0.01
    steps: int = 1000

    def build_model(self) -> nn.Module:
        return Translator(text.VOCABULARY_SIZE, PAD, width=128, layers=2, heads=4)

    def load(self, rank: int, size: int, seed: int) -> Shard:
        need("sacrebleu", "tasks")  # for `evaluate`, after training
        arrays = text.MULTI30K.arrays()
        no_labels = np.zeros(len(arrays["train_source_offsets"]) - 1, np.int64)  # one entry per sentence pair
        samples = shard_indices(parse_partition(self.partition), no_labels, rank, size, seed)
        return SentencePairs(arrays, Order(samples, self.batch_size, seed, rank), seed)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model, batch, label_smoothing=0.1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        BLEU = need("sacrebleu.metrics.bleu", "tasks").BLEU
        arrays = text.MULTI30K.arrays()
        pieces, references = (json.loads(arrays[name].tobytes()) for name in ("pieces", "references"))
        # Batches of similar lengths need less padding, and decoding stops when the longest sentence of a batch ends.
        order = np.argsort(np.diff(arrays["test_source_offsets"]), kind="stable")
        hypotheses = [""] * len(references)
        total_loss = 0.0
        total_pieces = 0
        with evaluation_mode(model):
            assert isinstance(model, Translator)
            for part in np.array_split(order, -(-len(order) // EVALUATION_BATCH)):
                source, target = (padded_sentences(arrays, f"test_{side}", part) for side in ("source", "target"))
                count = int((target[:, 1:] != PAD).sum())
                total_loss += count * cross_entropy(model, (source, target), label_smoothing=0.0).item()
                total_pieces += count
                decoded = model.greedy(source.to(device_of(model)), BEGIN, END, MAX_LENGTH).tolist()
                for i, numbers in zip(part, decoded, strict=True):
                    hypotheses[i] = decode(pieces, numbers)
        bleu = BLEU().corpus_score(hypotheses, [references]).score
        return {"loss": total_loss / total_pieces, "bleu": bleu}


def cross_entropy(model: nn.Module, batch: Batch, label_smoothing: float) -> Tensor:
    """Returns the mean loss in nats per target piece, with the true prefix as the decoder's input."""
    source, target = (tensor.to(device_of(model)) for tensor in batch)
    logits = model(source, target[:, :-1])
    return F.cross_entropy(
        logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, label_smoothing=label_smoothing
    )


def padded_sentences(arrays: Arrays, name: str, chosen: Indices) -> Tensor:
    """Returns the chosen sentences, (batch, length of the longest) int64, padded with PAD."""
    flat, offsets = arrays[name], np.asarray(arrays[f"{name}_offsets"])
    rows = [np.asarray(flat[offsets[i] : min(offsets[i + 1], offsets[i] + MAX_LENGTH)], dtype=np.int64) for i in chosen]
    padded = np.full((len(rows), max(map(len, rows))), PAD, np.int64)
    for out, row in zip(padded, rows, strict=True):
        out[: len(row)] = row
    return torch.from_numpy(padded)


class SentencePairs:
    """One worker's sentence pairs, batched by similar length.

    The pairs of POOL successive batches are sorted by length and cut into batches again; otherwise half of each batch
    would be padding. All workers read long batches at the same steps, so that no worker waits for another.
    """

    def __init__(self, arrays: Arrays, order: Order, seed: int) -> None:
        self.arrays = arrays
        lengths = np.diff(arrays["train_target_offsets"])

        @lru_cache(maxsize=2)
        def pool(number: int) -> list[Indices]:
            chosen = np.concatenate([order(number * POOL + i) for i in range(POOL)])
            batches = np.split(chosen[np.argsort(lengths[chosen], kind="stable")], POOL)
            return [batches[i] for i in generator("pool", seed, number).permutation(POOL)]

        self._pool = pool

    def batch(self, step: int) -> Batch:
        number, place = divmod(step, POOL)
        chosen = self._pool(number)[place]
        return tuple(padded_sentences(self.arrays, f"train_{side}", chosen) for side in ("source", "target"))
