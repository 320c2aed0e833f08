"""Gossip by two threads: one makes the exchanges, the other waits to be woken up by neighbours."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

import torch
from torch import Tensor
from typing_extensions import Self

from laconic.comm.comm import PeerError
from laconic.comm.finite import check_gossip
from laconic.comm.gossip import Gossip, Talk
from laconic.comm.meter import Meter
from laconic.comm.pairing import Demand, Dropped, Need, Pairing, wakeup_key
from laconic.comm.register import CHECK_SECONDS, first_line, heartbeat_key
from laconic.comm.staged import CPU, Baton, own_stream
from laconic.comm.store import JobStore, StoreGone
from laconic.comm.wire import Connector, Wire, WireError
from laconic.log import warn
from laconic.ranges import span
from laconic.topology import Topology


class BackgroundGossip(Gossip):
    """Implements `Gossip` over the job's store, which pairs workers, and TCP connections of its own."""

    def __init__(
        self,
        store: JobStore,
        topology: Topology,
        rank: int,
        talk: Talk,
        meter: Meter,
        timeout: float,
        device: torch.device = CPU,
    ) -> None:
        self.topology, self.exchanges, self.partners = topology, 0, Counter()
        self._graph, self._rank, self._talk, self._meter, self._timeout = topology, rank, talk, meter, timeout
        self._lock = threading.Lock()  # held by the training thread inside `with`, or by a part of a dialogue
        self._device, self._baton = device, Baton(device)
        self._wires = PeerWires(store.clone(), rank, timeout, self._check_peer, pins=device.type != "cpu")
        self._store = store.clone()
        self._pairing = Pairing(self._store, topology, rank)
        self._last_heartbeat = time.monotonic()
        # Everything below is guarded by `_changed`, on which all threads wait.
        self._changed = threading.Condition()
        self._demand = Demand()
        self._paused, self._idle = True, True  # idle: in no exchange, and off the board
        self._closing = False
        self._woken = False
        self._wakeup = 0  # number of this worker's next wake-up key
        self._error: BaseException | None = None
        self._warnings: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, name="laconic-gossip", daemon=True),
            threading.Thread(target=self._listen, args=(store.clone(),), name="laconic-wakeup", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # Called by the training thread.

    def __enter__(self) -> Self:
        start = time.monotonic()
        self._lock.acquire()
        self._baton.take()
        self._meter.add("foreground", "gossip", seconds=time.monotonic() - start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._baton.give()
        self._lock.release()

    def seek(self, exchanges: int, urgently: int) -> None:
        with self._changed:
            self._demand.sought, self._demand.urgently, self._paused = exchanges, urgently, False
            self._changed.notify_all()
        self._warn_and_raise()

    def wait(self, exchanges: int) -> None:
        start = time.monotonic()
        self._meter.begin_wait(start)
        with span("wait gossip"), self._changed:
            self._changed.wait_for(
                lambda: self.exchanges >= exchanges or self._error is not None or self.topology.size == 1
            )
        self._meter.add("foreground", "gossip", seconds=time.monotonic() - start)
        self._warn_and_raise()

    def pause(self) -> None:
        with self._changed:
            self._paused = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._idle or self._closing or self._error is not None)
        self._order_device()
        self._warn_and_raise()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._wires.close()
        self._order_device()
        self._warn_and_raise()

    def _order_device(self) -> None:
        """Lets the device do what follows behind what the gossip thread has launched, which may not be over yet."""
        with self._lock:
            self._baton.take()

    def warn_of_lost(self, members: list[int], dropped: Mapping[int, str]) -> None:
        """Warns of workers that were lost after the end of gossip, while the models were averaged.

        Args:
            members: the workers that are left.
            dropped: why the others are not, as far as this worker has read it.
        """
        for rank in self.topology.nodes:
            if rank not in members:
                why = dropped.get(rank, "it did not come to the end of the worker")
                warn(f"rank {rank} was dropped, the others go on without it: {why}", stacklevel=5)

    def _warn_and_raise(self) -> None:
        """Issues the background's warnings and raises its error, on the training thread, where the user sees them."""
        with self._changed:
            texts, self._warnings = self._warnings, []
            error = self._error
        for text in texts:
            warn(text, stacklevel=4)
        if error is not None:
            raise error

    # Called by the thread that makes the exchanges.

    def _run(self) -> None:
        try:
            with torch.no_grad(), own_stream(self._device):
                while self._make_or_await_exchange():
                    pass
        except StoreGone as gone:
            self._end(StoreGone(f"rank {self._rank}: gossip cannot continue: {gone}"))
        except BaseException as error:  # noqa: BLE001  raised again on the training thread
            self._end(error)
        with contextlib.suppress(StoreGone):
            self._store.set(wakeup_key(self._rank, self._wakeup), "")  # so that the other thread ends too

    def _end(self, error: BaseException) -> None:
        self._wires.close()  # a partner that waits for this worker notices at once
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _make_or_await_exchange(self) -> bool:
        """Makes an exchange if the board has a partner, else waits for a reason to try again.

        Returns:
            False at the end.
        """
        if time.monotonic() > self._last_heartbeat + CHECK_SECONDS:
            self._last_heartbeat = time.monotonic()
            self._store.add(heartbeat_key(self._rank), 1)
        with self._changed:
            resting = self._paused or self._closing
            need, wakeup = self._demand.need(self.exchanges), self._wakeup
            self._woken = False
        patient = self._demand.is_patient(need, time.monotonic())
        peer = self._pairing.leave() if resting else self._pairing.join(need, patient, wakeup)
        self._notice_dropped()
        if peer is not None:
            self._exchange(peer)
            return True
        if resting and self._closing:
            return False
        with self._changed:
            self._idle = resting
            self._changed.notify_all()
            # The time-out is for a partner that died before it woke up this worker, for the heartbeat, and for the end
            # of this worker's patience.
            patience = self._demand.patient_until - time.monotonic() if patient and need > Need.ANSWER else math.inf
            self._changed.wait_for(
                lambda: (
                    self._closing
                    or self._paused != resting
                    or self._woken
                    or (not resting and self._demand.need(self.exchanges) != need)
                ),
                max(0.0, min(CHECK_SECONDS, patience)),
            )
            self._idle = resting and self._paused
        return True

    def _exchange(self, peer: int) -> None:
        start, nbytes = time.monotonic(), 0
        dialogue = self._talk(peer)
        try:
            with self._turn():
                sent = next(dialogue)
            while True:
                outgoing = self._wires.in_host_memory(sent)
                check_gossip(outgoing, self._rank, self._meter.step)
                received = self._wires.sendrecv(peer, outgoing, for_device=sent.device.type != "cpu")
                nbytes += sent.numel() * sent.element_size()
                with self._turn():
                    try:
                        sent = dialogue.send(received)
                    except StopIteration:
                        break
        except PeerIsSilent as silence:
            with self._turn():
                dialogue.close()
            self._wires.forget(peer)
            self._pairing.drop(peer, f"{silence}, says rank {self._rank}")
            self._notice_dropped()
            return
        seconds = time.monotonic() - start
        self._demand.end_exchange(seconds)
        self._meter.add("background", "exchange", calls=1, nbytes=nbytes, seconds=seconds)
        with self._changed:
            self.exchanges += 1
            self.partners[peer] += 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Lets a part of a dialogue run, behind what the training thread has done on the device inside `with`."""
        with self._lock:
            self._baton.take()
            yield
            self._baton.give()

    def _check_peer(self, peer: int) -> None:
        """Raises if a peer that does not connect was dropped: it may have died after it was paired with this worker."""
        if peer in self._pairing.read():
            raise WireError("it was dropped before it connected")

    def _notice_dropped(self) -> None:
        dropped = self._pairing.dropped
        if self._rank in dropped:
            raise Dropped(f"rank {self._rank} was dropped, the others go on without it: {dropped[self._rank]}")
        new = [rank for rank in self.topology.nodes if rank in dropped]
        if not new:
            return
        with self._changed:
            self.topology = self._graph.subgraph([rank for rank in self._graph.nodes if rank not in dropped])
            self._warnings += [f"rank {rank} was dropped, the others go on without it: {dropped[rank]}" for rank in new]
            self._changed.notify_all()

    # Called by the thread that waits to be woken up.

    def _listen(self, store: JobStore) -> None:
        """Waits for this worker's wake-up keys, since the other thread already waits for `_changed`."""
        while not self._closing and self._error is None:
            key = wakeup_key(self._rank, self._wakeup)
            try:
                store.wait([key], self._timeout)
                store.delete([key])
            except StoreGone:
                return  # the other thread finds out too, and reports it
            except RuntimeError:  # torch's error for a key that is not there yet
                continue
            with self._changed:
                self._wakeup += 1
                self._woken = True
                self._changed.notify_all()


class PeerIsSilent(PeerError):
    """The peer of an exchange did not answer."""


class PeerWires:
    """Wires to the neighbours, each made by both ends in their first exchange. One exchange is made at a time.

    Args:
        store: through which workers find each other.
        rank: this worker.
        timeout: seconds in which a neighbour must connect, and for which nothing may arrive.
        check: called now and then while a neighbour does not connect, with its rank; raises if waiting is in vain.
        pins: whether messages are copied from and to a device, which is faster with pinned memory.
    """

    def __init__(self, store: JobStore, rank: int, timeout: float, check: Callable[[int], None], *, pins: bool) -> None:
        self._pins = pins
        self._peer = rank  # the one that is being connected to
        self._connector = Connector(store, rank, timeout, lambda: check(self._peer))
        self._wires: dict[int, Wire] = {}
        self._buffers: dict[tuple[str, torch.dtype, bool], Tensor] = {}

    def in_host_memory(self, sent: Tensor) -> Tensor:
        """Returns a message in contiguous host memory, valid until the next call."""
        # Called without the lock: here the host waits for the device, and training must not.
        return sent.contiguous() if sent.device.type == "cpu" else self._buffer("sent", sent, True).copy_(sent)

    def sendrecv(self, peer: int, sent: Tensor, *, for_device: bool) -> Tensor:
        """Sends to the peer, which does the same. Returns what it sent, which is valid until the next call.

        Args:
            peer: the other worker.
            sent: what `in_host_memory` has returned.
            for_device: whether the message goes on to a device. The device may still read it when a message for the
                host comes, which therefore has a buffer of its own. The next one for the device comes after a copy by
                `in_host_memory`, for which the device has done everything before.
        """
        received = self._buffer("received", sent, for_device)
        try:
            if peer not in self._wires:
                self._peer = peer
                self._wires[peer] = self._connector.connect(peer)
            self._wires[peer].sendrecv(sent, received)
        except WireError as error:
            raise PeerIsSilent(f"no answer from rank {peer} ({first_line(error)})") from error
        return received

    def _buffer(self, use: str, like: Tensor, for_device: bool) -> Tensor:
        key = use, like.dtype, for_device
        if key not in self._buffers or self._buffers[key].numel() < like.numel():
            self._buffers[key] = torch.empty(like.numel(), dtype=like.dtype, pin_memory=self._pins)
        return self._buffers[key][: like.numel()].view(like.shape)

    def forget(self, peer: int) -> None:
        """Closes the wire to a peer, if there is one."""
        if peer in self._wires:
            self._wires.pop(peer).close()

    def close(self) -> None:
        self._connector.close()
        for peer in list(self._wires):
            self.forget(peer)
