"""Binds one replica of a model to a communication method, through the hooks of the user's optimizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from laconic import checkpoint
from laconic.agreement import Fingerprint, fingerprint, require_agreement
from laconic.comm import Comm, Meter, connect
from laconic.comm.finite import is_finite
from laconic.consensus import average_model, copy_from_rank_0
from laconic.flat import FlatParameters
from laconic.method import Method, fresh


class Worker:
    """Trains a model together with the other workers, for the length of a `with` block around the training loop.

    Each process that torchrun starts creates one Worker; under plain `python` it is a run of one worker. All ranks
    start from rank 0's parameters and buffers. The user still calls `optimizer.step()`: the method runs in its hooks,
    and its post-step hook runs before all other post-step hooks. At the end of the block the worker waits for all
    messages in flight, and every rank then holds the averaged model (see `consensus`).

    Args:
        model: the bare module, on its device and in its dtype, compiled or not. No DDP or FSDP wrapper.
        optimizer: any `torch.optim` optimizer over parameters of the model. Parameters that it does not train keep
            rank 0's values.
        method: the communication method. The worker uses a copy, `worker.method`.
        timeout: seconds that one wait for other workers may take (at the start at least 60, until all are connected).
            A rank that fails is noticed within seconds; the timeout is for a rank that hangs.
        seed: the seed of `worker.generator`, whose random numbers are the same on all ranks.
        comm: the communication to use instead of torch.distributed.

    Attributes:
        step: the number of optimizer steps so far.
        consensus_distance: √(mean over workers of ‖x − x̄‖²) at the last `consensus()`; None before.

    Raises:
        ValueError: model, optimizer and method do not fit together, or the ranks differ; on every rank.

    >>> import laconic
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with laconic.Worker(model, optimizer, laconic.LocalSGD(period=4)) as worker:
    ...     for _ in range(8):
    ...         model(torch.ones(3)).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> worker.step, worker.size, worker.x.shape
    (8, 1, torch.Size([4]))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: Method,
        *,
        timeout: float = 1800.0,
        seed: int = 0,
        comm: Comm | None = None,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, not {timeout!r}")
        device = next(model.parameters(), torch.empty(0)).device
        self.model, self.optimizer = model, optimizer
        self.comm = comm or connect(device, timeout)
        self.step = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.consensus_distance: float | None = None
        self._moment_names: list[str] | None = None
        self._in_consensus = False
        self._known_checkpoints: dict[Path, int] = {}  # by directory, the newest number written or seen while loading
        self._step_call: FrameType | None = None  # the frame of the call of optimizer.step() that is running
        try:
            self.method, self._flat, self.fingerprint = self._join(method)
            self._control = self.comm.channel("control")
            copy_from_rank_0(self._control, model, self._flat)
            self.method.setup(self)
        except BaseException as error:
            self.comm.fail(error)  # else the other ranks would wait for this one until their timeout
            raise
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        # The method's hook goes first: what other hooks do to x (clamping, an average of weights) must apply to the x
        # that the method leaves, whichever hook was registered first.
        optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[1].id, last=False)  # type: ignore[attr-defined]

    def _join(self, method: Method) -> tuple[Method, FlatParameters, Fingerprint]:
        """Flattens the parameters and compares this rank with the others.

        A rank whose model or method is unfit reports its error to the others before it raises.
        """
        try:
            method = fresh(method)
            flat = FlatParameters(self.model, self.optimizer)
        except ValueError as error:
            require_agreement(self.comm, None, error, finite=True)
            raise
        own = fingerprint(self.model, self.optimizer, flat, method)
        require_agreement(self.comm, own, None, is_finite(flat.x))
        return method, flat, own

    # What a method sees; `laconic.method.Replica` documents these.

    @property
    def x(self) -> Tensor:
        """All trained parameters as one vector (d), of which the model's parameters are views."""
        return self._flat.x

    @property
    def x_and_scalar(self) -> Tensor:
        return self._flat.x_and_scalar

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self._flat.parameters

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def meter(self) -> Meter:
        """Payload bytes sent and seconds waited: `meter.total.nbytes("foreground")`, `meter.last_step.seconds()`, …"""
        return self.comm.meter

    @property
    def lr(self) -> float:
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def pack_gradient(self) -> Tensor:
        return self._flat.pack_gradient()

    def unpack_gradient(self, packed: Tensor) -> None:
        self._flat.unpack_gradient(packed)

    def gradients(self) -> list[Tensor | None]:
        return self._flat.gradients()

    def views(self, vector: Tensor) -> list[Tensor]:
        return self._flat.views(vector)

    def moments(self) -> dict[str, Tensor]:
        if self._moment_names is None:
            # A rank whose parameters had no gradient yet has no optimizer state: use the names that any rank has.
            own = [self._flat.moment_names(), bool(self.optimizer.state)]
            notes = self.comm.meet("averaging the optimizer's state", own)
            names = sorted({name for names, _ in notes for name in names})
            if not names and not all(has_state for _, has_state in notes):
                return {}  # some rank has had no gradient yet, so names may still appear
            self._moment_names = names
        return self._flat.moments(self._moment_names)

    # What the user calls.

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Sets the model to the average of all workers' models for the length of a `with` block, for evaluation.

        Parameters and floating-point buffers are averaged, other buffers are those of the first rank that trains. All
        ranks call it. Afterwards this worker's own values are back, bit for bit. `optimizer.step()` is an error
        inside; a nested `consensus()` gives the same model.

        >>> import laconic
        >>> model = torch.nn.Linear(3, 1)
        >>> with laconic.Worker(model, torch.optim.SGD(model.parameters()), laconic.AllReduce()) as worker:
        ...     with worker.consensus() as averaged:
        ...         prediction = averaged(torch.ones(3))
        """
        if self._in_consensus:
            yield self.model
            return
        own = [self.x.clone()] + [buffer.clone() for buffer in self.model.buffers()]
        self._pause()
        self.comm.meet("consensus()")
        self._in_consensus = True
        try:
            self._average_model()
            square = (own[0] - self.x).double().square().sum().reshape(1)
            mean = self._control.among_members("consensus()", lambda: self._control.mean(square))
            self.consensus_distance = mean.sqrt().item()
            yield self.model
        finally:
            with torch.no_grad():
                for mine, saved in zip([self.x, *self.model.buffers()], own, strict=True):
                    mine.copy_(saved)
            self._in_consensus = False

    @torch.no_grad()
    def serve(self) -> None:
        """Takes part in the other ranks' steps on a rank without data, which its method keeps as a dedicated server.

        Returns when the others reach `consensus()`, `save()`, `load()` or the end of the block. This rank must call the
        same next, and may serve again afterwards.
        """
        if self.method.trains(self.rank):
            raise RuntimeError(
                f"worker.serve() is for a rank without data, and rank {self.rank} trains: "
                f"{type(self.method).__name__} must be set to keep it as a server"
            )
        if self._in_consensus:
            raise RuntimeError("worker.serve() must not be called inside consensus(): its changes would be lost")
        while self.method.await_step(self):
            self._begin_step()
            self.method.after_step(self)

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
        """
        self._pause()
        checkpoint.save(self, Path(directory), extra or {}, keep, self._known_checkpoints)

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Continues from the newest complete checkpoint in `directory`. All ranks call it.

        With as many workers as saved it, training continues bit for bit. With another number, parameters, optimizer
        state and method state are merged (docs/restarts.md); all ranks must then see the files of all.

        Returns:
            The `extra` given to `save`.

        Raises:
            FileNotFoundError: there is no complete checkpoint.
            ValueError: the checkpoints are damaged, or the newest is of another model, method, setting or format.
                Raised on every rank with the reason, and nothing is changed.

        Warns:
            UserWarning: the newest checkpoint is damaged, and the one before it was loaded.
        """
        self._pause()
        return checkpoint.load(self, Path(directory), self._known_checkpoints)

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
        with self.consensus():
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
        self.step, self._step_call = saved["step"], None
        self.method.load_state_dict(checkpoint.cloned(saved["method"]))
        self.generator.set_state(saved["generator"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        if error is not None:
            self.comm.fail(error)
            return
        try:
            self._pause()
            self.comm.meet("the end of the worker")
            with torch.no_grad():
                self.method.drain(self)
            self._average_model()
            self.comm.close()
        except BaseException as late:
            self.comm.fail(late)
            raise

    # One step: the optimizer's pre-step hook, the optimizer itself, its post-step hook.

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        caller = sys._getframe(1)
        if self._step_call is not None:
            if _is_within(self._step_call, caller):
                return  # a step() that calls its parent class's step(): torch runs all hooks for both
            raise RuntimeError(f"optimizer.step() failed at step {self.step}: continue from a checkpoint")
        # torch passes the optimizer itself as args[0]; any other argument must be a closure.
        if any(argument is not None and argument is not optimizer for argument in (*args, *kwargs.values())):
            raise ValueError("optimizer.step() must be called without a closure: compute gradients before calling it")
        if self._in_consensus:
            raise RuntimeError("optimizer.step() must not be called inside consensus(): its changes would be lost")
        if not self.method.trains(self.rank):
            raise RuntimeError(f"rank {self.rank} is a server without data: call worker.serve(), not optimizer.step()")
        self._flat.check()
        self._begin_step()
        self._step_call = caller

    @torch.no_grad()
    def _begin_step(self) -> None:
        self.step += 1
        self.meter.begin_step(self.step)
        start = self.comm.now()
        self.method.before_step(self)
        self.meter.add_method(self.comm.now() - start)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # No decorator here and on _before_step: it would add a frame between this one and optimizer.step().
        if sys._getframe(1) is not self._step_call:
            return
        self._step_call = None
        with torch.no_grad():
            start = self.comm.now()
            self.method.after_step(self)
            self.meter.add_method(self.comm.now() - start)

    @torch.no_grad()
    def _pause(self) -> None:
        self.method.pause(self)

    def _average_model(self) -> None:
        tensors = [self.x, *self.model.buffers()]
        local = [tensor.clone() for tensor in tensors] if self.comm.can_lose_members else []

        def average() -> None:
            for tensor, value in zip(tensors, local, strict=False):
                tensor.copy_(value)  # in case an attempt has failed
            members = self.comm.members
            trainers = [rank for rank in members if self.method.trains(rank)]
            average_model(self._control, self.model, self.x, trainers, members)

        with torch.no_grad():
            self._control.among_members("the average of all models", average)


def _is_within(call: FrameType, frame: FrameType | None) -> bool:
    """Returns whether `frame` is `call` or was called from it."""
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call
