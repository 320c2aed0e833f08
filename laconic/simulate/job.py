"""What the simulated workers of one job share: operations under way, meetings, failures, and the board of gossip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from laconic.comm import PeerError
from laconic.comm.pairing import Board, Dropped, Free
from laconic.comm.plan import MEETING_ROUNDS
from laconic.comm.register import CHECK_SECONDS
from laconic.simulate.engine import Engine, Event
from laconic.simulate.network import Network
from laconic.topology import Topology

if TYPE_CHECKING:
    from laconic.simulate.gossip import SimulatedGossip


@dataclass(eq=False)
class Operation:
    """One call of a verb, or one meeting, by all of its members.

    Args:
        event: happens when it is over, with a result or an error.
        what: the verb and what it is called with, which must be the same on all ranks.
        members: the ranks that take part.
    """

    event: Event
    what: str
    members: tuple[int, ...]
    inputs: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    error: str | None = None
    started: bool = False  # all members have come

    def missing(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.inputs]

    def break_off(self, error: str) -> None:
        if not self.event.happened:
            self.error = error
            self.event.happen()


Key = tuple[Any, ...]


class Deadlock(PeerError):
    """All simulated workers wait for each other. The message says who waits where."""


class Job:
    """One job: the workers that were the n-th to connect in their simulated process."""

    def __init__(self, engine: Engine, network: Network, size: int) -> None:
        self.engine, self.network, self.size = engine, network, size
        self.failure: str | None = None
        self.board: Board | None = None
        self.gossips: dict[int, SimulatedGossip] = {}
        self.operations: dict[Key, Operation] = {}  # those that are not over
        self.topology: Topology | None = None  # of gossip: the workers that are left

    @property
    def dropped(self) -> dict[int, str]:
        """The workers that were dropped from gossip, and why."""
        return {} if self.board is None else self.board.dropped

    def join(
        self,
        key: Key,
        rank: int,
        what: str,
        members: Sequence[int],
        content: Any,
        start: Callable[[Operation], None],
    ) -> Operation:
        """Takes part in an operation.

        Args:
            key: identifies the operation.
            rank: who takes part.
            what: must be the same on all ranks.
            members: who else must come.
            content: what this rank brings along.
            start: called when all members have come, before their contents are released.
        """
        operation = self.operations.get(key)
        if operation is None:
            operation = self.operations[key] = Operation(Event(self.engine), what, tuple(members))
        if self.failure is not None:
            operation.break_off(self.failure)
        for lost in operation.members:
            if lost in self.dropped:
                operation.break_off(f"rank {lost} was dropped: {self.dropped[lost]}")
        if operation.what != what:
            others = ", ".join(map(str, operation.inputs))
            operation.break_off(
                f"the ranks call different verbs, and all must call the same one: rank {rank} calls {what}, "
                f"rank {others} {operation.what}"
            )
        operation.inputs[rank] = content
        if operation.error is None and not operation.missing():
            operation.started = True
            start(operation)
            operation.inputs = dict.fromkeys(operation.inputs)
        return operation

    def finish(self, key: Key, operation: Operation) -> None:
        """Ends an operation whose messages have arrived."""
        self.operations.pop(key, None)
        if operation.error is None:
            operation.event.happen()

    # Meetings: through the job's store, so they take two rounds and no payload.

    def meet(self, number: int, rank: int, what: str, step: int, members: Sequence[int], note: Any) -> Operation:
        """Comes to the meeting with this number. Its result is the list of those who came, and their notes."""
        key = ("meeting", number)
        meeting = self.operations.get(key)
        if meeting is None:
            meeting = self.operations[key] = Operation(Event(self.engine), "a meeting", tuple(members))
        meeting.inputs[rank] = (what, step, note)
        if self.failure is not None:
            meeting.break_off(self.failure)
        self._hold_meeting(key, meeting)
        return meeting

    def _hold_meeting(self, key: Key, meeting: Operation) -> None:
        expected = [rank for rank in meeting.members if rank not in self.dropped]
        if meeting.started or meeting.error is not None or not all(rank in meeting.inputs for rank in expected):
            return
        meeting.started = True
        signed = {rank: meeting.inputs[rank] for rank in expected}
        meeting.result = expected, [note for _, _, note in signed.values()]
        if len({what for what, _, _ in signed.values()}) > 1:
            places = "; ".join(f"rank {rank}: {what} (step {step})" for rank, (what, step, _) in signed.items())
            meeting.error = f"the ranks wait at different places, and all must come to the same one: {places}"
        seconds = self.network.latency(expected, MEETING_ROUNDS)

        def end() -> None:
            self.operations.pop(key, None)
            meeting.event.happen()

        self.engine.at(self.engine.now + seconds, end)

    # Failures

    def fail(self, rank: int, text: str) -> None:
        """Lets the others know that a rank cannot continue."""
        self.engine.at(self.engine.now + self.network.latency(range(self.size), 1), self._fail, rank, text)

    def die(self, rank: int) -> None:
        """Lets the others notice that a worker was killed: they check once a second."""
        text = f"rank {rank} died: its process ended without leaving the Worker's block (a simulated failure)"
        self.engine.at(self.engine.now + CHECK_SECONDS, self._fail, rank, text)

    def _fail(self, rank: int, text: str) -> None:
        if self.board is not None:
            self.drop(rank, text)
        elif self.failure is None:
            self.failure = text
            for operation in list(self.operations.values()):
                if not operation.started:
                    operation.break_off(text)

    # Gossip

    def drop(self, rank: int, why: str) -> None:
        """Goes on without a rank, and without those that are then disconnected."""
        assert self.board is not None
        before = set(self.dropped)
        paired = self.board.drop(rank, why)
        new = {lost: reason for lost, reason in self.dropped.items() if lost not in before}
        if not new:
            return
        left = [node for node in self.board.topology.nodes if node not in self.dropped]
        self.topology = self.board.topology.subgraph(left) if left else None
        for key, operation in list(self.operations.items()):
            if key[0] == "meeting":
                self._hold_meeting(key, operation)
            elif not operation.started and any(lost in operation.members for lost in new):
                lost = next(lost for lost in new if lost in operation.members)
                operation.break_off(f"rank {lost} was dropped: {new[lost]}")
        for other, gossip in list(self.gossips.items()):
            if other in new:
                text = f"rank {other} was dropped, the others go on without it: {new[other]}"
                gossip.end(Dropped(text))
            else:
                gossip.notice_dropped(new, self.topology)
        self.wake_up(paired)

    def wake_up(self, paired: dict[int, Free]) -> None:
        """Lets workers read on the board that they were paired."""
        for rank in paired:
            self.gossips[rank].turn()


def cannot_complete(rank: int, doing: str, why: str) -> PeerError:
    """Returns the error of a rank whose operation can never complete."""
    return PeerError(f"rank {rank}: {doing} cannot complete: {why}")
