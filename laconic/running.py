"""Runs one replica's part in the training: its start, its steps, its meetings with the other ranks, its end."""

from __future__ import annotations

from types import FrameType
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from laconic import kernels
from laconic.agreement import Fingerprint, fingerprint, require_agreement
from laconic.changes import Changes
from laconic.comm import Comm, connect, expected_size
from laconic.comm.finite import is_finite
from laconic.consensus import average_model, copy_from_rank_0
from laconic.flat import FlatParameters
from laconic.join import Join, copy_training_state
from laconic.method import Method, fresh
from laconic.replica import FlatReplica
from laconic.stepping import Stepping
from laconic.tracking import Dashboard, Tracking
from laconic.watch import Watch
from laconic.wrappers import BareModel


class RunningReplica(FlatReplica):
    """A replica that trains with the others. `laconic.Worker` adds what users call, and documents the arguments."""

    consensus_distance: float | None = None

    def __init__(
        self,
        bare: BareModel,
        optimizers: list[torch.optim.Optimizer],
        method: Method,
        timeout: float,
        seed: int,
        comm: Comm | None,
        dashboard: int | str | None,
    ) -> None:
        self._bare, self.model, self.optimizers = bare, bare.module, optimizers
        device = next(self.model.parameters(), torch.empty(0)).device
        _compile_kernels(self.model, method, device, comm)
        self.comm = comm or connect(device, timeout)
        self.step = 0
        self.generator = torch.Generator().manual_seed(seed)
        self._in_consensus = False
        self._end: Literal["no", "done", "failed"] = "no"
        self.tracking = Tracking(self)
        try:
            self.method, self._flat, self.fingerprint = self._flatten(method, "the start of the worker", dashboard)
            self._control = self.comm.channel("control")
            copy_from_rank_0(self._control, self.model, self._flat)
            self.method.setup(self)
            self._watch = Watch(self._control, self.method, self._flat, self.optimizers)
            self._changes = Changes(self.model, self._flat, self.method)
            self.dashboard = self.tracking.start_dashboard()
        except BaseException as error:
            self.tracking.close(error)
            self.comm.fail(error)  # else the other ranks would wait for this one until their timeout
            raise
        self._bare.switch_off(self.rank)
        self._stepping = Stepping(
            self.optimizers,
            number=lambda: self.step,
            check=self._check_step,
            begin=self._begin,
            finish=self._finish,
            end=self._end_step,
        )

    def _flatten(
        self, method: Method, what: str, dashboard: int | str | None = None
    ) -> tuple[Method, FlatParameters, Fingerprint]:
        """Flattens the parameters and compares this rank with the others, at the meeting `what`.

        A rank whose model or method is unfit reports its error to the others before it raises.
        """
        try:
            method = fresh(method)
            flat = FlatParameters(self.model, self.optimizers)
            if dashboard is not None:
                self.tracking.dashboard = Dashboard(self, dashboard)
        except ValueError as error:
            require_agreement(self.comm, None, error, finite=True, what=what)
            raise
        own = fingerprint(self.model, self.optimizers, flat, method)
        require_agreement(self.comm, own | {"dashboard": dashboard}, None, is_finite(flat.x), what)
        return method, flat, own

    def _require_running(self, what: str) -> None:
        if self._end != "no":
            raise RuntimeError(f"{what} is for a worker that has not ended, and this one has: create another Worker")
        if self._join is not None:
            raise RuntimeError(
                f"{what} at step {self.step} needs all ranks, and inside join() those that have run out of data would "
                f"not come: do it after the join() block"
            )

    # One step: the optimizers' pre-step hooks, the optimizers themselves, their post-step hooks.

    def _check_step(self) -> None:
        if self._in_consensus:
            raise RuntimeError("optimizer.step() must not be called inside consensus(): its changes would be lost")
        if not self.method.trains(self.rank):
            raise RuntimeError(f"rank {self.rank} is a server without data: call worker.serve(), not optimizer.step()")
        self._bare.check(self.step)
        self._flat.check()
        if self._flat.has_new_parameters():
            self._take_new_parameters()
        self._changes.check(self.step, self.size)

    @torch.no_grad()
    def _take_new_parameters(self) -> None:
        """Puts parameters that were unfrozen or added to an optimizer into x, as if another worker began here."""
        what = f"new parameters in the optimizer before step {self.step + 1}"
        if self.comm.can_lose_members or not all(map(self.method.trains, range(self.size))):
            raise RuntimeError(
                f"{type(self.method).__name__} cannot take up {what}: close this worker and create another one on all "
                f"ranks, after unfreezing or adding them"
            )
        self._settle(what)
        _, self._flat, self.fingerprint = self._flatten(self.method, what)
        copy_from_rank_0(self._control, self.model, self._flat)
        self._moment_names = None
        self.method.setup(self)
        self.method.reset(self)
        self._watch = Watch(self._control, self.method, self._flat, self.optimizers)
        self._changes = Changes(self.model, self._flat, self.method)

    def _begin(self, caller: FrameType) -> bool:
        with self.tracking.verb("before_step"):
            self._watch.before_step(caller)
            if self._join is not None:
                self._join.last = self.step + 1
                if self.method.sends(self):
                    self._take_census(self._join)
            self.comm.computed()
            self._begin_step()
        return self._flat.has_read_gradients

    def _finish(self) -> None:
        with self.tracking.verb("after_step"):
            self._finish_step()

    def _end_step(self) -> None:
        with self.tracking.verb("after_hooks"):
            self._changes.end_step()
        self.tracking.end_step()

    @torch.no_grad()
    def _begin_step(self) -> None:
        self.step += 1
        self._flat.has_read_gradients = False
        self.meter.begin_step(self.step)
        start = self.comm.now()
        self.method.before_step(self)
        self.meter.add_method(self.comm.now() - start)

    @torch.no_grad()
    def _finish_step(self) -> None:
        start = self.comm.now()
        self.method.after_step(self)
        self._watch.after_step(self, trains=self._join is None or not self._join.is_done)
        self.meter.add_method(self.comm.now() - start)
        self.meter.end_step()

    # Ranks that run out of data, inside join().

    def _take_census(self, join: Join) -> None:
        join.take_census(self.method.sent_until(self), self._local_lr())

    def _enter_join(self) -> Join | None:
        """Meets all ranks; returns None where a rank may stop at any time: alone, and with gossip."""
        self._require_running("join()")
        if self.size == 1 or self.comm.can_lose_members:
            return None
        if not all(map(self.method.trains, range(self.size))):
            raise ValueError("join() needs data on every rank, and a dedicated server has none: set dedicated=False")
        self.method.sent_until(self)  # raises if the method does not support it
        self._watch.finish()
        steps = self.comm.meet("join()", self.step)
        if len(set(steps)) > 1:
            raise ValueError(f"all ranks must enter join() after the same number of steps, not {steps}")
        return Join(self._control, self.step)

    @torch.no_grad()
    def _answer_others(self, join: Join) -> None:
        """Takes part in steps without training, until all ranks have run out of data and everything is sent."""
        join.is_done = True
        gradients = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        while True:
            self._watch.finish()  # before waiting for the others: they may have found ranks that differ
            self._take_census(join)
            if join.is_over(self.method.sent_until(self)):
                break
            sent = False
            while not sent:
                sent = self.method.sends(self)
                for parameter in self.parameters:
                    parameter.grad = None
                self._begin_step()
                self._finish_step()
            if join.is_over(self.method.sent_until(self)):
                break
        self.method.drain(self)
        if self.method.steps_alike:
            copy_training_state(self._control, self.x, self.optimizers, join.last_to_train, "the end of join()")
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._changes.end_step()

    def _meet(self, what: str) -> bool:
        """Waits for all ranks between two steps, and compares them. Returns whether all hold the same x."""
        self._require_running(what)
        self._stepping.require_complete(what)
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

    @torch.no_grad()
    def _settle(self, what: str) -> None:
        """Meets all ranks, applies everything in flight, and averages the models."""
        is_equal = self._meet(what)
        # Weights that all ranks have loaded, say the best ones, are the result: messages in flight do not change them.
        agreed = self.x.clone() if is_equal else None
        with self.tracking.verb("drain"):
            self.method.drain(self)
        if agreed is not None:
            self.x.copy_(agreed)
        self._average_model(is_equal)


def _compile_kernels(model: nn.Module, method: Method, device: torch.device, comm: Comm | None) -> None:
    """Compiles what the method needs before this rank connects, so that the others' time-outs do not include it."""
    if device.type == "cpu" and isinstance(method, Method):
        workers = comm.size if comm is not None else expected_size()
        numel = sum(p.numel() for p in model.parameters() if not is_lazy(p))  # lazy ones are rejected later
        kernels.prepare(method.kernels(numel, workers))
