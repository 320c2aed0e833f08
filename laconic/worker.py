"""One replica of a model, joined to the others by a method."""

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
from laconic.agreement import fingerprint, require_agreement
from laconic.comm import Comm, Meter, connect
from laconic.comm.finite import is_finite
from laconic.flat import FlatParameters
from laconic.method import Method, fresh


class Worker:
    """Binds a model and its optimizer to a method, for the length of a `with` block around the training loop.

    Launched by torchrun, each process makes one; under plain `python` it is a world of one. All ranks start from rank
    0's parameters and buffers. `optimizer.step()` stays the user's call: the method runs in its hooks, after a step
    before any other's. Leaving the block waits for what is in flight and leaves the agreed model (`consensus`) on every
    rank.

    Args:
        model: the bare module, on its device, in its dtype; compiled or not.
        optimizer: any `torch.optim` optimizer over the model's parameters. What it does not train stays rank 0's.
        method: the worker works on a copy, `worker.method`.
        timeout: seconds that one wait for other workers may last; at the start, until all have come, at least 60. A
            rank that fails is noticed within seconds; the time-out is for one that hangs.
        seed: of `worker.generator`, the same on all ranks.
        comm: instead of torch.distributed.
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
        self._moment_names: list[str] | None = None
        self._lent = False
        self._stepping: FrameType | None = None  # the call of optimizer.step() that is under way
        self.consensus_distance: float | None = None  # √ of the mean ‖x − x̄‖² over workers, at the last consensus()
        try:
            self.method, self._flat, self.fingerprint = self._join(method)
            self._control = self.comm.channel("control")
            self._copy_from_rank_0()
            self.method.setup(self)
        except BaseException as error:
            self.comm.fail(error)  # or the others would wait for this rank
            raise
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        # Before any other: what those do to x is done to what the method leaves there, whoever came first.
        optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[1].id, last=False)  # type: ignore[attr-defined]

    def _join(self, method: Method) -> tuple[Method, FlatParameters, dict[str, Any]]:
        """Flatten, and compare with the other ranks. A rank whose model is unfit still meets them, with its error."""
        try:
            method = fresh(method)
            flat = FlatParameters(self.model, self.optimizer)
        except ValueError as error:
            require_agreement(self.comm, None, error, finite=True)
            raise
        own = fingerprint(self.model, self.optimizer, flat, method)
        require_agreement(self.comm, own, None, is_finite(flat.x))
        return method, flat, own

    @property
    def x(self) -> Tensor:
        """All trained parameters as one vector, in which the model itself works."""
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
            # A rank may have no state yet, where its parameters had no gradient: agree on what there is anywhere.
            note = [self._flat.moment_names(), bool(self.optimizer.state)]
            notes = self.comm.meet("the names of the optimizer's state", note)
            names = sorted({name for names, _ in notes for name in names})
            if not names and not all(has_state for _, has_state in notes):
                return {}  # the first gradient is still to come
            self._moment_names = names
        return self._flat.moments(self._moment_names)

    @torch.no_grad()
    def serve(self) -> None:
        """Take part in the others' steps without data: for a rank that its method makes a dedicated server.

        Returns when the others come to `consensus()`, `save()`, `load()` or the end of the block: this rank must come
        there next, and may serve again afterwards.
        """
        if self.method.trains(self.rank):
            raise RuntimeError(
                f"worker.serve() is for a rank without data, and rank {self.rank} trains: "
                f"{type(self.method).__name__} must be set to keep it as a server"
            )
        if self._lent:
            raise RuntimeError("worker.serve() must not be called inside consensus(): its changes would be lost")
        while self.method.await_step(self):
            self._begin_step()
            self.method.after_step(self)

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Lend the agreed model: the mean of all workers' parameters and floating buffers, integer buffers of rank 0.

        For evaluation, on all ranks together. Afterwards this worker's own values are back, bit for bit. Inside, no
        optimizer step may be made; a second `consensus()` inside is the same agreed model.
        """
        if self._lent:
            yield self.model
            return
        own = [self.x.clone()] + [buffer.clone() for buffer in self.model.buffers()]
        self._pause()
        self.comm.meet("consensus()")
        self._lent = True
        try:
            self._agree()
            square = (own[0] - self.x).double().square().sum().reshape(1)
            self.consensus_distance = self._control.mean(square).sqrt().item()
            yield self.model
        finally:
            with torch.no_grad():
                for mine, saved in zip([self.x, *self.model.buffers()], own, strict=True):
                    mine.copy_(saved)
            self._lent = False

    def state_dict(self) -> dict[str, Any]:
        """Parameters, step, and the method's state and random numbers; the optimizer has a `state_dict` of its own."""
        return {
            "x": self.x.clone(),
            "step": self.step,
            "method": checkpoint.cloned(self.method.state_dict()),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave on this rank. What does not fit raises and changes nothing."""
        checkpoint.require_same_form("worker", saved, self.state_dict())
        with torch.no_grad():
            self.x.copy_(saved["x"])
        self.step, self._stepping = saved["step"], None
        self.method.load_state_dict(checkpoint.cloned(saved["method"]))
        self.generator.set_state(saved["generator"])

    def save(self, directory: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Write model, optimizer and worker of all ranks, and `extra` (schedulers, epoch, …: what torch can load
        without unpickling objects). All ranks call it. A crash at any moment leaves the checkpoint before readable."""
        self._pause()
        checkpoint.save(self, Path(directory), extra or {})

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Go on from what `save` wrote; returns `extra`. A checkpoint that is torn, foreign or of other settings raises
        on every rank with the reason, and nothing is changed."""
        self._pause()
        return checkpoint.load(self, Path(directory))

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
            self._agree()
            self.comm.close()
        except BaseException as late:
            self.comm.fail(late)
            raise

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        caller = sys._getframe(1)
        if self._stepping is not None:
            if is_within(self._stepping, caller):
                return  # of a step() that calls its parent class's: torch runs all hooks for both
            raise RuntimeError(f"optimizer.step() did not end at step {self.step}: go on from a checkpoint")
        # torch passes the optimizer itself as args[0]; whatever else there is must be a closure.
        if any(argument is not None and argument is not optimizer for argument in (*args, *kwargs.values())):
            raise ValueError("optimizer.step() must be called without a closure: gradients must be there before it")
        if self._lent:
            raise RuntimeError("optimizer.step() must not be called inside consensus(): its changes would be lost")
        if not self.method.trains(self.rank):
            raise RuntimeError(f"rank {self.rank} is a server without data: call worker.serve(), not optimizer.step()")
        self._flat.check()
        self._begin_step()
        self._stepping = caller

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if sys._getframe(1) is not self._stepping:
            return
        self._stepping = None
        self._end_step()

    @torch.no_grad()
    def _end_step(self) -> None:
        start = self.comm.now()
        self.method.after_step(self)
        self.meter.add_method(self.comm.now() - start)

    @torch.no_grad()
    def _begin_step(self) -> None:
        self.step += 1
        self.meter.begin_step(self.step)
        start = self.comm.now()
        self.method.before_step(self)
        self.meter.add_method(self.comm.now() - start)

    @torch.no_grad()
    def _pause(self) -> None:
        self.method.pause(self)

    @torch.no_grad()
    def _copy_from_rank_0(self) -> None:
        if self.size == 1:
            return
        self._control.broadcast(self.x, out=self.x)
        inside = {id(p) for p in self._flat.parameters}
        for tensor in [*(p.data for p in self.model.parameters() if id(p) not in inside), *self.model.buffers()]:
            tensor.copy_(self._control.broadcast(tensor))

    @torch.no_grad()
    def _agree(self) -> None:
        """Make the model the agreed one, in place."""
        if self.size == 1:
            return
        self._control.mean(self.x, out=self.x)
        # A rank that does not train has nothing to say about buffers such as running statistics.
        members = self.comm.members
        trained = [rank for rank in members if self.method.trains(rank)]
        weight = len(members) / len(trained) if self.rank in trained else 0.0
        buffers = list(self.model.buffers())
        floating = [buffer for buffer in buffers if buffer.is_floating_point()]
        if floating:
            flat = torch.cat([buffer.double().reshape(-1) for buffer in floating])
            # A mask of −inf has no mean: where an entry is not finite, everyone keeps its own.
            finite = flat.isfinite()
            both = torch.cat([weight * flat.where(finite, 0.0), finite.double()])
            mean, finite_share = self._control.mean(both).chunk(2)
            parts = torch.split(mean.where(finite_share > 1 - 1e-9, flat), [buffer.numel() for buffer in floating])
            for buffer, part in zip(floating, parts, strict=True):
                buffer.copy_(part.view_as(buffer))
        for buffer in buffers:
            if not buffer.is_floating_point():
                buffer.copy_(self._control.broadcast(buffer, root=trained[0]))


def is_within(call: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is call
