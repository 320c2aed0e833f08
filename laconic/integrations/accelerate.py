"""Trains what `Accelerator.prepare` has prepared; `save_state` and `load_state` include the state of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from laconic import Method, Worker
from laconic.integrations.companion import Companion, with_own_memory
from laconic.integrations.frameworks import require

LEAST = "1.1"
require("accelerate", LEAST)

from accelerate import Accelerator  # noqa: E402  after the check, whose message says what to do

_NUMBERS: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()  # of workers that each accelerator has had


class LaconicWorker(Worker):
    """A `laconic.Worker` whose state `accelerator.save_state()` saves and `accelerator.load_state()` loads.

    `save_state()` writes the averaged model, and the state of all ranks into a folder `laconic_0` of the checkpoint
    (`laconic_1` for the accelerator's second worker, and so on). Both are called on all ranks, as always.

    After `model, optimizer, loader = accelerator.prepare(model, optimizer, loader)` the training loop goes into a
    block `with LaconicWorker(accelerator, model, optimizer, laconic.Divisible()) as worker:`.

    Args:
        accelerator: which has prepared model and optimizer.
        model: the prepared model.
        optimizer: the prepared optimizer, or a list of them.
        method: the communication method.
        **kwargs: as for `laconic.Worker`.

    Raises:
        ValueError: as for `laconic.Worker`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        method: Method,
        **kwargs: Any,
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise ValueError(f"accelerator must be an accelerate.Accelerator, not {accelerator!r}")
        super().__init__(model, optimizer, method, **kwargs)
        number = _NUMBERS.setdefault(accelerator, 0)
        _NUMBERS[accelerator] += 1
        _State(accelerator, self, f"laconic_{number}")

    @property
    def is_running(self) -> bool:
        """Whether the worker has not ended."""
        return self._end == "no"


class _State:
    """Takes part in `save_state` and `load_state` of an accelerator.

    Accelerate calls hooks before it saves and before it loads. State of a registered object is loaded last, when model
    and optimizer have been loaded.
    """

    def __init__(self, accelerator: Accelerator, worker: LaconicWorker, name: str) -> None:
        self._worker, self._name = worker, name
        self._companion = Companion(worker)
        self._loading: Path | None = None
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._before_load)
        accelerator.register_for_checkpointing(self)

    def _save(self, models: list[nn.Module], weights: list[dict[str, Any]], directory: str) -> None:
        if not self._worker.is_running:
            return
        self._companion.save(Path(directory) / self._name)
        model = self._worker.model
        addresses = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        with self._worker.consensus():
            for state_dict in weights:  # of all models of the accelerator; this worker averages its own
                mine = {
                    name: value
                    for name, value in state_dict.items()
                    if isinstance(value, torch.Tensor) and value.data_ptr() in addresses
                }
                state_dict.update(with_own_memory(mine))

    def _before_load(self, models: list[nn.Module], directory: str) -> None:
        if not self._worker.is_running:
            return
        self._loading = Path(directory)
        for parameter in self._worker.parameters:
            parameter.data = parameter.data.clone()  # safetensors refuses to load into views of one vector

    def state_dict(self) -> dict[str, Any]:
        return {"folder": self._name}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if self._loading is None:
            return
        directory, self._loading = self._loading, None
        worker = self._worker
        for parameter, view in zip(worker.parameters, worker.views(worker.x), strict=True):
            view.copy_(parameter)
            parameter.data = view
        if not self._companion.load(directory / self._name):
            worker.reset()  # all ranks have loaded the same model
