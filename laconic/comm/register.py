"""Meetings, failures and heartbeats in the job's key-value store: how a rank learns why another one does not answer.

A collective that hangs does not say why. The store does: a rank that fails writes its error there, and a rank that
comes to a meeting (the end, `consensus()`, a checkpoint) signs in there. So a rank that has waited for a second reads
the store, and raises with the reason long before the time-out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store

from laconic.comm.comm import PeerError
from laconic.comm.pairing import Dropped, Pairing

CHECK_SECONDS = 1.0  # between two reads of the store, while waiting
ROLL_CALL_SECONDS = 3.0  # in which the others must answer a roll call
STORE_IS_GONE = "the job's store does not answer: the launcher, or the rank that holds it (usually 0), is gone"


class StoreGone(PeerError):
    """The process that holds the job's store is gone."""


class Register:
    """One rank's access to the meetings and failures in the store.

    Args:
        store: of the job.
        rank: this worker.
        size: the number of workers.
        timeout: seconds after which a wait for another rank fails.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        # One job may run several Workers one after another. Each rank counts its own, and all come to the same number.
        number = store.add(f"laconic/{rank}", 1)
        self.store = PrefixStore(f"laconic/{number}", store)  # the keys of this Worker
        self.rank, self.size, self.timeout = rank, size, timeout
        self.members = list(range(size))  # as of the last meeting
        self.pairing: Pairing | None = None  # with gossip: lists the ranks that were dropped, and the rest continue
        self._meetings = 0
        self._started: dict[str, int] = {}  # operations started so far, by sequence

    def count(self, sequence: str) -> int:
        """Counts another operation, and returns its number in its sequence: that of a channel, or of a pair on it."""
        self._started[sequence] = self._started.get(sequence, 0) + 1
        return self._started[sequence]

    def meet(self, what: str, step: int, note: Any, *, timeout: float | None = None) -> list[Any]:
        """Implements `Comm.meet`."""
        self._meetings += 1
        number = self._meetings
        if number > 2:  # all ranks have come to the meeting before this one, so all have read the one before that
            for key in (
                f"meet/{number - 2}/{self.rank}",
                f"meet/{number - 2}/members",
                f"alive/{number - 2}/{self.rank}",
            ):
                self.store.delete_key(key)
        self.store.set(f"meet/{number}/{self.rank}", json.dumps([what, step, note, self._started]))
        self._wait_for_members(number, what, step, timeout or self.timeout)
        signed = [json.loads(self.store.get(f"meet/{number}/{rank}")) for rank in self.members]
        if any(other[0] != what for other in signed):
            places = "; ".join(
                f"rank {rank}: {w} (step {s})" for rank, (w, s, *_) in zip(self.members, signed, strict=True)
            )
            raise PeerError(f"the ranks wait at different places, and all must come to the same one: {places}")
        return [note for _, _, note, _ in signed]

    def _wait_for_members(self, number: int, what: str, step: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        heartbeats = Heartbeats(self.store)
        while True:
            expected = [rank for rank in self.members if self.pairing is None or rank not in self.pairing.dropped]
            keys = [f"meet/{number}/{rank}" for rank in expected]
            if self._appear(keys, min(CHECK_SECONDS, self.timeout)):
                break
            self.raise_if_failed(f"{what} at step {step}")
            missing = [rank for rank, key in zip(expected, keys, strict=True) if not self.store.check([key])]
            if self.pairing is not None:
                # With gossip a worker may be slow, as long as it is alive. Its heartbeat may stop for up to the
                # time-out, while its background thread itself waits for a rank that does not answer: hence twice that.
                for rank in heartbeats.silent(missing, 2 * self.timeout):
                    self.pairing.drop(rank, f"no sign of life for {2 * self.timeout:g} s, says rank {self.rank}")
                self.pairing.read()
            elif time.monotonic() > deadline:
                raise PeerError(f"rank {self.rank}: {what} at step {step} waited {timeout:g} s for {ranks(missing)}")
        if self.pairing is not None:
            self._agree_on_members(self.pairing, f"meet/{number}/members", expected)

    def _agree_on_members(self, pairing: Pairing, key: str, expected: list[int]) -> None:
        """Sets the members to those that the first rank to get here expected, since ranks may see a drop or not yet."""
        self.members = json.loads(self.store.compare_set(key, "", json.dumps(expected)))
        if self.rank not in self.members:
            why = pairing.read().get(self.rank, "it came too late to a meeting")
            raise Dropped(f"rank {self.rank} was dropped, the others go on without it: {why}")

    def raise_if_failed(self, doing: str) -> None:
        """Raises if some rank has failed. `doing` describes what this rank waits for."""
        try:
            found = self.store.get("failed") if self.store.check(["failed"]) else None
        except DistNetworkError as gone:
            raise StoreGone(f"rank {self.rank}: {doing} cannot complete: {STORE_IS_GONE}") from gone
        if found is not None:
            raise PeerError(f"rank {self.rank}: {doing} cannot complete: {found.decode()}")

    def raise_if_stuck(self, doing: str, participants: Mapping[int, str], number: int) -> None:
        """Raises if an operation can never complete: a rank failed, or waits for this rank at a meeting.

        A rank at a meeting that has started the operation is no obstacle: it was done sooner, and the rest will come.

        Args:
            doing: describes the operation.
            participants: the ranks that take part in it, with the sequence in which each of them counts it.
            number: its number in that sequence.
        """
        try:
            self.raise_if_failed(doing)
            self._raise_if_dropped(doing, participants)
        except StoreGone:
            return  # the rank that holds the store may be done, and the last message still on its way here
        for rank, sequence in participants.items():
            key = f"meet/{self._meetings + 1}/{rank}"
            if rank == self.rank or not self.store.check([key]):
                continue
            what, step, _, started = json.loads(self.store.get(key))
            if started.get(sequence, 0) < number:
                raise PeerError(
                    f"rank {self.rank}: {doing} cannot complete: rank {rank} has been at {what} since its step {step}, "
                    f"and all ranks must come there"
                )

    def _raise_if_dropped(self, doing: str, participants: Mapping[int, str]) -> None:
        if self.pairing is None:
            return
        self.store.set(self._alive_key(self.rank), "")  # in case another rank calls the roll
        dropped = self.pairing.read()
        for rank in participants:
            if rank in dropped:
                raise PeerError(f"rank {self.rank}: {doing} cannot complete: rank {rank} was dropped: {dropped[rank]}")

    def _alive_key(self, rank: int) -> str:
        """Returns the key by which a rank answers a roll call; with gossip there may be one after each meeting."""
        return f"alive/{rank}" if self.pairing is None else f"alive/{self._meetings}/{rank}"

    def fail(self, text: str) -> None:
        """Reports that this rank failed. All ranks name the first that did; with gossip, the others drop this one."""
        try:
            if self.pairing is not None:
                self.pairing.drop(self.rank, text)
                return
            self.store.compare_set("failed", "", text)
            self.store.set(f"alive/{self.rank}", "")
        except DistNetworkError:
            return  # nobody is left to read it

    def roll_call(self, doing: str, cause: str) -> PeerError:
        """Returns the error for an operation whose connection broke or that timed out, after finding out who is alive.

        Every rank that notices the failure signs in as alive; the ranks that do not are to blame.
        """
        try:
            self.store.set(self._alive_key(self.rank), "")
            self.raise_if_failed(doing)
            deadline = time.monotonic() + ROLL_CALL_SECONDS
            for rank in self.members:
                self._appear([self._alive_key(rank)], deadline - time.monotonic())
            self.raise_if_failed(doing)
            silent = [rank for rank in self.members if not self._is_alive(rank)]
            whom = f"no sign of life from {ranks(silent)}" if silent else "all ranks are alive"
            if self.pairing is not None:
                for rank in silent:
                    self.pairing.drop(rank, f"no sign of life, says rank {self.rank} ({cause})")
        except DistNetworkError:
            return StoreGone(f"rank {self.rank}: {doing} failed, {STORE_IS_GONE} ({cause})")
        except PeerError as named:
            return named
        return PeerError(f"rank {self.rank}: {doing} failed, {whom} ({cause})")

    def _is_alive(self, rank: int) -> bool:
        """Returns whether a rank has answered the roll call, or is at the next meeting already."""
        return any(self.store.check([key]) for key in (self._alive_key(rank), f"meet/{self._meetings + 1}/{rank}"))

    def _appear(self, keys: list[str], seconds: float) -> bool:
        """Returns whether all keys are in the store within so many seconds.

        The store's own wait would write two lines to the user's terminal whenever it times out. This one polls at
        growing intervals, and is late by at most a tenth of the time waited.
        """
        start = time.monotonic()
        try:
            while not self.store.check(keys):
                waited = time.monotonic() - start
                if waited >= seconds:
                    return False
                time.sleep(min(max(0.001, waited / 10), seconds - waited))
        except DistNetworkError as gone:
            raise StoreGone(f"rank {self.rank}: {STORE_IS_GONE}") from gone
        return True


class Heartbeats:
    """Reads the heartbeats that workers with gossip put in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: dict[int, tuple[int, float]] = {}  # by rank: the last heartbeat, and when it was new

    def silent(self, suspects: list[int], seconds: float) -> list[int]:
        """Returns those suspects of which no new heartbeat was seen for so long, over the calls of this object."""
        now = time.monotonic()
        for rank in suspects:
            beat = self._store.add(heartbeat_key(rank), 0)
            if rank not in self._last or self._last[rank][0] != beat:
                self._last[rank] = beat, now
        return [rank for rank in suspects if now - self._last[rank][1] > seconds]


def heartbeat_key(rank: int) -> str:
    return f"gossip/heartbeat/{rank}"


def ranks(numbers: list[int]) -> str:
    """Returns the ranks in words.

    >>> ranks([1]), ranks([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, since those of torch go on with a stack trace."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
