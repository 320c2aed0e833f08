"""Binds one replica of a model to a communication method, through the hooks of the user's optimizer."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from laconic import checkpoint
from laconic.agreement import Fingerprint, fingerprint, require_agreement
from laconic.changes import Changes
from laconic.comm import Comm, connect
from laconic.comm.finite import is_finite
from laconic.consensus import average_model, average_tensors, copy_from_rank_0, require_same_forms
from laconic.flat import FlatParameters
from laconic.method import Method, fresh
from laconic.replica import FlatReplica
from laconic.rules import check_number, check_seed
from laconic.watch import Watch, checksum

MOST_SECONDS = 1e9  # of a time-out; torch counts milliseconds in 64 bits


class Worker(FlatReplica):
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
        _check_arguments(model, optimizer, timeout, seed, comm)
        device = next(model.parameters(), torch.empty(0)).device
        self.model, self.optimizer = model, optimizer
        self.comm = comm or connect(device, timeout)
        self.step = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.consensus_distance: float | None = None
        self._in_consensus = False
        self._known_checkpoints: dict[Path, int] = {}  # by directory, the newest number written or seen while loading
        self._step_call: FrameType | None = None  # the frame of the call of optimizer.step() that is running
        try:
            self.method, self._flat, self.fingerprint = self._join(method)
            self._control = self.comm.channel("control")
            copy_from_rank_0(self._control, model, self._flat)
            self.method.setup(self)
            self._watch = Watch(self._control, self.method, self._flat, optimizer)
            self._changes = Changes(model, self._flat, self.method)
        except BaseException as error:
            self.comm.fail(error)  # else the other ranks would wait for this one until their timeout
            raise
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_step_post_hook(self._after_hooks),
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
        is_equal = self._meet("consensus()")
        self._in_consensus = True
        try:
            self._average_model(is_equal)
            square = (own[0] - self.x).double().square().sum().reshape(1)
            mean = self._control.among_members("consensus()", lambda: self._control.mean(square))
            self.consensus_distance = mean.sqrt().item()
            yield self.model
        finally:
            with torch.no_grad():
                for mine, saved in zip([self.x, *self.model.buffers()], own, strict=True):
                    mine.copy_(saved)
            self._changes.end_step()
            self._in_consensus = False

    @torch.no_grad()
    def average_(self, tensors: Tensor | Iterable[Tensor]) -> None:
        """Averages tensors of any kind over all workers that train, in place: metrics, an average of weights, ….

        All ranks call it, with tensors of the same shapes. A rank without data passes tensors too, whose values do not
        count. An entry that is not finite on every rank stays as it is on each.

        Raises:
            ValueError: a tensor is not of a floating dtype, or the ranks' shapes differ; on every rank.

        >>> import laconic
        >>> model = torch.nn.Linear(3, 1)
        >>> with laconic.Worker(model, torch.optim.SGD(model.parameters()), laconic.AllReduce()) as worker:
        ...     accuracy = torch.tensor(0.5)  # of this worker's data
        ...     worker.average_(accuracy)
        """
        found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not self._in_consensus:
            self._pause()
        require_same_forms(self.comm, found)
        average_tensors(self._control, found, self._weight())

    @torch.no_grad()
    def reset(self) -> None:
        """Makes the present weights the new agreed start, after the same weights were loaded on all ranks.

        All ranks call it. The method drops what is in flight and begins anew; the optimizer's state is kept. Weights
        that are loaded inside the block without it are mixed with what other workers have sent before.

        Raises:
            ValueError: the ranks hold different parameters; names those that differ from the others, on every rank.

        >>> import laconic
        >>> model = torch.nn.Linear(3, 1)
        >>> best = {name: value.clone() for name, value in model.state_dict().items()}
        >>> with laconic.Worker(model, torch.optim.SGD(model.parameters()), laconic.Divisible()) as worker:
        ...     _ = model.load_state_dict(best)
        ...     worker.reset()
        """
        if self._in_consensus:
            raise RuntimeError("worker.reset() must not be called inside consensus(): its changes would be lost")
        self._watch.finish()
        self._pause()
        checksums = self.comm.meet("reset()", checksum(*self.model.parameters()))
        self._watch.require_same_parameters(checksums, "reset()")
        self.method.reset(self)
        self._changes.forget()

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
            self._finish_step()

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
        self._meet("save()")
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
        self._watch.finish()
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
        self._changes.forget()

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
            is_equal = self._meet("the end of the worker")
            # Weights that all ranks have loaded, say the best ones, are the result: messages in flight do not change
            # them.
            agreed = self.x.clone() if is_equal else None
            with torch.no_grad():
                self.method.drain(self)
                if agreed is not None:
                    self.x.copy_(agreed)
            self._average_model(is_equal)
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
        self._changes.check(self.step, self.size)
        self._watch.before_step(caller)
        self.comm.computed()
        self._begin_step()
        self._step_call = caller
        # The last hook of all, so that what the user's hooks do to x counts as a part of the step.
        optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[2].id)  # type: ignore[attr-defined]

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
        self._finish_step()

    @torch.no_grad()
    def _finish_step(self) -> None:
        start = self.comm.now()
        self.method.after_step(self)
        self._watch.after_step(self)
        self.meter.add_method(self.comm.now() - start)
        self.meter.end_step()

    def _after_hooks(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._step_call is None:  # not in a step() that is called by another step()
            self._changes.end_step()

    def _meet(self, what: str) -> bool:
        """Waits for all ranks between two steps, and compares them. Returns whether all hold the same x."""
        self._watch.finish()
        self._pause()
        is_equal = self._watch.compare(self.comm.meet(what, self._watch.note(self)), self)
        self._changes.check(self.step, self.size, is_agreed=is_equal)
        return is_equal

    @torch.no_grad()
    def _pause(self) -> None:
        self.method.pause(self)

    def _trainers(self) -> list[int]:
        return [rank for rank in self.comm.members if self.method.trains(rank)]

    def _weight(self) -> float:
        """Returns how often this rank's values count in a mean over all members that stands for one over trainers."""
        trainers = self._trainers()
        return len(self.comm.members) / len(trainers) if self.rank in trainers else 0.0

    def _average_model(self, is_equal: bool) -> None:
        tensors = [self.x, *self.model.buffers()]
        local = [tensor.clone() for tensor in tensors] if self.comm.can_lose_members else []

        def average() -> None:
            for tensor, value in zip(tensors, local, strict=False):
                tensor.copy_(value)  # in case an attempt has failed
            average_model(self._control, self.model, self.x, self._trainers(), self._weight(), is_equal=is_equal)

        with torch.no_grad():
            self._control.among_members("the average of all models", average)


def _check_arguments(model: object, optimizer: object, timeout: object, seed: object, comm: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {model!r}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r}")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"optimizer must run torch's step hooks, and {type(optimizer).__name__} is a wrapper that does not: pass "
            f"the optimizer inside it (of Accelerate: optimizer.optimizer)"
        )
    check_number("timeout", timeout, most=MOST_SECONDS, above=0)
    check_seed(seed)
    if comm is not None and not isinstance(comm, Comm):
        raise ValueError(f"comm must be None or a laconic.Comm, not {comm!r}")


def _is_within(call: FrameType, frame: FrameType | None) -> bool:
    """Returns whether `frame` is `call` or was called from it."""
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call
