"""Compares the ranks while they train, to notice mistakes that would spoil the result without an error.

Every rank sends four numbers in the background, in one step in 16, and reads those of the others in the next step:
checksums of its optimizer's settings, of x (where the method keeps x equal on all ranks) and of its first gradients,
and the scale of its GradScaler. Where ranks do not step together (gossip), they compare only when they meet: in
`consensus()`, `save()`, `reset()` and at the end.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.comm import Comm, Pending
from laconic.flat import FlatParameters
from laconic.log import warn
from laconic.method import Method, Replica

EVERY = 16  # common steps between two comparisons
EVERY_X = 256  # common steps between two checksums of x: reading all of x costs more than sending a checksum
FIRST_GRADIENTS = 2  # local steps whose gradients are compared
SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum")
CHUNK = 1 << 18  # entries of a checksum's chunk
DEVICE_CHUNK = 1 << 22  # the same on a device, on which each chunk is a few launches
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MULTIPLIER = 0x1E3779B97F4A7C15  # odd, any


class Numbers(NamedTuple):
    """What a rank sends. 0 means: not known, or not to be compared this time."""

    settings: int = 0  # 0: this rank has run out of data, inside join(), and is not compared
    x: int = 0
    gradients: int = 0
    scale: int = 0  # the bits of a float64


class Watch:
    """Compares this rank with the others.

    Args:
        comm: a background channel; only ranks that train are compared.
        method: says in which steps ranks can be compared.
        flat: the trained parameters.
        optimizers: whose settings are compared.
    """

    def __init__(
        self, comm: Comm, method: Method, flat: FlatParameters, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._comm, self._method, self._flat, self._optimizers = comm, method, flat, optimizers
        self._common_steps = 0
        self._local_steps = 0
        self._gradients = 0  # checksum of the first gradients
        self._gradients_compared = comm.size == 1
        self._scale = 0.0  # of the GradScaler that called optimizer.step(), if one did
        self._anyone_scales = False
        self._x = 0  # checksum of x that was taken last, until it is sent
        self._pending: tuple[int, Pending[list[Tensor]], list[str]] | None = None

    def before_step(self, caller: FrameType) -> None:
        """Notes the local gradient of the first steps, and the scale of a GradScaler. `caller`: of the step's hook."""
        if self._comm.size == 1:
            return
        self._local_steps += 1
        if self._local_steps <= FIRST_GRADIENTS:
            found = [p.grad for p in self._flat.parameters if p.grad is not None and p.grad.layout == torch.strided]
            # Gradients that are zero are equal on all ranks without any mistake.
            unknown = self._local_steps > 1 and not self._gradients
            self._gradients = (
                0 if unknown or not any(map(torch.any, found)) else checksum(*found, start=self._gradients)
            )
        scaler = find_grad_scaler(caller)
        self._scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 0.0

    def after_step(self, worker: Replica, *, trains: bool = True) -> None:
        """Reads the numbers sent before, and sends new ones when it is time. Raises as `finish`.

        Args:
            worker: this rank.
            trains: False if this rank has run out of data, inside `worker.join()`.
        """
        if self._comm.size == 1:
            return
        self.finish()
        common = self._method.common(worker)
        if common == "nothing":
            return
        self._common_steps += 1
        if self._common_steps % EVERY != 1 and self._common_steps != FIRST_GRADIENTS and not self._anyone_scales:
            return
        if common == "x" and self._common_steps % EVERY_X == 1:
            # On a device it is read when the next step begins, and sent with the next numbers.
            worker.comm.late.read(_halves(_checksum(self._flat.x)), self._note_x)
        settings = describe(self._optimizers)
        numbers = (
            Numbers()
            if not trains
            else Numbers(
                settings=zlib.crc32(repr(settings).encode()) or 1,
                x=self._x,
                gradients=self._gradients if self._local_steps >= FIRST_GRADIENTS else 0,
                scale=_bits(self._scale),
            )
        )
        self._x = 0
        self._pending = worker.step, self._comm.all_gather_async(torch.tensor(numbers)), settings

    def _note_x(self, halves: Sequence[float]) -> None:
        low, high = map(int, halves)
        self._x = (high << 32 | low) or 1

    def finish(self) -> None:
        """Compares the numbers that were sent last, if there are any.

        Raises:
            ValueError: settings of the optimizer differ; on every rank.
            RuntimeError: x differs, or a GradScaler has skipped a step on some ranks only; on every rank.
        """
        if self._pending is None:
            return
        step, pending, settings = self._pending
        self._pending = None
        numbers = [Numbers(*gathered.tolist()) for gathered in pending.wait()]
        with_data = {rank: n for rank, n in zip(self._comm.members, numbers, strict=True) if n.settings}
        of_trainers = [n for rank, n in with_data.items() if self._method.trains(rank)]
        self._anyone_scales = any(n.scale for n in of_trainers)
        xs = [n.x for n in with_data.values()]
        if len({n.scale for n in of_trainers}) > 1 or len(set(xs)) > 1:
            # No rank raises before all are here: it would break off messages that others still wait for.
            self._comm.meet("ranks that differ")
        if len({n.scale for n in of_trainers}) > 1:
            self._raise_skipped(step, with_data)
        if len({n.settings for n in of_trainers}) > 1:
            notes = self._comm.meet("optimizer settings that differ", settings)
            trainers = {i: rank for i, rank in self._trainers().items() if rank in with_data}
            require_same_settings([step] * len(notes), notes, trainers)
        self._require_same_x(step, xs, list(with_data))
        self._warn_if_equal([n.gradients for n in of_trainers])

    def note(self, worker: Replica) -> dict[str, Any]:
        """Returns what this rank says when all ranks meet, after `finish`."""
        return {
            "step": worker.step,
            "settings": describe(self._optimizers),
            "x": checksum(self._flat.x) if self._comm.size > 1 else 0,
            "gradients": self._gradients if self._local_steps >= FIRST_GRADIENTS else 0,
        }

    def compare(self, notes: Sequence[dict[str, Any]], worker: Replica) -> bool:
        """Compares the notes of all ranks. Raises as `finish`.

        Returns:
            Whether all ranks hold the same x, bit for bit.
        """
        if self._comm.size == 1:
            return True
        require_same_settings([n["step"] for n in notes], [n["settings"] for n in notes], self._trainers())
        if self._method.common(worker) == "x":
            self._require_same_x(worker.step, [n["x"] for n in notes], self._comm.members)
        of_trainers = [n for rank, n in zip(self._comm.members, notes, strict=True) if self._method.trains(rank)]
        self._warn_if_equal([n["gradients"] for n in of_trainers])
        return len({n["x"] for n in notes}) == 1

    def require_same_parameters(self, checksums: Sequence[int], what: str) -> None:
        """Raises a ValueError that names the ranks whose checksum differs."""
        if differing := odd_ones_out(self._comm.members, checksums):
            raise ValueError(
                f"{what} needs the same parameters on all ranks, and those of {differing} differ from the others': "
                f"load the same weights on every rank before"
            )

    def _trainers(self) -> dict[int, int]:
        """The ranks that train, by their index among the members."""
        return {i: rank for i, rank in enumerate(self._comm.members) if self._method.trains(rank)}

    def _require_same_x(self, step: int, checksums: Sequence[int], ranks: Sequence[int]) -> None:
        if differing := odd_ones_out(ranks, checksums):
            raise RuntimeError(
                f"{type(self._method).__name__} keeps the parameters equal on all ranks, and after step {step} those "
                f"of {differing} differ from the others': something changes them there and not elsewhere (weights or "
                f"optimizer state loaded on some ranks only, a hook, settings that differ). Do the same on all ranks, "
                f"and continue from a checkpoint"
            )

    def _raise_skipped(self, step: int, numbers: dict[int, Numbers]) -> None:
        found = ", ".join(
            f"{_float(n.scale):g} on rank {rank}" for rank, n in numbers.items() if self._method.trains(rank)
        )
        raise RuntimeError(
            f"GradScaler must skip the same steps on all ranks, and at step {step} its scale is {found}: a rank has "
            f"skipped a step that others made. Let all ranks skip together (docs/mistakes.md has the lines for it), or "
            f"use bfloat16, which needs no GradScaler"
        )

    def _warn_if_equal(self, gradients: Sequence[int]) -> None:
        if self._gradients_compared or not all(gradients):
            return
        self._gradients_compared = True
        if len(gradients) > 1 and len(set(gradients)) == 1 and self._comm.rank == self._comm.members[0]:
            warn(
                f"the local gradients of all {len(gradients)} ranks were equal, bit for bit, in the first "
                f"{FIRST_GRADIENTS} steps. Either every rank reads the same data: give each its own part, with "
                f"worker.shard(dataset) or torch.utils.data.DistributedSampler. Or the gradients are averaged already, "
                f"by a DistributedDataParallel around this model: train the bare model, or give the worker the wrapper",
                stacklevel=2,
            )


def describe(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Returns the settings of each parameter group that must not differ between ranks.

    >>> describe([torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.5), momentum=0.9)])
    ['lr=0.5 weight_decay=0 momentum=0.9']
    """
    return [
        " ".join(
            # A learning rate may be a tensor.
            f"{name}={float(group[name]) if isinstance(group[name], Tensor) else group[name]}"
            for name in SETTINGS
            if name in group
        )
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def require_same_settings(steps: Sequence[int], settings: Sequence[list[str]], trainers: dict[int, int]) -> None:
    """Raises a ValueError if ranks that have made the same number of steps have different settings.

    Args:
        steps: of each member. With gossip they may differ, and then a schedule gives different learning rates.
        settings: of each member, as `describe` returns them.
        trainers: the ranks that train, by their index among the members.
    """
    for i in trainers:
        if any(steps[j] == steps[i] and settings[j] != settings[i] for j in trainers):
            found = "; ".join(f"rank {rank}: {', '.join(settings[j])}" for j, rank in trainers.items())
            raise ValueError(
                f"all ranks must step with the same optimizer settings, and at step {steps[i]} they differ: {found}. "
                f"Give every rank the same learning rates and the same schedule"
            )


def odd_ones_out(ranks: Sequence[int], checksums: Sequence[int]) -> str:
    """Returns the ranks whose checksum is not the most frequent one, in words; "" if all are equal.

    >>> odd_ones_out([0, 1, 2, 3], [7, 9, 7, 8]), odd_ones_out([0, 1], [7, 7]), odd_ones_out([0, 1], [7, 9])
    ('ranks 1, 3', '', 'rank 1')
    """
    usual = Counter(checksums).most_common(1)[0][0] if checksums else 0
    odd = [str(rank) for rank, found in zip(ranks, checksums, strict=True) if found != usual]
    return f"rank{'s' if len(odd) > 1 else ''} {', '.join(odd)}" if odd else ""


def checksum(*tensors: Tensor, start: int = 0) -> int:
    """Returns 64 bits that depend on every bit and its place; never 0.

    >>> one = torch.tensor([1.0, 2.0])
    >>> checksum(one) == checksum(one.clone()), checksum(one) == checksum(one.flip(0))
    (True, False)
    """
    return int(_checksum(*tensors, start=start)) or 1


def _checksum(*tensors: Tensor, start: int = 0) -> Tensor:
    """Returns the same as `checksum`, or 0, on the tensors' device: the host does not wait for it."""
    # Not by `torch.tensor`, which copies from the host, and waits for the device.
    total = torch.full((), start, dtype=torch.int64, device=tensors[0].device if tensors else None)
    for tensor in tensors:
        most = CHUNK if tensor.device.type == "cpu" else DEVICE_CHUNK
        bits = tensor.detach().contiguous().reshape(-1).view(INTEGERS[tensor.element_size()])
        factors = (torch.arange(min(most, bits.numel()), device=bits.device) * 2 + 1) * MULTIPLIER
        for chunk in torch.split(bits, most):
            # Integers of 64 bits wrap around, so the order of a sum does not matter, and nothing is lost.
            total = total * MULTIPLIER + (chunk * factors[: chunk.numel()]).sum() + 1
    return total


def _halves(number: Tensor) -> Tensor:
    """Returns the lower and the upper 32 bits of an integer of 64 bits, each of which fp64 holds exactly.

    >>> _halves(torch.tensor(-1)), _halves(torch.tensor(7 << 32 | 5))
    (tensor([4294967295,         -1]), tensor([5, 7]))
    """
    return torch.stack([number & 0xFFFFFFFF, number >> 32])


def find_grad_scaler(frame: FrameType | None) -> torch.amp.GradScaler | None:
    """Returns the GradScaler whose `step()` called this frame, at most a few calls above."""
    for _ in range(8):  # hooks and schedulers wrap optimizer.step()
        if frame is None:
            return None
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler: torch.amp.GradScaler = frame.f_locals["self"]
            return scaler
        frame = frame.f_back
    return None


def _bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _float(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
