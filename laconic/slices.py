"""The slice of x that a rank of a node runs its method on, and what is done inside the node around the method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from laconic.comm.coded_mean import split
from laconic.comm.subset import SubsetComm
from laconic.consensus import average_near
from laconic.flat import FlatParameters
from laconic.method import Method
from laconic.nodes import Node
from laconic.replica import FlatReplica, mean_of_counted

# Slices begin at a multiple of this many entries, where there are enough: blocks of quantizers are multiples of it.
UNIT = 64


class NodeSlice:
    """What a method sees of a worker in a node: this rank's slice of x. Implements `laconic.method.Replica`.

    Args:
        worker: the replica of this rank.
        flat: its parameters.
        node: its node.
        averages_itself: whether the model averages its gradients inside the node, as DistributedDataParallel does.

    Attributes:
        own: where the slice is in a vector of the whole model.

    Raises:
        ValueError: the model has fewer entries than the node has ranks.
    """

    def __init__(self, worker: FlatReplica, flat: FlatParameters, node: Node, *, averages_itself: bool) -> None:
        d = flat.x.numel()
        if d < node.size:
            raise ValueError(f"each of the {node.size} ranks of a node needs a slice of x, and x has {d} entries")
        slices = split(0, d, range(node.size), unit=UNIT if d >= UNIT * node.size else 1)
        self._worker, self._flat, self._node, self._averages_itself = worker, flat, node, averages_itself
        self._lengths = [one.numel for one in slices]
        self.own = slice(slices[node.rank].start, slices[node.rank].stop)
        self.comm = node.rail
        self.parameters: list[nn.Parameter] = []
        self.numels: list[int] = []
        ends = torch.tensor([p.numel() for p in flat.parameters]).cumsum(0).tolist()
        for parameter, end in zip(flat.parameters, ends, strict=True):
            inside = min(end, self.own.stop) - max(end - parameter.numel(), self.own.start)
            if inside > 0:
                self.parameters.append(parameter)
                self.numels.append(inside)
        self._packed: Tensor | None = None  # the gradient of all of x (d) and flags, while it is known
        self._message: Tensor | None = None  # the gradient of the slice, and flags
        self._moments: dict[str, Tensor] = {}
        self._gradient_changed = False
        self._gathers = True  # whether the method may change x in this step

    # What methods use.

    @property
    def x(self) -> Tensor:
        return self._flat.x[self.own]

    @property
    def x_and_scalar(self) -> Tensor:
        # The entry after the slice is another rank's, whose value comes back with the next `gather`.
        return self._flat.x_and_scalar[self.own.start : self.own.stop + 1]

    @property
    def step(self) -> int:
        return self._worker.step

    @property
    def lr(self) -> float:
        return self._worker.lr

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self._worker.optimizers

    @property
    def generator(self) -> torch.Generator:
        return self._worker.generator

    @property
    def anyone_done(self) -> bool:
        return self._worker.anyone_done

    @property
    def counted(self) -> list[int]:
        counted = set(self._worker.counted)
        return [index for index, members in enumerate(self._node.layout) if members[self._node.rank] in counted]

    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        result = mean_of_counted(self.comm, self.counted, x, out)
        for name, part in self._moments.items():
            if out is part:
                self.gather(self._worker.moments()[name])
        return result

    def pack_gradient(self) -> Tensor:
        packed = self._pack()
        gradient, flags = packed[self.own], packed[self._flat.x.numel() :]
        if self._message is None:
            self._message = packed.new_empty(gradient.numel() + flags.numel())
        # An average inside the node has made flags fractions.
        return torch.cat([gradient, flags.ceil()], out=self._message)

    def unpack_gradient(self, packed: Tensor) -> None:
        whole = self._pack()
        gradient, flags = packed.tensor_split([self.x.numel()])
        whole[self.own] = gradient
        whole[self._flat.x.numel() :] = flags
        self._gradient_changed = True

    def gradients(self) -> list[Tensor | None]:
        self._gradient_changed = True
        parts = self.views(self._pack()[self.own])
        return [None if p.grad is None else part for p, part in zip(self.parameters, parts, strict=True)]

    def views(self, vector: Tensor) -> list[Tensor]:
        return list(torch.split(vector, self.numels))

    def moments(self) -> dict[str, Tensor]:
        self._moments = {name: vector[self.own] for name, vector in self._worker.moments().items()}
        return self._moments

    def gather_slices(self, values: Sequence[float]) -> list[Sequence[float]]:
        own = torch.tensor(values, dtype=torch.float64)
        return [one.tolist() for one in self._node.notes.all_gather(own)]

    # What the worker calls around the method's hooks.

    def begin_step(self, method: Method) -> None:
        """Averages the gradients inside the node, before `method.before_step`."""
        # Where the method leaves x alone, the same optimizer steps keep x the same on all ranks of the node.
        self._gathers = not method.steps_alike and method.sends(self)
        self._packed, self._gradient_changed = None, False
        local = self._node.local
        if isinstance(local, SubsetComm):
            local.raise_if_failed("the average of gradients inside the node")
        if not self._averages_itself:
            packed = self._pack()
            self._flat.unpack_gradient(local.mean(packed, out=packed))

    def end_before_step(self) -> None:
        """Gathers the slices of the gradient for the optimizer, if the method has read or changed its own."""
        if self._gradient_changed and self._packed is not None:
            self.gather(self._packed[: self._flat.x.numel()])
            self._flat.unpack_gradient(self._packed)

    def end_step(self) -> None:
        """Gathers the slices of x after `method.after_step`, if the method may have changed its own."""
        if self._gathers:
            self.gather(self._flat.x)

    def average(self, reference: Tensor | None) -> None:
        """Replaces x by its mean over all nodes, bit-identical on all ranks. `reference`: as in `average_near`."""
        if reference is None:
            self._node.control.mean(self.x, out=self.x)
        else:
            average_near(self._node.control, self.x, reference, self.step)
        self.gather(self._flat.x)

    def gather(self, vector: Tensor) -> None:
        """Replaces a vector of the whole model (d) by the slices of all ranks of the node, in place."""
        own, size = vector[self.own], self._node.size
        self._node.local.all_to_all_into_async(
            vector, own.repeat(size), received_lengths=self._lengths, sent_lengths=[own.numel()] * size
        ).wait()

    def _pack(self) -> Tensor:
        if self._packed is None:
            self._packed = self._flat.pack_gradient()
        return self._packed
