"""Runs one replica's part in the training: its start, its steps, its meetings with the other ranks, its end."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from laconic import kernels
from laconic.agreement import Fingerprint, fingerprint, require_agreement
from laconic.changes import Changes
from laconic.comm import Comm, connect, expected_size
from laconic.comm.finite import is_finite
from laconic.consensus import average_model, average_near, copy_from_rank_0
from laconic.flat import FlatParameters
from laconic.join import Join, copy_training_state
from laconic.method import Method, Replica, fresh
from laconic.nodes import Node, Nodes, find_node
from laconic.replica import FlatReplica
from laconic.slices import NodeSlice
from laconic.stepping import Stepping
from laconic.tracking import Dashboard, Tracking
from laconic.watch import Watch
from laconic.wrappers import BareModel


class RunningReplica(FlatReplica):
    """A replica that trains with the others. `laconic.Worker` adds what users call, and documents the arguments."""

    consensus_distance: float | None = None
    node: Node | None = None
    _slice: NodeSlice | None = None

    def __init__(
        self,
        bare: BareModel,
        optimizers: list[torch.optim.Optimizer],
        method: Method,
        timeout: float,
        seed: int,
        comm: Comm | None,
        dashboard: int | str | None,
        local: dist.ProcessGroup | None,
        nodes: Nodes,
    ) -> None:
        self._bare, self.model, self.optimizers = bare, bare.module, optimizers
        device = next(self.model.parameters(), torch.empty(0)).device
        _compile_kernels(self.model, method, device, comm)
        self.comm = comm or connect(device, timeout)
        self.step = 0
        self.generator = torch.Generator().manual_seed(seed)
        self._shown: Literal["", "consensus()", "agreed()"] = ""  # whose model stands in the place of the local one
        self._end: Literal["no", "done", "failed"] = "no"
        self.tracking = Tracking(self)
        try:
            asked = "local" if local is not None else nodes
            same = {"dashboard": dashboard, "nodes": asked}
            self.method, self._flat, self.fingerprint = self._flatten(method, "the start of the worker", same)
            self.node = self._find_node(local, nodes, device) if asked else None
            self.fingerprint["ranks per node"] = self.node.size if self.node is not None else 1
            self._control = self.comm.channel("control")
            copy_from_rank_0(self._control, self.model, self._flat)
            self._slice = self._make_slice()
            self.method.setup(self.seen)
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

    def _find_node(self, local: dist.ProcessGroup | None, nodes: Nodes, device: torch.device) -> Node | None:
        why = self.method.unsliceable()
        if why is not None:
            raise ValueError(
                f"{type(self.method).__name__} cannot divide x between the ranks of a node: {why}. Or use another "
                f"method, or every rank as a worker of its own (without local and nodes)"
            )
        node = find_node(self.comm, local, nodes, device, self._bare)
        if node is None and self._bare.averages and self.size > 1:
            raise ValueError(
                "every node is one rank, so DistributedDataParallel has nothing to average: pass the bare module, or "
                "leave out local and nodes"
            )
        return node

    def _make_slice(self) -> NodeSlice | None:
        if self.node is None:
            return None
        return NodeSlice(self, self._flat, self.node, averages_itself=self._bare.averages)

    @property
    def seen(self) -> Replica:
        """What the method sees: this worker, or in a node this rank's slice of it."""
        return self if self._slice is None else self._slice

    def _flatten(
        self, method: Method, what: str, same: Mapping[str, object] | None = None
    ) -> tuple[Method, FlatParameters, Fingerprint]:
        """Flattens the parameters and compares this rank with the others, at the meeting `what`.

        A rank whose model or method is unfit reports its error to the others before it raises. `same`: arguments of the
        worker that must be the same on all ranks.
        """
        dashboard = same["dashboard"] if same is not None else None
        try:
            method = fresh(method)
            flat = FlatParameters(self.model, self.optimizers)
            method.resolve(flat.x)
            if isinstance(dashboard, int | str):
                self.tracking.dashboard = Dashboard(self, dashboard)
        except ValueError as error:
            require_agreement(self.comm, None, error, finite=True, what=what)
            raise
        own = fingerprint(self.model, self.optimizers, flat, method)
        require_agreement(self.comm, own | dict(same or {}), None, is_finite(flat.x), what)
        return method, flat, own

    def _require_running(self, what: str) -> None:
        if self._end != "no":
            raise RuntimeError(f"{what} is for a worker that has not ended, and this one has: create another Worker")
        if self._join is not None:
            raise RuntimeError(
                f"{what} at step {self.step} needs all ranks, and inside join() those that have run out of data would "
                f"not come: do it after the join() block"
            )

    def _require_local_model(self, what: str) -> None:
        if self._shown:
            raise RuntimeError(f"{what} must not be called inside {self._shown}: its changes would be lost")

    # One step: the optimizers' pre-step hooks, the optimizers themselves, their post-step hooks.

    def _check_step(self) -> None:
        self._require_local_model("optimizer.step()")
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
        if self.seen.comm.can_lose_members or not all(map(self.method.trains, range(self.size))):
            raise RuntimeError(
                f"{type(self.method).__name__} cannot take up {what}: close this worker and create another one on all "
                f"ranks, after unfreezing or adding them"
            )
        self._settle(what)
        size = self.fingerprint["ranks per node"]
        _, self._flat, self.fingerprint = self._flatten(self.method, what)
        self.fingerprint["ranks per node"] = size
        copy_from_rank_0(self._control, self.model, self._flat)
        self._moment_names = None
        self._slice = self._make_slice()
        self.method.setup(self.seen)
        self.method.reset(self.seen)
        self._watch = Watch(self._control, self.method, self._flat, self.optimizers)
        self._changes = Changes(self.model, self._flat, self.method)

    def _begin(self, caller: FrameType) -> bool:
        self.comm.computed()
        with self.tracking.verb("before_step"):
            self.seen.comm.late.receive()  # before the method decides anything
            self._watch.before_step(caller)
            if self._join is not None:
                self._join.last = self.step + 1
                # The ranks of a node average their gradients in every step, so they must know who is done.
                if self.node is not None or self.method.sends(self.seen):
                    self._take_census(self._join)
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
        self._flat.has_read_gradients = False
        self.meter.begin_step(self.step + 1)
        start = self.comm.now()
        if self._slice is not None:
            self._slice.begin_step(self.method)
        self.step += 1
        self.method.before_step(self.seen)
        if self._slice is not None:
            self._slice.end_before_step()
        self.meter.add_method(self.comm.now() - start)

    @torch.no_grad()
    def _finish_step(self) -> None:
        start = self.comm.now()
        self.method.after_step(self.seen)
        if self._slice is not None:
            self._slice.end_step()
        self._watch.after_step(self.seen, trains=self._join is None or not self._join.is_done)
        self.seen.comm.late.send()
        self.meter.add_method(self.comm.now() - start)
        self.meter.end_step()

    # Ranks that run out of data, inside join().

    def _take_census(self, join: Join) -> None:
        join.take_census(self.method.sent_until(self.seen), self._local_lr())
        if self.node is not None:
            self.node.require_same_ends(join.lasts)

    def _enter_join(self) -> Join | None:
        """Meets all ranks; returns None where a rank may stop at any time: alone, and with gossip."""
        self._require_running("join()")
        if self.size == 1 or self.seen.comm.can_lose_members:
            return None
        if not all(map(self.method.trains, range(self.size))):
            raise ValueError("join() needs data on every rank, and a dedicated server has none: set dedicated=False")
        self.method.sent_until(self.seen)  # raises if the method does not support it
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
            if join.is_over(self.method.sent_until(self.seen)):
                break
            sent = False
            while not sent:
                self.seen.comm.late.receive()
                sent = self.node is not None or self.method.sends(self.seen)
                for parameter in self.parameters:
                    parameter.grad = None
                self._begin_step()
                self._finish_step()
            if join.is_over(self.method.sent_until(self.seen)):
                break
        self._drain()
        if self.method.steps_alike:
            copy_training_state(self._control, self.x, self.optimizers, join.last_to_train, "the end of join()")
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._changes.end_step()

    def _meet(self, what: str) -> bool:
        """Waits for all ranks between two steps, and compares them. Returns whether all hold the same x."""
        self._require_running(what)
        if self._shown:
            raise RuntimeError(f"{what} needs the local model, so it must not be called inside {self._shown}")
        self._stepping.require_complete(what)
        self._watch.finish()
        self._pause()
        is_equal = self._watch.compare(self.comm.meet(what, self._watch.note(self.seen)), self.seen)
        self._changes.check(self.step, self.size, is_agreed=is_equal)
        return is_equal

    @torch.no_grad()
    def _pause(self) -> None:
        self.seen.comm.late.flush()
        self.method.pause(self.seen)

    def _trainers(self) -> list[int]:
        return [rank for rank in self.comm.members if self.method.trains(rank)]

    def _weight(self) -> float:
        """Returns how often this rank's values count in a mean over all members that stands for one over trainers."""
        trainers = self._trainers()
        return len(self.comm.members) / len(trainers) if self.rank in trainers else 0.0

    def _average_model(self, is_equal: bool, *, exact: bool = True) -> None:
        """Averages the models. Unless `exact`, differences to the method's reference are quantized, if it has one."""
        reference = None if exact or is_equal else self.method.reference()
        tensors = [self.x, *self.model.buffers()]
        local = [tensor.clone() for tensor in tensors] if self.comm.can_lose_members else []

        def average() -> None:
            for tensor, value in zip(tensors, local, strict=False):
                tensor.copy_(value)  # in case an attempt has failed
            if self._slice is not None and not is_equal:
                self._slice.average(reference)
            elif reference is not None:
                average_near(self._control, self.x, reference, self.step)
            average_model(
                self._control,
                self.model,
                self.x,
                self._trainers(),
                self._weight(),
                is_equal=is_equal or self._slice is not None or reference is not None,
            )

        with torch.no_grad():
            self._control.among_members("the average of all models", average)

    def _drain(self) -> None:
        self.method.drain(self.seen)
        if self._slice is not None:
            self._slice.gather(self.x)

    @torch.no_grad()
    def _settle(self, what: str) -> None:
        """Meets all ranks, applies everything in flight, and averages the models."""
        is_equal = self._meet(what)
        # Weights that all ranks have loaded, say the best ones, are the result: messages in flight do not change them.
        agreed = self.x.clone() if is_equal else None
        with self.tracking.verb("drain"):
            self._drain()
            self.seen.comm.late.flush()
        if agreed is not None:
            self.x.copy_(agreed)
        self._average_model(is_equal)


def _compile_kernels(model: nn.Module, method: Method, device: torch.device, comm: Comm | None) -> None:
    """Compiles what the method needs before this rank connects, so that the others' time-outs do not include it."""
    if device.type == "cpu" and isinstance(method, Method):
        workers = comm.size if comm is not None else expected_size()
        numel = sum(p.numel() for p in model.parameters() if not is_lazy(p))  # lazy ones are rejected later
        kernels.prepare(method.kernels(numel, workers))
