"""Compares the setup of all ranks when training starts, and the setup of a run with that of a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from laconic.comm import Comm
from laconic.comm.finite import raise_together
from laconic.flat import FlatParameters
from laconic.method import Method
from laconic.version import __version__

Fingerprint = dict[str, Any]


def fingerprint(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], flat: FlatParameters, method: Method
) -> Fingerprint:
    """Returns a description of everything that must be equal on all ranks and in a checkpoint.

    The description can be written as JSON. Its fields are in the order in which they are compared, so that the first
    difference is the most telling one.
    """
    # torch.compile prefixes names; a compiled and a bare replica are the same model.
    buffers = {name.replace("_orig_mod.", ""): buffer for name, buffer in model.named_buffers()}
    return {
        "method": type(method).__name__,
        **{f"{type(method).__name__}.{name}": repr(value) for name, value in method.settings().items()},
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
        "number of parameters": len(flat.names),
        "parameters": [
            f"{name} {tuple(p.shape)} {p.dtype}" for name, p in zip(flat.names, flat.parameters, strict=True)
        ],
        "buffers": [f"{name} {tuple(b.shape)} {b.dtype}" for name, b in buffers.items()],
    }


def require_agreement(
    comm: Comm, own: Fingerprint | None, error: Exception | None, finite: bool, what: str = "the start of the worker"
) -> None:
    """Compares the versions of laconic and the fingerprints of all ranks.

    Args:
        comm: the communication with the other ranks.
        own: the fingerprint of this rank; None if it could not be made.
        error: why it could not be made. A rank with an error calls this too, so that the others learn of it.
        finite: whether all parameters of this rank are finite.
        what: names the meeting in error messages.

    Raises:
        ValueError: the ranks differ, or one has an error or parameters that are not finite. The same on every rank.
    """
    described = None if own is None else {"laconic": __version__, **own}
    notes = comm.meet(
        what,
        {"fingerprint": described, "finite": finite, "error": error and f"{type(error).__name__}: {error}"},
    )
    found = error or _disagreement(notes)
    if found is not None:
        raise_together(comm, found)


def _disagreement(notes: Sequence[dict[str, Any]]) -> ValueError | None:
    failed = [f"rank {rank}: {note['error']}" for rank, note in enumerate(notes) if note["error"]]
    if failed:
        return ValueError("; ".join(failed))
    difference = compare([note["fingerprint"] for note in notes])
    if difference:
        return ValueError(f"all ranks must agree on {difference}")
    nonfinite = [str(rank) for rank, note in enumerate(notes) if not note["finite"]]
    if nonfinite:
        return ValueError(f"parameters must be finite, and there are NaNs or infinities on rank {', '.join(nonfinite)}")
    return None


def compare(fingerprints: list[Fingerprint]) -> str | None:
    """Returns the first difference between the ranks' fingerprints as text, or None if they are equal.

    >>> compare([{"method": "LocalSGD", "LocalSGD.period": "4"}, {"method": "LocalSGD", "LocalSGD.period": "8"}])
    'LocalSGD.period: 4 on rank 0; 8 on rank 1'
    """
    for field in fingerprints[0] | {name: None for other in fingerprints for name in other}:
        values = [f.get(field) for f in fingerprints]
        if all(value == values[0] for value in values):
            continue
        lists = [value for value in values if isinstance(value, list)]
        if len(lists) == len(values):
            i = next(i for i in itertools.count() if len({_entry(value, i) for value in lists}) > 1)
            field, values = f"{field}[{i}]", [_entry(value, i) for value in lists]
        by_value: dict[str, list[str]] = {}
        for rank, value in enumerate(values):
            by_value.setdefault(str(value), []).append(str(rank))
        return f"{field}: " + "; ".join(f"{value} on rank {', '.join(ranks)}" for value, ranks in by_value.items())
    return None


def _entry(values: list[str], i: int) -> str:
    return values[i] if i < len(values) else "nothing"
