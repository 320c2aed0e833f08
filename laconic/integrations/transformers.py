"""Trains with the Hugging Face Trainer, in which a method of laconic takes the place of gradient averaging."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from laconic import Method, Worker
from laconic.integrations.companion import Companion, metrics_of
from laconic.integrations.frameworks import require

LEAST = "5.0"
require("transformers", LEAST)

from transformers import Trainer, TrainerCallback  # noqa: E402  after the check, whose message says what to do
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint  # noqa: E402

FOLDER = "laconic"  # in each of the Trainer's checkpoint folders: the state of all ranks


class LaconicTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` whose workers communicate by a method of laconic.

    Everything else is the Trainer's. While it trains, DistributedDataParallel averages nothing. `evaluate()`,
    `predict()` and saved checkpoints use the averaged model. Each checkpoint folder also holds the state of all ranks,
    in `laconic/`, with which `train(resume_from_checkpoint=…)` continues. After `train()` every rank holds the averaged
    model, or the best one with `load_best_model_at_end`.

    For another trainer class, derive from both: `class LaconicSFTTrainer(LaconicTrainer, SFTTrainer): pass`.

    Args:
        *args: as for `transformers.Trainer`.
        method: the communication method.
        timeout: seconds that one wait for other workers may take, as for `laconic.Worker`.
        **kwargs: as for `transformers.Trainer`.

    Attributes:
        worker: the `laconic.Worker` of the last `train()`; None before.

    Raises:
        ValueError: a setting of the Trainer does not go together with a method; on every rank.

    Example::

        trainer = LaconicTrainer(model, args, train_dataset=data, method=laconic.Divisible())
        trainer.train()
    """

    def __init__(self, *args: Any, method: Method, timeout: float = 1800.0, **kwargs: Any) -> None:
        if not isinstance(method, Method):
            raise ValueError(f"method must be a method of laconic, such as laconic.Divisible(), not {method!r}")
        super().__init__(*args, **kwargs)
        self.method, self.timeout = method, timeout
        self.worker: Worker | None = None
        self._companion: Companion | None = None
        self._resumed_from: str | None = None
        unfit = {
            "auto_find_batch_size": self.args.auto_find_batch_size,
            "deepspeed": self.is_deepspeed_enabled,
            "fsdp": self.is_fsdp_enabled,
            "several GPUs in one process (start it by torchrun)": self.args.n_gpu > 1,
        }
        for setting, is_on in unfit.items():
            if is_on:
                raise ValueError(f"LaconicTrainer trains one replica per process, so it cannot be used with {setting}")
        # The first callback, so that the others find rank 0's model at the start and the averaged one at the end.
        self.callback_handler.callbacks.insert(0, _StartAndEnd(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as `transformers.Trainer.train`; from a checkpoint folder with the state of all ranks in it."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        self._resumed_from = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            if self.worker is not None:
                self.worker.close(error)  # tells the other ranks, unless the worker has ended already
            raise

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluates the averaged model. All ranks call it."""
        with self._averaged():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
            return metrics

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts with the averaged model. All ranks call it."""
        with self._averaged():
            return super().predict(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Saves the averaged model. All ranks call it."""
        with self._averaged():
            super().save_model(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs with the training loss what this rank has sent and waited for, and the method's metrics."""
        if self.worker is not None and "loss" in logs:
            logs |= metrics_of(self.worker)
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._companion is not None and not self.args.save_only_model:
            folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            # Before the Trainer's files, the last of which makes the checkpoint one that can be resumed from.
            self._companion.save(folder / FOLDER)
        with self._averaged():
            super()._save_checkpoint(model, trial)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        if self.worker is None:
            yield
            return
        with self.worker.consensus():
            yield

    def _start_worker(self) -> None:
        self.worker = Worker(self.model_wrapped, self.optimizer, self.method, timeout=self.timeout).start()
        self._companion = Companion(self.worker)
        if self._resumed_from is not None:
            self._companion.load(Path(self._resumed_from) / FOLDER)

    def _end_worker(self) -> None:
        assert self.worker is not None
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            try:
                self.worker.reset()
            except ValueError as error:
                raise ValueError(
                    f"load_best_model_at_end must load {self.state.best_model_checkpoint} on all ranks: use an "
                    f"output_dir that all machines share, or save_on_each_node=True"
                ) from error
        self.worker.close()
        self._companion = None


class _StartAndEnd(TrainerCallback):  # type: ignore[misc]
    """Runs the worker from the first step to the last, when model and optimizer are prepared."""

    def __init__(self, trainer: LaconicTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer._start_worker()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer._end_worker()
