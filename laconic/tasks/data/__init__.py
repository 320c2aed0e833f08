"""Datasets: verifies files by checksum and maps them as shared arrays. `fetch(name)` downloads a dataset."""

from laconic.tasks.data.dataset import Dataset, DatasetError, data_folder
from laconic.tasks.data.table import DATASETS, fetch

__all__ = ["DATASETS", "Dataset", "DatasetError", "data_folder", "fetch"]
