"""Numbers of a device that decide what the host does, read without making the host wait for the step they belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

Action = Callable[[Sequence[float]], None]


class Late:
    """Collects numbers in a step, copies them to the host in one piece, and acts on them when the next step begins.

    By then the device is busy with the next forward and backward pass, so it does not wait for the host, and the method
    has not yet done anything in the next step: it decides as if it had known the numbers at once. Numbers of the CPU
    are acted on at once. Actions come in the order of `read`, the same on all ranks.

    >>> found = []
    >>> Late().read(torch.tensor([1.0, 2.0]), found.extend)
    >>> found
    [1.0, 2.0]
    """

    def __init__(self) -> None:
        self._asked: list[tuple[Tensor, Action]] = []
        self._copied: list[tuple[Tensor, torch.Event, list[tuple[Tensor, Action]]]] = []

    def read(self, numbers: Tensor, action: Action) -> None:
        """Calls `action` with the numbers: at once on the CPU, otherwise in the next `receive`."""
        if numbers.device.type == "cpu":
            action(numbers.reshape(-1).tolist())
        else:
            self._asked.append((numbers.detach().reshape(-1).to(torch.float64), action))

    def send(self) -> None:
        """Starts the copy of all numbers that were asked for, at the end of a step."""
        if not self._asked:
            return
        asked, self._asked = self._asked, []
        numbers = torch.cat([number for number, _ in asked])
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.accelerator.current_stream(numbers.device).record_event()
        self._copied.append((host, event, asked))

    def receive(self) -> None:
        """Acts on the numbers that were sent before. This is the one time in a step that the host waits."""
        copied, self._copied = self._copied, []
        for host, event, asked in copied:
            event.synchronize()
            values = iter(host.tolist())
            for numbers, action in asked:
                action(list(islice(values, len(numbers))))

    def forget(self) -> None:
        """Drops everything that was asked for: its actions would be about an earlier state."""
        self._asked, self._copied = [], []

    def flush(self) -> None:
        """Acts on everything now: before ranks meet, save or end."""
        while self._asked or self._copied:
            self.send()
            self.receive()
