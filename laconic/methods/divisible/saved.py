"""What Divisible saves, what a saved state must look like, and how the states of n workers become those of m."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laconic.comm.coded_mean import CodedMean, block_of, split
from laconic.comm.saved_mean import seat
from laconic.compress import Compressor, parse
from laconic.forms import Choice, Each, Form, Maybe, Whole, form_of
from laconic.method import mean_of
from laconic.methods.flight import Flight

if TYPE_CHECKING:
    from laconic.methods.divisible import Divisible

NOTHING = Choice((None,))


def collect(method: Divisible) -> dict[str, Any]:
    """Returns what is saved besides the declared fields; waits for messages in flight."""
    stretch, correction, pace = method._stretch, method._correction, method._pace
    return {
        "flights": [flight.state_dict() for flight in method._flights],
        "stretch": None if stretch is None else stretch.state_dict(),
        "correction": None if correction is None else correction.state_dict(),
        "pace": None if pace is None else pace.state_dict(),
    }


def restore(method: Divisible, saved: dict[str, Any]) -> dict[str, Any]:
    """Restores what `collect` returned; returns the declared fields, which are left."""
    own = dict(saved)
    flights = own.pop("flights")
    for name, organ in (("stretch", method._stretch), ("correction", method._correction), ("pace", method._pace)):
        found = own.pop(name)
        if organ is not None:
            organ.load_state_dict(found)
    if own["owner_residual"] is None and method.owner_residual is not None:
        own["owner_residual"] = torch.zeros_like(method.owner_residual)  # with one hop, earlier versions had none
    method._flights = []
    for flight in flights:
        piece = slice(*flight["piece"])
        means = [
            method._background.get(piece, _code(text), method._hops, is_move=i == 0)
            for i, text in enumerate(flight["codes"])
        ]
        method._flights.append(Flight.restore(flight, means, method.x_hat.device))
    return own


def forms(method: Divisible, step: int) -> dict[str, Form]:
    """Returns what a state saved after `step` must look like."""
    stretch, correction, pace = method._stretch, method._correction, method._pace
    flights = Each(NOTHING, most=0)
    d = method.x_hat.numel()
    if method._sends:
        codes = [tuple(None if code is None else str(code) for code in vector) for vector in method._codes()]
        flights = Each(Flight.form(d, step, method._delays[-1], max(method._hop_choices), codes))
    return {
        "next_entry": Whole(0, d - 1),
        "owner_residual": NOTHING if method.owner_residual is None else Maybe(form_of(method.owner_residual)),
        "flights": flights,
        "stretch": NOTHING if stretch is None else stretch.form(),
        "correction": NOTHING if correction is None else correction.form(step),
        "pace": NOTHING if pace is None else pace.form(step),
    }


def check(method: Divisible, saved: dict[str, Any], step: int) -> None:
    """Raises a ValueError if parts that have the right form do not fit together."""
    if method._stretch is not None:
        method._stretch.check_state("method.stretch", saved["stretch"])
    pieces = sorted(flight["piece"] for flight in saved["flights"])
    if any(start >= stop for start, stop in pieces) or any(a[1] > b[0] for a, b in pairwise(pieces)):
        raise ValueError(f"method.flights must be of pieces that do not overlap, not {pieces}")
    hops = _hops(saved)
    for i, flight in enumerate(saved["flights"]):
        piece = slice(*flight["piece"])
        for k, (text, transfer) in enumerate(zip(flight["codes"], flight["transfers"], strict=True)):
            mean = method._background.make(piece, _code(text), hops, is_move=k == 0)
            mean.check_saved(f"method.flights[{i}].transfers[{k}]", transfer, step, bool(flight["answered"]))


def agreed(saved: dict[str, Any]) -> dict[str, Any]:
    """Returns what must be the same on all ranks, besides declared fields."""
    pace, correction = saved["pace"], saved["correction"]
    return {
        "flights": [Flight.agreed(flight, _hops(saved)) for flight in saved["flights"]],
        "pace": pace and {name: value for name, value in pace.items() if name not in ("samples", "has_warned")},
        "correction": correction and [correction["since"], correction["start"]],
    }


def merge(method: Divisible, saved: list[dict[str, Any]]) -> tuple[Tensor, dict[str, Any]]:
    """Returns mean(x) after everything in flight and all owners' residuals, and a state in which x̂ is that too.

    An average in flight moves mean(x) by what its owners' quantization changes: by nothing with one hop, or before the
    second hop, so it is dropped there. Once the second hop has begun it is applied. Corrections start anew, since each
    worker has other data now, and the period is measured anew.
    """
    states, step = [one["method"] for one in saved], max(one["step"] for one in saved)
    x = mean_of([one["x"].double() for one in saved])
    for state in states:
        if state["owner_residual"] is not None:
            x += state["owner_residual"]
    for number, flight in enumerate(states[0]["flights"]):
        if flight["answered"]:
            x[slice(*flight["piece"])] += _answered(flight, [one["flights"][number] for one in states], step)
    stretch, correction, pace = method._stretch, method._correction, method._pace
    return x.to(saved[0]["x"].dtype), {
        "x_hat": x.to(method.x_hat.dtype),
        "next_entry": 0,
        "owner_residual": None if method.owner_residual is None else torch.zeros_like(method.owner_residual),
        "flights": [],
        "stretch": None if stretch is None else stretch.merge([one["stretch"] for one in states]),
        "correction": None if correction is None else correction.merge(step),
        "pace": None if pace is None else pace.merge([one["pace"] for one in states], step),
    }


def _answered(flight: dict[str, Any], of_ranks: list[dict[str, Any]], step: int) -> Tensor:
    """Returns by how much mean(x) moves when the average of this flight, which owners have answered, is applied."""
    piece, code = slice(*flight["piece"]), _code(flight["codes"][0])
    assert code is not None  # there are two hops
    n = len(of_ranks)
    parts = split(piece.start, piece.stop, range(n), unit=block_of(code))
    average, own = torch.zeros(0), []
    for rank, one in enumerate(of_ranks):
        mean = CodedMean(seat(rank, n), parts, code)
        mean.check_saved(f"method.flights of rank {rank}", one["transfers"][0], step, answered=True)
        transfer = mean.restore(one["transfers"][0])
        average = mean.receive(transfer)
        own.append(mean.own(transfer).double())
    return average - mean_of(own)


def _hops(saved: dict[str, Any]) -> int:
    """Returns the hops of the flights in a saved state; earlier versions had owners only where there were two."""
    hops: int = (saved["pace"] or {}).get("hops", 1 if saved["owner_residual"] is None else 2)
    return hops


def _code(text: str | None) -> Compressor | None:
    return None if text is None else parse(text)
