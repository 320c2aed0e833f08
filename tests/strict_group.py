"""A process group of the fake device that allows what NCCL's allows, and no more.

- It takes tensors of the device only.
- Operations run one after the other, on a stream of their own. `wait()` orders the caller's stream behind them.
- A wait with a time-out is an error, and so is every operation after it: NCCL's blocks the host, and breaks the
  communicator when the time is over.
- send and recv outside of `batch_isend_irecv` are an error: two ranks that both receive first would wait for ever.
- Two threads must not use it at the same time.
- An operation must not begin while another group's has not been waited for: their kernels occupy the device until the
  other ranks' have come, and ranks may run them in different orders.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tests import fake_device

_batch = threading.local()
_in_flight: weakref.WeakSet[StrictWork] = weakref.WeakSet()  # of all groups, until the first wait


class StrictWork(dist.Work):
    """An operation of a `StrictGroup`."""

    def __init__(self, group: StrictGroup, device: torch.device, run: Callable[[], None]) -> None:
        super().__init__()
        self.group, self._device, self._run = group, device, run
        self._launched = torch.accelerator.current_stream(device).record_event()
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Called by the group's thread, whose stream stands for NCCL's."""
        try:
            torch.accelerator.current_stream(self._device).wait_event(self._launched)
            self._run()
        except BaseException as error:  # noqa: BLE001  raised again by `wait`
            self._error = error
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:  # torch passes 0 for none
            self.group.broken = "a timed wait"
            raise RuntimeError("a timed wait breaks the communicator")
        _in_flight.discard(self)
        # The fake device's kernels run when they are launched, so the stream can only wait by its host's waiting.
        self._over.wait()
        if self._error is not None:
            raise self._error
        return True


class StrictGroup(dist.ProcessGroup):
    """Does the device's operations by gloo, on copies that a thread of the group makes."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.broken: str | None = None
        self.timeout = timeout
        self._connect = lambda: dist.ProcessGroupGloo(store, rank, size, timeout)
        self._user = threading.get_ident()
        self._works: queue.Queue[StrictWork] = queue.Queue()
        threading.Thread(target=self._serve, name="strict-group", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._works.get().run()

    @functools.cached_property
    def _gloo(self) -> Any:
        return self._connect()  # in the first operation, as NCCL

    def getBackendName(self) -> str:
        return "strict"

    def abort(self) -> None:
        self.broken = "an abort"

    # torch keeps the name in the backends of a group, and this one has none.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _start(self, tensors: list[Tensor], run: Callable[[], None]) -> StrictWork:
        if self.broken:
            raise RuntimeError(f"the communicator was broken by {self.broken}")
        if threading.get_ident() != self._user:
            raise RuntimeError("two threads use the communicator")
        if foreign := [str(tensor.device) for tensor in tensors if tensor.device.type != "fake"]:
            raise RuntimeError(f"No backend type associated with device type {foreign[0]}")
        if any(work.group is not self for work in _in_flight):
            raise RuntimeError("operations of two communicators are in flight at the same time")
        work = StrictWork(self, tensors[0].device, run)
        _in_flight.add(work)
        self._works.put(work)
        return work

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> StrictWork:  # type: ignore[override]
        (tensor,) = tensors
        assert opts.reduceOp == dist.ReduceOp.AVG

        def run() -> None:
            tensor.copy_(torch.stack(self._gather(tensor)).mean(0))

        return self._start(tensors, run)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.cpu()
        gathered = [torch.empty_like(own) for _ in range(self.size())]
        self._gloo.allgather([gathered], [own]).wait()
        return gathered

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> StrictWork:
        def run() -> None:
            for output, part in zip(outputs[0], self._gather(inputs[0]), strict=True):
                output.copy_(part)

        return self._start([*outputs[0], *inputs], run)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> StrictWork:  # type: ignore[override]
        (tensor,) = tensors

        def run() -> None:
            host = tensor.cpu()
            self._gloo.broadcast([host], opts).wait()
            tensor.copy_(host)

        return self._start(tensors, run)

    def all_to_all_single(
        self, output: Tensor, sent: Tensor, output_splits: list[int], sent_splits: list[int], opts: Any = None
    ) -> StrictWork:
        def run() -> None:
            arrived = torch.empty(output.shape, dtype=output.dtype)
            self._gloo.alltoall_base(arrived, sent.cpu(), output_splits, sent_splits).wait()
            output.copy_(arrived)

        return self._start([output, sent], run)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> StrictWork:
        _require_batch("send")
        # Both halves of a batch go at the same time.
        return self._start(tensors, lambda: _batch_sent.append(self._gloo.send([tensors[0].cpu()], peer, tag)))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> StrictWork:
        _require_batch("recv")

        def run() -> None:
            host = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)
            self._gloo.recv([host], peer, tag).wait()
            tensors[0].copy_(host)

        return self._start(tensors, run)


_batch_sent: list[Any] = []  # kept, since gloo needs the tensors


class KeptGloo(dist.ProcessGroupGloo):
    """A gloo group that lives as long as the process.

    A backend that is written in Python takes the place of the whole group, and torch drops the gloo group that it has
    made for host memory beside it. A rank that drops it early closes the connections of others that are still opening.
    """

    _all: ClassVar[list[KeptGloo]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._all.append(self)


def _require_batch(verb: str) -> None:
    if not getattr(_batch, "is_open", False):
        raise RuntimeError(f"{verb} outside of batch_isend_irecv waits for ever if both ranks receive first")


def register() -> None:
    """Makes the strict group the fake device's backend, in this process."""
    fake_device.load()
    if hasattr(dist.Backend, "STRICT"):
        return
    dist.Backend.register_backend("strict", StrictGroup, devices=["fake"])
    dist.distributed_c10d.ProcessGroupGloo = KeptGloo  # type: ignore[misc]
    in_batch = dist.batch_isend_irecv

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        _batch.is_open = True
        try:
            # Sends first: the group's thread does one after the other.
            return in_batch(sorted(operations, key=lambda operation: operation.op is dist.irecv))
        finally:
            _batch.is_open = False

    dist.batch_isend_irecv = batch_isend_irecv  # type: ignore[assignment]
