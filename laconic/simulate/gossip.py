"""Gossip in virtual time: the same board and the same dialogues as between processes, driven by events."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import Tensor
from typing_extensions import Self

from laconic.comm.finite import check_gossip
from laconic.comm.gossip import Dialogue, Gossip, Talk
from laconic.comm.meter import Meter
from laconic.comm.pairing import Board, Demand, Need
from laconic.comm.plan import PAIRING_ROUNDS, Rounds
from laconic.simulate.engine import Event
from laconic.simulate.job import Job
from laconic.topology import Topology


class SimulatedGossip(Gossip):
    """One worker's side of the gossip. What `BackgroundGossip` does in threads, this does in events."""

    def __init__(self, job: Job, topology: Topology, rank: int, talk: Talk, meter: Meter) -> None:
        self.topology, self.exchanges, self.partners = topology, 0, Counter()
        self.rank, self.talk, self.meter, self.demand = rank, talk, meter, Demand()
        self._job, self._engine = job, job.engine
        self._exchange: Exchange | None = None
        self._need = Need.ANSWER  # as the board has it
        self._paused, self._closing = True, False
        self._locked, self._deferred = False, list[Callable[[], None]]()
        self._changed = Event(self._engine)
        self._turns = 0
        self._error: BaseException | None = None
        self._warnings: list[str] = []
        if job.board is None:
            job.board, job.topology = Board(topology), topology
        job.gossips[rank] = self

    # Called by the worker.

    def __enter__(self) -> Self:
        self._locked = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._locked = False
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            action()

    def seek(self, exchanges: int, urgently: int) -> None:
        self.demand.sought, self.demand.urgently = exchanges, urgently
        if self._paused or self.demand.need(self.exchanges) != self._need:
            self._paused = False
            self.turn()
        self.warn_and_raise()

    def wait(self, exchanges: int) -> None:
        start = self._engine.now
        self._wait_until(
            lambda: self.exchanges >= exchanges or self.topology.size == 1,
            lambda: f"waits for exchange {exchanges} of its gossip with {list(self.topology.neighbours(self.rank))}",
        )
        self.meter.add("foreground", "gossip", seconds=self._engine.now - start)
        self.warn_and_raise()

    def pause(self) -> None:
        self._paused = True
        self._rest()

    def close(self) -> None:
        self._closing = True
        self._rest()

    def _rest(self) -> None:
        self.turn()
        self._wait_until(lambda: self._exchange is None, lambda: f"waits for the end of {self._exchange}")
        self.warn_and_raise()

    def _wait_until(self, condition: Callable[[], bool], describe: Callable[[], str]) -> None:
        while self._error is None and not condition():
            self._changed.wait(describe)

    def warn_and_raise(self) -> None:
        """Issues the warnings of the background and raises its error, where the user sees them."""
        texts, self._warnings = self._warnings, []
        for text in texts:
            warnings.warn(text, stacklevel=4)
        if self._error is not None:
            raise self._error

    # Called by events.

    def turn(self) -> None:
        """Looks at the board, as the background thread does whenever something has changed."""
        board = self._job.board
        assert board is not None
        if self._exchange is not None or self._error is not None:
            return
        self._turns += 1
        self._need = need = self.demand.need(self.exchanges)
        patient = self.demand.is_patient(need, self._engine.now)
        if self._paused or self._closing:
            peer, paired = board.leave(self.rank)
        else:
            peer, paired = board.join(self.rank, need, patient, 0)
        if peer is not None:
            Exchange.begin(self._job, self, self._job.gossips[peer])
        elif patient and need > Need.ANSWER and not self._paused:
            self._engine.at(self.demand.patient_until, self._end_patience, self._turns)
        self._job.wake_up(paired)

    def _end_patience(self, turn: int) -> None:
        if turn == self._turns:
            self.turn()

    def when_unlocked(self, action: Callable[[], None]) -> None:
        """Calls a part of a dialogue, now or when the worker has left its `with` block."""
        if self._locked:
            self._deferred.append(action)
        else:
            action()

    def begin_exchange(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def end_exchange(self, peer: int | None, nbytes: int = 0, seconds: float = 0.0) -> None:
        """Ends an exchange with a peer; with None, one that was broken off."""
        self._exchange = None
        if peer is not None:
            self.demand.end_exchange(seconds)
            self.meter.add("background", "exchange", calls=1, nbytes=nbytes, seconds=seconds)
            self.exchanges += 1
            self.partners[peer] += 1
        self._notify()

    def end(self, error: BaseException) -> None:
        """Ends this worker's gossip. The worker raises the error as soon as it looks."""
        self._error = self._error or error
        if self._exchange is not None:
            self._exchange.break_off()
        self._notify()

    def notice_dropped(self, new: Mapping[int, str], topology: Topology | None) -> None:
        """Goes on without workers that were dropped."""
        if topology is not None:
            self.topology = topology
        self._warnings += [f"rank {rank} was dropped, the others go on without it: {why}" for rank, why in new.items()]
        if self._exchange is not None and self._exchange.involves(new):
            self._exchange.break_off()
        self._notify()

    def _notify(self) -> None:
        happened, self._changed = self._changed, Event(self._engine)
        happened.happen()


class Exchange:
    """One exchange between two workers, from the moment they are paired."""

    def __init__(self, job: Job, sides: tuple[SimulatedGossip, SimulatedGossip]) -> None:
        self._job, self._sides, self._start = job, sides, job.engine.now
        self._dialogues: dict[int, Dialogue] = {}
        self._sent: dict[int, Tensor | None] = {}  # None: this side has ended
        self._nbytes, self._broken = 0, False

    @classmethod
    def begin(cls, job: Job, one: SimulatedGossip, other: SimulatedGossip) -> None:
        """Begins an exchange when both sides have read on the board that they are paired."""
        pending = other._exchange
        if pending is not None:
            one.begin_exchange(pending)
            pairing = job.network.latency([one.rank, other.rank], PAIRING_ROUNDS)
            job.engine.at(job.engine.now + pairing, pending._open)
        else:
            one.begin_exchange(cls(job, (other, one)))

    def __str__(self) -> str:
        return f"an exchange between ranks {self._sides[0].rank} and {self._sides[1].rank}"

    def involves(self, ranks: Mapping[int, str]) -> bool:
        return any(side.rank in ranks for side in self._sides)

    def _open(self) -> None:
        self._start = self._job.engine.now
        a, b = self._sides
        for side, peer in ((a, b), (b, a)):
            self._step(side, lambda side=side, peer=peer: self._first_message(side, peer))  # type: ignore[misc]

    def _first_message(self, side: SimulatedGossip, peer: SimulatedGossip) -> Tensor:
        self._dialogues[side.rank] = side.talk(peer.rank)
        return next(self._dialogues[side.rank])

    def _step(self, side: SimulatedGossip, advance: Callable[[], Tensor]) -> None:
        """Runs one side's dialogue up to its next message. When both sides are there, the messages are sent."""

        def run() -> None:
            if self._broken:
                return
            try:
                with torch.no_grad():
                    message = advance()
                check_gossip(message, side.rank, side.meter.step)
                self._sent[side.rank] = message
            except StopIteration:
                self._sent[side.rank] = None
            except BaseException as error:  # noqa: BLE001  raised again by the worker
                side.end(error)
                peer = next(other for other in self._sides if other is not side)
                self._job.drop(side.rank, f"no answer from rank {side.rank} ({error}), says rank {peer.rank}")
                return
            if len(self._sent) == 2:
                self._send()

        side.when_unlocked(run)

    def _send(self) -> None:
        if any(message is None for message in self._sent.values()):
            self._end()
            return
        nbytes = [message.numel() * message.element_size() for message in map(self._message_of, self._sides)]
        self._nbytes += nbytes[0]
        a, b = (side.rank for side in self._sides)
        traffic = {a: (nbytes[0], nbytes[1]), b: (nbytes[1], nbytes[0])}
        self._job.network.carry(traffic, Rounds(1), connections=1, done=self._receive)

    def _receive(self) -> None:
        if self._broken:
            return
        a, b = self._sides
        # Copies, since a side may reuse the memory of its message as soon as it goes on.
        received = {peer.rank: self._message_of(side).clone() for side, peer in ((a, b), (b, a))}
        self._sent = {}
        for side in self._sides:
            self._step(side, lambda side=side: self._dialogues[side.rank].send(received[side.rank]))  # type: ignore[misc]

    def _message_of(self, side: SimulatedGossip) -> Tensor:
        message = self._sent[side.rank]
        assert message is not None
        return message

    def _end(self) -> None:
        a, b = self._sides
        for side, peer in ((a, b), (b, a)):
            side.end_exchange(peer.rank, self._nbytes, self._job.engine.now - self._start)
        for side in self._sides:
            side.turn()

    def break_off(self) -> None:
        """Ends the exchange without a result."""
        if self._broken:
            return
        self._broken = True
        for dialogue in self._dialogues.values():
            dialogue.close()
        for side in self._sides:
            side.end_exchange(None)
        for side in self._sides:
            self._job.engine.at(self._job.engine.now, side.turn)
