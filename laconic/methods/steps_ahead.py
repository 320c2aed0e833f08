"""Local steps that are ahead of their means, so that the exchange overlaps with the computing of later steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.comm.coded_mean import CodedMean
from laconic.forms import Each, Fields, Form, form_of
from laconic.methods.flight import Flight

HOPS = 2  # to the owners, and back


class StepsAhead:
    """Keeps a worker at x_i = base + its local steps whose means have not arrived, and the messages in flight.

    A step that is sent in step t is replaced by its mean in step t + delay. Owners answer half-way. Vectors are in the
    order that the means have.

    Args:
        x: the parameters at the start (d).
        pieces: the entries of each chunk.
        means: of the chunks.
        delay: at least 1.

    Attributes:
        base: x with all means that have arrived, bit-identical on all ranks (d).
        steps: the local steps that their means will replace (delay, d); that of step t is row t % delay.
    """

    def __init__(self, x: Tensor, pieces: Sequence[slice], means: Sequence[CodedMean], delay: int) -> None:
        self.base, self.steps = x.clone(), x.new_zeros(delay, x.numel())
        self._pieces, self._means, self._delay = pieces, means, delay
        self._flights: list[Flight] = []
        self._first_wait = -(-delay // HOPS)

    def advance(self, step: int) -> None:
        """Waits for the messages that are due in this step, and adds the means that have arrived to `base`."""
        for flight in self._flights:
            if flight.due <= step and flight.has_hops_left:
                flight.answer()
                flight.due += self._delay - self._first_wait
        for flight in self._flights:
            if flight.due <= step:
                for piece, mean, transfer in zip(self._pieces, self._means, flight.transfers, strict=True):
                    self.base[piece] += mean.receive(transfer)
        self._flights = [flight for flight in self._flights if flight.due > step]

    def send(self, step: int, counted: Sequence[int]) -> None:
        """Starts to send the local step that the caller has written to `steps[step % delay]`."""
        u = self.steps[step % self._delay]
        transfers = [
            mean.send(u[piece], step=step, counted=counted)
            for piece, mean in zip(self._pieces, self._means, strict=True)
        ]
        self._flights.append(Flight(slice(0, u.numel()), step + self._first_wait, self._means, transfers))

    def write_x(self, out: Tensor) -> None:
        """Writes base + Σ steps to `out` (d)."""
        torch.add(self.base, self.steps[0], out=out)
        for u in self.steps[1:]:
            out += u

    def drain(self) -> None:
        """Applies everything in flight; then x is `base`, on all ranks."""
        while self._flights:
            self.advance(max(flight.due for flight in self._flights))
        self.steps.zero_()

    def reset(self, x: Tensor) -> None:
        for flight in self._flights:
            flight.wait()  # the network may still write to its buffers
        self._flights = []
        self.base.copy_(x)
        self.steps.zero_()

    # What is saved.

    def state_dict(self) -> dict[str, Any]:
        """Waits for the messages in flight and returns them with the rest."""
        flights = [flight.state_dict() for flight in self._flights]
        return {"base": self.base, "steps": self.steps, "flights": flights}

    def form(self, step: int) -> Form:
        codes = [(str(mean.compressor),) for mean in self._means]
        flight = Flight.form(self.base.numel(), step, self._delay, HOPS, codes)
        forms = {"base": form_of(self.base), "steps": form_of(self.steps), "flights": Each(flight, most=self._delay)}
        return Fields(forms)

    def check(self, saved: dict[str, Any], step: int) -> None:
        """Raises a ValueError if messages of the saved flights, which have the `form`, are not valid codes."""
        for i, flight in enumerate(saved["flights"]):
            if flight["piece"] != [0, self.base.numel()]:
                raise ValueError(f"method.ahead.flights[{i}].piece must be {[0, self.base.numel()]}")
            for j, (mean, transfer) in enumerate(zip(self._means, flight["transfers"], strict=True)):
                where = f"method.ahead.flights[{i}].transfers[{j}]"
                mean.check_saved(where, transfer, step, answered=bool(flight["answered"]))

    @staticmethod
    def agreed(saved: dict[str, Any]) -> dict[str, Any]:
        """Returns the part of a saved state that is the same on all ranks."""
        flights = [{name: flight[name] for name in ("due", "answered", "codes")} for flight in saved["flights"]]
        return {"base": saved["base"], "flights": flights}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.base.copy_(saved["base"])
        self.steps.copy_(saved["steps"])
        self._flights = [Flight.restore(flight, self._means, self.base.device) for flight in saved["flights"]]
