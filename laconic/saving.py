"""Saves and loads a worker: checkpoints of all ranks, one file with the averaged model, the state of this rank."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic import checkpoint
from laconic.running import RunningReplica


class SavingReplica(RunningReplica):
    """A replica that can be saved. `laconic.Worker` adds the rest."""

    # By directory, the newest number written or seen while loading.
    _known_checkpoints: dict[Path, int]

    @abstractmethod
    def consensus(self, *, exact: bool = False) -> AbstractContextManager[nn.Module]:
        """See `laconic.Worker.consensus`."""

    def save(self, directory: str | Path, extra: dict[str, Any] | None = None, *, keep: int = 2) -> None:
        """Writes a checkpoint of model, optimizer, worker and random numbers of all ranks. All ranks call it.

        A crash at any moment leaves the previous checkpoint or this one complete. Another version of laconic reads it
        if its checkpoint format is the same.

        Args:
            directory: where to write; shared by all machines or local to each. Of one job: a worker refuses to save
                where it finds a checkpoint that it has neither written nor seen while loading.
            extra: the user's own state (schedulers, epoch, …): tensors and plain data.
            keep: how many checkpoints to keep. With 2, a damaged file costs the steps since the one before it.

        Raises:
            ValueError: `extra` cannot be loaded again, or another job saves to `directory`.
            OSError: a rank could not write. Nothing of this save is left, and earlier checkpoints stay.
            FloatingPointError: a rank's parameters are not finite; the message names it, and nothing is saved.
        """
        with self.tracking.verb("save"):
            self._meet("save()")
            checkpoint.save(self, Path(directory), extra or {}, keep, self._known_checkpoints)

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Continues from the newest complete checkpoint in `directory`. All ranks call it.

        With as many workers as saved it, training continues bit for bit. With another number, parameters, optimizer
        state and method state are merged (docs/restarts.md); all ranks must then see the files of all. A node must have
        as many ranks as those that saved it.

        Returns:
            The `extra` given to `save`.

        Raises:
            FileNotFoundError: there is no complete checkpoint.
            ValueError: the checkpoints are damaged, or the newest is of another model, method, setting or format.
                Raised on every rank with the reason, and nothing is changed.

        Warns:
            UserWarning: the newest checkpoint is damaged, and the one before it was loaded.
        """
        self._require_running("load()")
        self._require_local_model("load()")
        with self.tracking.verb("load"):
            self._watch.finish()
            self.seen.comm.late.forget()  # it is about what is replaced
            self._pause()
            extra = checkpoint.load(self, Path(directory), self._known_checkpoints)
            if self._slice is not None:
                self._slice.gather(self.x)
                self._changes.forget()
            return extra

    def export(self, path: str | Path) -> None:
        """Writes the averaged model to one file, a `state_dict` that `torch.load` reads anywhere. All ranks call it.

        Raises:
            OSError: the first rank could not write the file; on every rank.

        >>> import laconic
        >>> model = torch.nn.Linear(3, 1)
        >>> with laconic.Worker(model, torch.optim.SGD(model.parameters()), laconic.AllReduce()) as worker:
        ...     worker.export("/tmp/laconic-export-example.pt")
        >>> sorted(torch.load("/tmp/laconic-export-example.pt", weights_only=True))
        ['bias', 'weight']
        """
        self._require_running("export()")
        if self._shown == "agreed()":
            raise RuntimeError("export() averages the local models, so it must not be called inside agreed()")
        with self.consensus(exact=True):
            checkpoint.export(self, Path(path))

    def state_dict(self) -> dict[str, Any]:
        """Returns parameters, step, the method's state and the generator's state; not the optimizer's state."""
        return {
            "x": self.x.clone(),
            "step": self.step,
            "method": checkpoint.cloned(self.method.state_dict()),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned on this rank. If it does not fit, raises and changes nothing."""
        checkpoint.check_worker(self, saved)
        with torch.no_grad():
            self.x.copy_(saved["x"])
        self.step = saved["step"]
        self._stepping.forget()
        self.method.load_state_dict(checkpoint.cloned(saved["method"]))
        self.generator.set_state(saved["generator"])
        self._changes.forget()
