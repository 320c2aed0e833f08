"""Finds datasets by the NAME in `laconic data NAME`."""

from __future__ import annotations

from pathlib import Path

from laconic.names import look_up
from laconic.tasks.data.dataset import Dataset
from laconic.tasks.data.fetch import Progress, fetch_dataset
from laconic.tasks.data.images import CIFAR10, FASHION
from laconic.tasks.data.text import MULTI30K, SHAKESPEARE

DATASETS: dict[str, Dataset] = {dataset.command: dataset for dataset in (CIFAR10, FASHION, SHAKESPEARE, MULTI30K)}


def fetch(name: str, progress: Progress | None = None) -> list[Path]:
    """Downloads and verifies the dataset called `name`; returns the paths of its files. See `fetch_dataset`."""
    return fetch_dataset(look_up("dataset", name, DATASETS), progress)
