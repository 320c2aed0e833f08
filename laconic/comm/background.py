"""Gossip over the job's store and wires of its own: a thread that exchanges, and one that listens for calls."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import Counter
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store

from laconic.comm.comm import PeerError, first_line
from laconic.comm.gossip import Gossip, Talk
from laconic.comm.meter import Meter
from laconic.comm.pairing import Dropped, Need, Pairing, bell_key
from laconic.comm.register import SLICE, STORE_IS_GONE, StoreGone, beat_key
from laconic.comm.wire import Switchboard, Wire, WireError
from laconic.topology import Topology


class BackgroundGossip(Gossip):
    def __init__(self, store: Store, topology: Topology, rank: int, talk: Talk, meter: Meter, timeout: float) -> None:
        self.topology, self.exchanges, self.partners = topology, 0, Counter()
        self._graph, self._rank, self._talk, self._meter, self._timeout = topology, rank, talk, meter, timeout
        self._lock = threading.Lock()  # held by the training inside `with`, or by a part of a dialogue
        self._pairs = Pairs(_own_client(store), rank, timeout)
        self._store = _own_client(store)
        self._pairing = Pairing(self._store, topology, rank)
        # All below is guarded by `_changed`, on which both sides wait.
        self._changed = threading.Condition()
        self._sought = self._urgently = 0
        self._paused, self._idle = True, True  # idle: in no exchange, and nobody can call
        self._closing = False
        self._rung = False
        self._bell = 0
        self._beaten = self._trained = time.monotonic()
        self._error: BaseException | None = None
        self._news: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, name="laconic-gossip", daemon=True),
            threading.Thread(target=self._listen, args=(_own_client(store),), name="laconic-bell", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # The side of the training.

    def __enter__(self) -> Self:
        start = time.monotonic()
        self._lock.acquire()
        self._meter.add("foreground", "gossip", seconds=time.monotonic() - start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def seek(self, exchanges: int, urgently: int) -> None:
        self._trained = time.monotonic()
        with self._changed:
            self._sought, self._urgently, self._paused = exchanges, urgently, False
            self._changed.notify_all()
        self._hear()

    def wait(self, exchanges: int) -> None:
        start = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: self.exchanges >= exchanges or self._error is not None or self.topology.size == 1
            )
        self._meter.add("foreground", "gossip", seconds=time.monotonic() - start)
        self._hear()

    def pause(self) -> None:
        with self._changed:
            self._paused = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._idle or self._closing or self._error is not None)
        self._hear()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._pairs.close()
        self._hear()

    def _hear(self) -> None:
        """Warn and raise on the training's thread, where the user sees it."""
        with self._changed:
            news, self._news = self._news, []
            error = self._error
        for text in news:
            warnings.warn(text, stacklevel=4)
        if error is not None:
            raise error

    # The side of the background.

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._turn():
                    pass
        except DistNetworkError:
            self._end(StoreGone(f"rank {self._rank}: gossip cannot go on: {STORE_IS_GONE}"))
        except BaseException as error:  # noqa: BLE001  raised again on the training's thread
            self._end(error)
        with contextlib.suppress(DistNetworkError):
            self._store.set(bell_key(self._rank, self._bell), "")  # so that the listener ends too

    def _end(self, error: BaseException) -> None:
        self._pairs.close()  # a partner that waits for this worker sees that it is gone
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _turn(self) -> bool:
        """Look at the board and do what follows; if nothing does, wait for a reason to look again. False at the end."""
        if time.monotonic() > self._beaten + SLICE:
            self._beaten = self._trained = time.monotonic()
            self._store.add(beat_key(self._rank), 1)
        with self._changed:
            resting = self._paused or self._closing
            need, surplus, bell = self._need(), max(0, self.exchanges - self._sought), self._bell
            self._rung = False
        peer = self._pairing.withdraw() if resting else self._pairing.come(need, surplus, bell)
        self._notice_the_gone()
        if peer is not None:
            self._exchange(peer)
            return True
        if resting and self._closing:
            return False
        with self._changed:
            self._idle = resting
            self._changed.notify_all()
            # The time-out is for a caller that died before it rang, and shows the others that this worker lives.
            self._changed.wait_for(
                lambda: (
                    self._closing or self._paused != resting or self._rung or (not resting and self._need() != need)
                ),
                SLICE,
            )
            self._idle = resting and self._paused
        return True

    def _need(self) -> Need:
        if self.exchanges < self._urgently:
            return Need.URGENT
        return Need.SEEK if self.exchanges < self._sought else Need.ANSWER

    def _exchange(self, peer: int) -> None:
        start, nbytes = time.monotonic(), 0
        dialogue = self._talk(peer)
        try:
            with self._lock:
                sent = next(dialogue)
            while True:
                received = self._pairs.swap(peer, sent)
                nbytes += sent.numel() * sent.element_size()
                with self._lock:
                    try:
                        sent = dialogue.send(received)
                    except StopIteration:
                        break
        except PeerIsSilent as silence:
            with self._lock:
                dialogue.close()
            self._pairs.forget(peer)
            self._pairing.drop(peer, f"{silence}, says rank {self._rank}")
            self._notice_the_gone()
            return
        self._meter.add("background", "exchange", calls=1, nbytes=nbytes, seconds=time.monotonic() - start)
        with self._changed:
            self.exchanges += 1
            self.partners[peer] += 1
            self._changed.notify_all()

    def _notice_the_gone(self) -> None:
        gone = self._pairing.gone
        if self._rank in gone:
            raise Dropped(f"rank {self._rank} was dropped, the others go on without it: {gone[self._rank]}")
        new = [rank for rank in self.topology.nodes if rank in gone]
        if not new:
            return
        with self._changed:
            self.topology = self._graph.subgraph([rank for rank in self._graph.nodes if rank not in gone])
            self._news += [f"rank {rank} was dropped, the others go on without it: {gone[rank]}" for rank in new]
            self._changed.notify_all()

    def _listen(self, store: Store) -> None:
        """Wait for this worker's bell in the store and pass it on: `_run` can wait in one place only."""
        while not self._closing and self._error is None:
            key = bell_key(self._rank, self._bell)
            try:
                store.wait([key], timedelta(seconds=self._timeout))
                store.delete_key(key)
            except DistNetworkError:
                return  # the other thread finds out too, and says so
            except RuntimeError:  # torch's own error for "not there yet"
                continue
            with self._changed:
                self._bell += 1
                self._rung = True
                self._changed.notify_all()


class PeerIsSilent(PeerError):
    pass


class Pairs:
    """Wires to the neighbours, each made by both ends in their first exchange. One exchange is held at a time."""

    def __init__(self, store: Store, rank: int, timeout: float) -> None:
        store.set_timeout(timedelta(seconds=timeout))
        self._switchboard = Switchboard(store, rank, timeout)
        self._wires: dict[int, Wire] = {}
        self._buffers: dict[torch.dtype, Tensor] = {}

    def swap(self, peer: int, sent: Tensor) -> Tensor:
        """Send to the peer, which does the same; what it sent is valid until the next swap."""
        outgoing = sent.contiguous().cpu()
        buffer = self._buffers.get(sent.dtype)
        if buffer is None or buffer.numel() < sent.numel():
            buffer = torch.empty(sent.numel(), dtype=sent.dtype, pin_memory=sent.is_cuda)
            self._buffers[sent.dtype] = buffer
        received = buffer[: sent.numel()].view(sent.shape)
        try:
            if peer not in self._wires:
                self._wires[peer] = self._switchboard.connect(peer)
            self._wires[peer].swap(outgoing, received)
        except WireError as error:
            raise PeerIsSilent(f"no answer from rank {peer} ({first_line(error)})") from error
        return received.to(sent.device)

    def forget(self, peer: int) -> None:
        if peer in self._wires:
            self._wires.pop(peer).close()

    def close(self) -> None:
        self._switchboard.close()
        for peer in list(self._wires):
            self.forget(peer)


def _own_client(store: Store) -> Store:
    """A client for one more thread: a wait keeps the others out of the client it is made on."""
    if not hasattr(store, "clone"):
        raise RuntimeError(
            f"gossip in the background needs a store that can be cloned, and {type(store).__name__} cannot"
        )
    clone: Store = store.clone()
    return clone
