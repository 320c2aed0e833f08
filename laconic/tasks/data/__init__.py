"""Datasets: verified files in, shared memory-mapped arrays out; `fetch(name)` downloads one."""

from laconic.tasks.data.dataset import Dataset, DatasetError, data_folder
from laconic.tasks.data.table import DATASETS, fetch

__all__ = ["DATASETS", "Dataset", "DatasetError", "data_folder", "fetch"]
