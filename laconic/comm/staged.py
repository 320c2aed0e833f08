"""Verbs for tensors of a device over channels of host memory: through pinned buffers, on streams of their own.

For background channels of every device, so that their messages use the same wires as on the CPU, and for the
foreground of devices for which torch.distributed has no backend.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from laconic.comm.bulletin import Bulletin
from laconic.comm.checks import check_buffers
from laconic.comm.comm import Comm, PeerError, Pending
from laconic.comm.gossip import Gossip, Talk
from laconic.topology import Topology

CPU = torch.device("cpu")

T = TypeVar("T")
U = TypeVar("U")


class StagedComm(Comm):
    """Carries tensors of a device over a channel of host memory.

    What a verb sends is copied to a pinned buffer on a stream of this channel's own, behind the kernels that compute
    it. A thread waits for the copy and starts the message, so neither the worker nor the device's other streams wait.
    The wait for a result copies it to the device, on the caller's stream. Tensors of the host take no detour.

    Args:
        channel: of host memory. Its messages must move while the worker computes.
        device: of the tensors.
        timeout: seconds in which the device must have computed what is sent.

    Attributes:
        channel_of_host: the channel.
    """

    def __init__(self, channel: Comm, device: torch.device, timeout: float) -> None:
        self.rank, self.size, self.meter, self.late = channel.rank, channel.size, channel.meter, channel.late
        self.channel_of_host, self._device, self._timeout = channel, device, timeout
        self._stream = new_stream(device)
        self._messages: queue.Queue[_Message[Any, Any] | None] = queue.Queue()
        self._last: _Message[Any, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="laconic-staging", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._device.index is not None:
            torch.accelerator.set_device_index(self._device.index)
        while (message := self._messages.get()) is not None:
            message.start()

    def stop(self) -> None:
        """Ends the thread, after the messages that are still to be started."""
        self._messages.put(None)
        self._thread.join()

    @property
    def members(self) -> list[int]:
        return self.channel_of_host.members

    def mean(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        if self._is_of_host(x):
            return self.channel_of_host.mean(x, out=out)
        host = self._fetch(x)
        return _landed(self.channel_of_host.mean(host, out=host), x, out)

    def mean_async(self, x: Tensor, *, out: Tensor | None = None) -> Pending[Tensor]:
        if self._is_of_host(x):
            return self.channel_of_host.mean_async(x, out=out)
        return self._stage(
            "mean",
            x if out is x else x.clone(),
            lambda host: self.channel_of_host.mean_async(host, out=host),
            lambda mean: _landed(mean, x, out),
        )

    def all_gather_async(self, x: Tensor) -> Pending[list[Tensor]]:
        if self._is_of_host(x):
            return self.channel_of_host.all_gather_async(x)

        def land(parts: list[Tensor]) -> list[Tensor]:
            host = torch.empty(len(parts), *x.shape, dtype=x.dtype, pin_memory=True)
            return list(_landed(torch.stack(parts, out=host), x.new_empty(host.shape), None).unbind())

        return self._stage("all_gather", x.detach().clone(), self.channel_of_host.all_gather_async, land)

    def all_to_all_into_async(
        self, received: Tensor, sent: Tensor, *, received_lengths: Sequence[int], sent_lengths: Sequence[int]
    ) -> Pending[None]:
        if self._is_of_host(sent):
            return self.channel_of_host.all_to_all_into_async(
                received, sent, received_lengths=received_lengths, sent_lengths=sent_lengths
            )
        check_buffers(received, sent, received_lengths, sent_lengths, self.members.index(self.rank), len(self.members))
        arriving = torch.empty(received.shape, dtype=received.dtype, pin_memory=True)

        def land(_: None) -> None:
            received.copy_(arriving, non_blocking=True)

        return self._stage(
            "all_to_all",
            sent,
            lambda host: self.channel_of_host.all_to_all_into_async(
                arriving, host, received_lengths=received_lengths, sent_lengths=sent_lengths
            ),
            land,
        )

    def broadcast_async(self, x: Tensor, *, root: int = 0, out: Tensor | None = None) -> Pending[Tensor]:
        if self._is_of_host(x):
            return self.channel_of_host.broadcast_async(x, root=root, out=out)
        return self._stage(
            "broadcast",
            x if out is x else x.clone(),
            lambda host: self.channel_of_host.broadcast_async(host, root=root, out=host),
            lambda result: _landed(result, x, out),
        )

    def exchange(self, x: Tensor, peer: int) -> Tensor:
        if self._is_of_host(x):
            return self.channel_of_host.exchange(x, peer)
        received = self.channel_of_host.exchange(self._fetch(x), peer)
        return _landed(_pinned(received).copy_(received), x, None)

    def _is_of_host(self, x: Tensor) -> bool:
        """Returns whether x takes no detour; if so, all messages before it have been started."""
        if x.device.type != "cpu":
            return False
        self._start_all()
        return True

    def _copy(self, x: Tensor) -> tuple[Tensor, torch.Event]:
        """Starts a copy to a pinned buffer. Returns the buffer, and when it is filled."""
        host = _pinned(x)
        self._stream.wait_stream(torch.accelerator.current_stream(x.device))
        with self._stream:
            host.copy_(x, non_blocking=True)
        return host, self._stream.record_event()

    def _fetch(self, x: Tensor) -> Tensor:
        """Returns x in host memory, when all messages before it have been started."""
        host, filled = self._copy(x.detach().contiguous())
        self._start_all()
        filled.synchronize()
        return host

    def _start_all(self) -> None:
        if self._last is not None:
            self._last.await_start()

    def _stage(
        self, verb: str, x: Tensor, launch: Callable[[Tensor], Pending[T]], land: Callable[[T], U]
    ) -> Pending[U]:
        """Starts a message when the device has computed x.

        Args:
            verb: its name in error messages.
            x: what is sent. It must not change before the result has arrived.
            launch: starts the message, with x in host memory.
            land: called with the message's result, returns that on the device.
        """
        x = x.detach().contiguous()
        host, filled = self._copy(x)
        doing = f"rank {self.rank}: {verb} at step {self.meter.step}"
        self._last = _Message(doing, self._timeout, x, host, filled, launch, land)
        self._messages.put(self._last)
        return self._last

    def gossip(self, topology: Topology, talk: Talk) -> Gossip:
        return self.channel_of_host.gossip(topology, talk)

    def channel(self, name: str = "background") -> Comm:
        return self.channel_of_host.channel(name)

    def meet(self, what: str, note: Any = None) -> list[Any]:
        return self.channel_of_host.meet(what, note)

    def bulletin(self, name: str) -> Bulletin:
        return self.channel_of_host.bulletin(name)

    @property
    def can_lose_members(self) -> bool:
        return self.channel_of_host.can_lose_members

    def among_members(self, what: str, operation: Callable[[], T]) -> T:
        return self.channel_of_host.among_members(what, operation)

    def now(self) -> float:
        return self.channel_of_host.now()

    def fail(self, error: BaseException) -> None:
        self.channel_of_host.fail(error)

    def close(self) -> None:
        self.stop()
        self.channel_of_host.close()


class _Message(Pending[U], Generic[T, U]):
    """A message that a thread starts when the device has written it. `StagedComm._stage` documents the arguments."""

    def __init__(
        self,
        doing: str,
        timeout: float,
        x: Tensor,
        host: Tensor,
        filled: torch.Event,
        launch: Callable[[Tensor], Pending[T]],
        land: Callable[[T], U],
    ) -> None:
        self._doing, self._timeout, self._x, self._host, self._filled = doing, timeout, x, host, filled
        self._launch, self._land = launch, land
        self._started = threading.Event()
        self._pending: Pending[T] | None = None
        self._error: BaseException | None = None
        self._result: list[U] = []

    def start(self) -> None:
        """Called by the thread."""
        try:
            self._filled.synchronize()
            self._pending = self._launch(self._host)
        except BaseException as error:  # noqa: BLE001  raised again by `wait`
            self._error = error
        del self._x, self._host  # what the message needs, it refers to itself
        self._started.set()

    def await_start(self) -> None:
        if not self._started.wait(self._timeout):
            raise PeerError(f"{self._doing}: the device has not computed what is sent for {self._timeout:g} s")

    def wait(self) -> U:
        if not self._result:
            self.await_start()
            if self._error is not None:
                raise self._error
            assert self._pending is not None
            self._result = [self._land(self._pending.wait())]
        return self._result[0]


class Baton:
    """Orders what two threads do on a device, each on its own stream, while only one of them holds a lock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.Event | None = None

    def take(self) -> None:
        """Makes the current stream wait for all that was done under the lock before. Called with the lock held."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)

    def give(self) -> None:
        """Called before the lock is released."""
        if self._device.type != "cpu":
            self._event = torch.accelerator.current_stream(self._device).record_event()


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Makes a thread use a device, on a stream of its own: otherwise it would use device 0, and others' stream."""
    if device.type == "cpu":
        yield
        return
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    with new_stream(device):
        yield


def new_stream(device: torch.device) -> torch.Stream:
    """Returns a new stream of a device, or the only one that it has (MPS)."""
    return torch.accelerator.current_stream(device) if device.type == "mps" else torch.Stream(device)


def _pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)


def _landed(host: Tensor, like: Tensor, out: Tensor | None) -> Tensor:
    """Returns a pinned tensor on the device of `like`, in `out` if it is given."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format) if out is None else out
    return out.copy_(host, non_blocking=True)
