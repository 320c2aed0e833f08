"""Meetings, failures and roll calls through the job's key-value store: how ranks learn why somebody does not answer.

A collective only says that nothing comes. The store says why: a rank that fails leaves its error there, a rank that
went to a meeting (leaving, consensus, saving) that others do not attend has signed in there. So a rank that has waited
for a second looks here, and raises with the reason long before the time-out.
"""

from __future__ import annotations

import json
import time
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store

from laconic.comm.comm import PeerError
from laconic.comm.pairing import Dropped, Pairing

SLICE = 1.0  # seconds between two looks at the store, while waiting
GRACE = 3.0  # seconds that the others have to answer a roll call
STORE_IS_GONE = "the job's store does not answer: the launcher, or the rank that holds it (usually 0), is gone"


class StoreGone(PeerError):
    pass


class Register:
    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        # Several workers may live one after another in one job; each rank counts its own, alike on all ranks.
        number = store.add(f"laconic/{rank}", 1)
        self._store = PrefixStore(f"laconic/{number}", store)
        self.rank, self.size, self.timeout = rank, size, timeout
        self.members = list(range(size))  # as of the last meeting
        self.board: Pairing | None = None  # with gossip: who has been dropped is written there, and the rest go on
        self._meetings = 0
        self._started: dict[str, int] = {}  # messages started so far, by the channel (and peer) they go over

    def count(self, course: str) -> int:
        """Another message is started on this course: its number there."""
        self._started[course] = self._started.get(course, 0) + 1
        return self._started[course]

    @property
    def store(self) -> Store:
        """The part of the job's store that belongs to this worker."""
        return self._store

    def meet(self, what: str, step: int, note: Any, *, timeout: float | None = None) -> list[Any]:
        self._meetings += 1
        number = self._meetings
        if number > 2:  # all ranks came to the meeting before this one, so all have read the one before that
            self._store.delete_key(f"meet/{number - 2}/{self.rank}")
        self._store.set(f"meet/{number}/{self.rank}", json.dumps([what, step, note, self._started]))
        self._wait_for_members(number, what, step, timeout or self.timeout)
        signed = [json.loads(self._store.get(f"meet/{number}/{rank}")) for rank in self.members]
        if any(other[0] != what for other in signed):
            places = "; ".join(
                f"rank {rank}: {w} (step {s})" for rank, (w, s, *_) in zip(self.members, signed, strict=True)
            )
            raise PeerError(f"the ranks are at different places, all must come to the same: {places}")
        return [note for _, _, note, _ in signed]

    def _wait_for_members(self, number: int, what: str, step: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        life = Life(self._store)
        while True:
            expected = [rank for rank in self.members if self.board is None or rank not in self.board.gone]
            keys = [f"meet/{number}/{rank}" for rank in expected]
            if self._appear(keys, min(SLICE, self.timeout)):
                break
            self.look_for_failure(f"{what} at step {step}")
            missing = [rank for rank, key in zip(expected, keys, strict=True) if not self._store.check([key])]
            if self.board is not None:
                # In gossip a slow worker may take its time, as long as it lives. Twice the time-out, since its
                # background may itself be waiting for one that does not answer.
                for rank in life.silent(missing, 2 * self.timeout):
                    self.board.drop(rank, f"no sign of life for {2 * self.timeout:g} s, says rank {self.rank}")
                self.board.look()
            elif time.monotonic() > deadline:
                raise PeerError(f"rank {self.rank}: {what} at step {step} waited {timeout:g} s for {ranks(missing)}")
        if self.board is not None:
            self._agree_on_members(f"meet/{number}/members", expected)

    def _agree_on_members(self, key: str, expected: list[int]) -> None:
        """Who is dropped meanwhile is seen by some and not by others: the first to be done decides for all."""
        assert self.board is not None
        self.members = json.loads(self._store.compare_set(key, "", json.dumps(expected)))
        if self.rank not in self.members:
            why = self.board.look().get(self.rank, "it came too late to a meeting")
            raise Dropped(f"rank {self.rank} was dropped, the others go on without it: {why}")

    def look_for_failure(self, doing: str) -> None:
        """Raise if some rank has failed."""
        try:
            found = self._store.get("failed") if self._store.check(["failed"]) else None
        except DistNetworkError as gone:
            raise StoreGone(f"rank {self.rank}: {doing} cannot end: {STORE_IS_GONE}") from gone
        if found is not None:
            raise PeerError(f"rank {self.rank}: {doing} cannot end: {found.decode()}")

    def look_around(self, doing: str, needed: dict[int, str], number: int) -> None:
        """Raise if what this rank waits for can never come: a rank failed, or waits for this one at a meeting.

        `needed`: the ranks that take part in the message, with its course as they count; `number` is its place there.
        A rank at a meeting that has started the message is no hindrance: it was done sooner, and the rest will come.
        """
        try:
            self.look_for_failure(doing)
        except StoreGone:
            return  # its host may be done already, while the last message is still on its way here
        for rank, course in needed.items():
            key = f"meet/{self._meetings + 1}/{rank}"
            if rank == self.rank or not self._store.check([key]):
                continue
            what, step, _, started = json.loads(self._store.get(key))
            if started.get(course, 0) < number:
                raise PeerError(
                    f"rank {self.rank}: {doing} cannot end: rank {rank} is at {what} since its step {step}, "
                    f"and all ranks must come there"
                )

    def fail(self, text: str) -> None:
        """The first to fail is the one that everybody names; with gossip, it is dropped and the others go on."""
        try:
            if self.board is not None:
                self.board.drop(self.rank, text)
                return
            self._store.compare_set("failed", "", text)
            self._store.set(f"alive/{self.rank}", "")
        except DistNetworkError:
            return  # nobody is left to read it

    def roll_call(self, doing: str, cause: str) -> PeerError:
        """A connection broke or nothing came in time: find out who is to blame."""
        try:
            self._store.set(f"alive/{self.rank}", "")
            self.look_for_failure(doing)
            self._wait_for_life()
            self.look_for_failure(doing)
        except DistNetworkError:
            return StoreGone(f"rank {self.rank}: {doing} failed, {STORE_IS_GONE} ({cause})")
        except PeerError as named:
            return named
        silent = [rank for rank in range(self.size) if not self._store.check([f"alive/{rank}"])]
        whom = f"no sign of life from {ranks(silent)}" if silent else "all ranks are alive"
        return PeerError(f"rank {self.rank}: {doing} failed, {whom} ({cause})")

    def _wait_for_life(self) -> None:
        deadline = time.monotonic() + GRACE
        for rank in range(self.size):
            self._appear([f"alive/{rank}"], deadline - time.monotonic())

    def _appear(self, keys: list[str], seconds: float) -> bool:
        """Whether all keys are there within so many seconds. The store's own wait would write two lines to the user's
        terminal whenever it is over in vain; this asks ever more seldom, and is late by a tenth of the wait at most."""
        start = time.monotonic()
        try:
            while not self._store.check(keys):
                waited = time.monotonic() - start
                if waited >= seconds:
                    return False
                time.sleep(min(max(0.001, waited / 10), seconds - waited))
        except DistNetworkError as gone:
            raise StoreGone(f"rank {self.rank}: {STORE_IS_GONE}") from gone
        return True


class Life:
    """Watches the heartbeats that workers with gossip put in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[int, tuple[int, float]] = {}  # the last heartbeat, and when it was new

    def silent(self, suspects: list[int], seconds: float) -> list[int]:
        """Which of them have given no new heartbeat for so long, while being watched."""
        now = time.monotonic()
        for rank in suspects:
            beat = self._store.add(beat_key(rank), 0)
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = beat, now
        return [rank for rank in suspects if now - self._seen[rank][1] > seconds]


def beat_key(rank: int) -> str:
    return f"gossip/beat/{rank}"


def ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
