"""Saves a worker's state beside a framework's checkpoint, and finds it again when the framework resumes.

A framework saves one model, one optimizer and one set of counters, those of the first rank. Methods that let workers
differ for a while need more: each rank's parameters, its optimizer's state, the method's residuals and messages in
flight. `Worker.save` writes them, into a folder of its own in or beside the framework's checkpoint.
"""

from __future__ import annotations

import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from laconic import Worker


class Companion:
    """Saves and loads the state of all ranks of one worker.

    Args:
        worker: the running worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._known: set[Path] = set()  # folders that this worker has written or loaded

    def save(self, folder: Path) -> None:
        """Writes the state of all ranks to the folder; every rank calls it. Raises as `Worker.save`."""
        place = folder.resolve()
        if place not in self._known:
            # Frameworks overwrite checkpoints of earlier runs. A worker would refuse to, so they are removed here.
            shutil.rmtree(place, ignore_errors=True)
            self._known.add(place)
            self._worker.average_(self._worker.x.new_zeros(1))  # no rank writes before all have removed theirs
        self._worker.save(folder, keep=1)

    def load(self, folder: Path) -> bool:
        """Continues from the state in the folder; every rank calls it. Raises as `Worker.load`.

        Returns:
            Whether there was such a state. If not, the method begins anew, and the first rank warns.

        Raises:
            ValueError: some ranks see the folder and others do not; on every rank.
        """
        seen = self._worker.x.new_full((1,), float(folder.is_dir()))
        self._worker.average_(seen)
        if 0 < seen.item() < 1:
            raise ValueError(
                f"all ranks must see the state in {folder}, and only {seen.item():.0%} do: save to a directory that "
                f"all machines share, or copy the folder to each"
            )
        if seen.item() == 0:
            if self._worker.rank == 0:
                warnings.warn(
                    f"there is no state of a worker in {folder}: the model is that of the checkpoint, and "
                    f"{type(self._worker.method).__name__} begins anew, on all ranks with the optimizer of rank 0",
                    stacklevel=2,
                )
            return False
        self._worker.load(folder)
        self._known.add(folder.resolve())
        return True


def metrics_of(worker: Worker) -> dict[str, float]:
    """Returns what a framework logs about this rank: `worker.metrics()` without keys that the method has no value for,
    and without the exchanges with each other rank.

    >>> import laconic
    >>> model = torch.nn.Linear(3, 1)
    >>> with Worker(model, torch.optim.SGD(model.parameters()), laconic.AllReduce()) as worker:
    ...     metrics_of(worker)["laconic_bytes_foreground"]
    0.0
    """
    found = {name: value for name, value in worker.metrics().items() if not math.isnan(value)}
    return {f"laconic_{name}": value for name, value in found.items() if not name.startswith("exchanges_with_")}


def with_own_memory(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a model's state_dict in which tensors share memory only where the model's parameters are tied.

    While a worker runs, all parameters are views of one vector. Savers that go by the storage would take them for one
    tied tensor, or write the whole vector with each.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> model[1].weight = model[0].weight
    >>> copy = with_own_memory(model.state_dict())
    >>> copy["0.weight"] is copy["1.weight"], copy["0.weight"].untyped_storage().nbytes()
    (True, 16)
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    owned: dict[str, Any] = {}
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            owned[name] = value
            continue
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride(), value.numel() or name)
        if key not in copies:
            copies[key] = value.detach().clone()
        owned[name] = copies[key]
    return owned
