"""Trains with Lightning's Trainer, in which a method of laconic takes the place of gradient averaging."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from laconic import Method, Worker
from laconic.integrations.companion import Companion, metrics_of, with_own_memory
from laconic.integrations.frameworks import require
from laconic.nodes import Nodes, check_arguments

LEAST = "2.5"
require("lightning", LEAST)

from lightning.pytorch import Trainer  # noqa: E402  after the check, whose message says what to do
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

SUFFIX = ".laconic"  # of the folder beside a checkpoint file that holds the state of all ranks
KEY = "laconic"  # in the checkpoint file


class LaconicStrategy(DDPStrategy):  # type: ignore[misc]
    """A strategy for `lightning.Trainer` whose workers communicate by a method of laconic.

    Processes are launched and data is sharded as by Lightning's `DDPStrategy`. The model is not wrapped. Validation and
    checkpoint files use the averaged model. Beside a file `x.ckpt` a folder `x.ckpt.laconic` holds the state of all
    ranks, with which `fit(ckpt_path=…)` continues. After `fit()` every rank holds the averaged model.

    Args:
        method: the communication method.
        timeout: seconds that one wait for other workers may take, as for `laconic.Worker`.
        nodes: "auto": the ranks of a machine train as one worker, as for `laconic.Worker`; needs torchrun.
        start_method: how processes are launched, as for `DDPStrategy`: "fork" in notebooks.
        **kwargs: `accelerator`, `parallel_devices`, `cluster_environment`, `checkpoint_io`, `precision_plugin` and
            `process_group_backend`, as for `DDPStrategy`.

    Attributes:
        worker: the `laconic.Worker` of the present or last `fit()`; None before.

    Raises:
        ValueError: an argument is no method, or one of DistributedDataParallel, which is not used.

    Example::

        trainer = lightning.Trainer(strategy=LaconicStrategy(laconic.Divisible()), devices=2)
        trainer.fit(module, loader)
    """

    def __init__(
        self,
        method: Method,
        *,
        timeout: float = 1800.0,
        nodes: Nodes = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        if not isinstance(method, Method):
            raise ValueError(f"method must be a method of laconic, such as laconic.Divisible(), not {method!r}")
        check_arguments(None, nodes)
        super().__init__(timeout=timedelta(seconds=timeout), start_method=start_method, **kwargs)
        of_ddp = [*self._ddp_kwargs, *(name for name in kwargs if name.startswith(("ddp_", "model_averaging")))]
        if of_ddp:
            raise ValueError(
                f"LaconicStrategy does not use DistributedDataParallel, so it takes no argument {', '.join(of_ddp)}"
            )
        self.method, self.seconds, self.nodes = method, timeout, nodes
        self.worker: Worker | None = None
        self._companion: Companion | None = None
        self._consensus = ExitStack()
        self._in_consensus = False
        self._postponed: list[Path] = []  # folders to save to when consensus() is over
        self._resumed_from = ""

    def configure_ddp(self) -> None:
        """Leaves the model bare, since the method averages."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self.worker = self._companion = None
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.lightning_module is not None
            self.worker = Worker(
                self.lightning_module, self.optimizers, self.method, timeout=self.seconds, nodes=self.nodes
            ).start()
            self._companion = Companion(self.worker)

    def metrics(self) -> dict[str, float]:
        """Returns what this rank has sent and waited for, and the method's metrics, for `LightningModule.log_dict`."""
        return {} if self.worker is None else metrics_of(self.worker)

    # Validation uses the averaged model. Callbacks save checkpoints in on_validation_end, before the hook here.

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self.worker is not None:
            self._consensus.enter_context(self.worker.consensus())
            self._in_consensus = True

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._leave_consensus()
        postponed, self._postponed = self._postponed, []
        for folder in postponed:
            assert self._companion is not None
            self._companion.save(folder)

    def _leave_consensus(self) -> None:
        self._in_consensus = False
        self._consensus.close()

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self.worker.consensus() if self.worker is not None else nullcontext():
            return with_own_memory(super().lightning_module_state_dict())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        # A checkpoint of weights only has no optimizer_states.
        has_state = self._companion is not None and "optimizer_states" in checkpoint
        if has_state:
            assert self.worker is not None
            if "://" in str(filepath):
                raise ValueError(
                    f"checkpoints must be in a local or shared directory, where each rank writes its state beside "
                    f"them, not to {filepath}: set ModelCheckpoint(dirpath=…), or save_weights_only=True"
                )
            checkpoint[KEY] = {"step": self.worker.step}
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if has_state:
            assert self._companion is not None
            if self._in_consensus:
                self._postponed.append(_folder(filepath))
            else:
                self._companion.save(_folder(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        folder = _folder(filepath)
        super().remove_checkpoint(filepath)
        self._postponed = [path for path in self._postponed if path != folder]
        shutil.rmtree(folder, ignore_errors=True)  # ranks of one machine remove the same folder

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        self._resumed_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._companion is None:
            return
        assert self.worker is not None
        folder = _folder(self._resumed_from)
        if self._companion.load(folder) and self.worker.step != checkpoint.get(KEY, {}).get("step"):
            raise ValueError(
                f"{folder} is of step {self.worker.step}, and {self._resumed_from} is not: they were not written "
                f"together. Resume from another checkpoint, or remove the folder to let the method begin anew"
            )

    # The end

    def on_train_end(self) -> None:
        super().on_train_end()
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._leave_consensus()
        self._close(exception)

    def teardown(self) -> None:
        self._close()  # fit() ends without on_train_end where there is nothing to train
        super().teardown()

    def _close(self, error: BaseException | None = None) -> None:
        self._companion = None
        if self.worker is not None:
            self.worker.close(error)


def _folder(filepath: Any) -> Path:
    """Returns where the state of all ranks is that belongs to a checkpoint file, or to the file that it links to."""
    return Path(os.path.realpath(filepath) + SUFFIX)
