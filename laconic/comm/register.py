"""Meetings, failures and roll calls: how a rank learns why another one does not answer.

A collective that hangs does not say why. The job's store does: a rank that fails writes its error there, and a rank
that comes to a meeting (the end, `consensus()`, a checkpoint) signs in there. So a rank that has waited for a second
reads the store, and raises with the reason long before the time-out. A rank that was killed writes nothing: the
lifelines notice that, and pass failures on even when the store is gone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.distributed.distributed_c10d import Store

from laconic.comm.comm import PeerError
from laconic.comm.lifeline import Lifeline, Status
from laconic.comm.pairing import Dropped, Pairing
from laconic.comm.store import JobStore, StoreGone
from laconic.comm.wire import own_address

CHECK_SECONDS = 1.0  # between two looks for failures, while waiting
ROLL_CALL_SECONDS = 2.0  # in which the others must answer a roll call


class Register:
    """One rank's access to the meetings and failures in the store.

    Args:
        store: of the job.
        rank: this worker.
        size: the number of workers.
        timeout: seconds after which a wait for another rank fails.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        # torchrun's agent and `spawn` hold the store themselves; otherwise torch lets rank 0 do it.
        self._by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._holds_store = rank == 0 and not self._by_launcher
        job = JobStore(store, "the launcher" if self._by_launcher else "rank 0", timeout)
        # One job may run several Workers one after another. Each rank counts its own, and all come to the same number.
        number = job.add(f"laconic/{rank}", 1)
        self.store = job.prefixed(f"laconic/{number}")  # the keys of this Worker
        self.store.set_explain(self._explain_silence)
        self.rank, self.size, self.timeout = rank, size, timeout
        self.lifeline = Lifeline(own_address(job.address), rank, size)
        self.store.set(f"lifeline/{rank}", str(self.lifeline))
        # Called again and again while this rank waits for something else: others may need a connection to it repaired.
        self.meanwhile: list[Callable[[], None]] = []
        self.members = list(range(size))  # as of the last meeting
        self.partition = [self.members]  # all ranks of the job, in the subsets in which they communicate
        self.pairing: Pairing | None = None  # with gossip: lists the ranks that were dropped, and the rest continue
        self._meetings = 0
        self._started: dict[str, int] = {}  # operations started so far, by sequence

    def start(self, timeout: float) -> None:
        """Waits for all ranks, and connects the lifelines.

        Args:
            timeout: seconds to wait for the others, which may still import and load.
        """
        self.meet("the start", 0, None, timeout=timeout)
        self.raise_if_failed("the start")  # of a rank that was here earlier, and has given up
        addresses = self.store.multi_get([f"lifeline/{rank}" for rank in range(self.size)])
        self.lifeline.start({rank: text.decode() for rank, text in enumerate(addresses)}, self._report_death)

    def leave(self) -> None:
        """Says goodbye, after the last meeting. The rank that holds the store leaves last, since the others need it."""
        if self._holds_store:
            deadline = time.monotonic() + self.timeout
            others = {rank for rank in self.members if rank != self.rank}
            while not others <= self.lifeline.left and self.lifeline.notice is None and time.monotonic() < deadline:
                self.serve()
                time.sleep(0.002)
        self.lifeline.leave()
        self.store.close()

    def serve(self) -> None:
        """Repairs connections that others need, while this rank waits for something else."""
        for serve in self.meanwhile:
            serve()

    def count(self, sequence: str) -> int:
        """Counts another operation, and returns its number in its sequence: that of a channel, or of a pair on it."""
        self._started[sequence] = self._started.get(sequence, 0) + 1
        return self._started[sequence]

    def meet(self, what: str, step: int, note: Any, *, timeout: float | None = None) -> list[Any]:
        """Implements `Comm.meet`."""
        with self._naming_store(f"{what} at step {step}"):
            return self._meet(what, step, note, timeout or self.timeout)

    def _meet(self, what: str, step: int, note: Any, timeout: float) -> list[Any]:
        self._meetings += 1
        number = self._meetings
        self.store.set(f"meet/{number}/{self.rank}", json.dumps([what, step, note, self._started]))
        self._wait_for_members(number, what, step, timeout)
        signed = [json.loads(text) for text in self.store.multi_get([f"meet/{number}/{r}" for r in self.members])]
        if number > 2:  # all ranks have left the last one, but one that gossip has dropped may still be there
            self._delete_meeting(number - 2)
        if any(other[0] != what for other in signed):
            places = "; ".join(
                f"rank {rank}: {w} (step {s})" for rank, (w, s, *_) in zip(self.members, signed, strict=True)
            )
            raise PeerError(
                f"the ranks wait at different places, and all must come to the same one: {places}"
                f"{''.join({_hint(other[0]) for other in signed})}"
            )
        return [note for _, _, note, _ in signed]

    def _delete_meeting(self, number: int) -> None:
        keys = [f"meet/{number}/{self.rank}"]
        if self.pairing is not None:
            keys += [f"meet/{number}/members", f"alive/{number}/{self.rank}", f"roll call/{number}"]
        self.store.delete(keys)

    def _wait_for_members(self, number: int, what: str, step: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        heartbeats = Heartbeats(self.store)
        while True:
            expected = [rank for rank in self.members if self.pairing is None or rank not in self.pairing.dropped]
            keys = [f"meet/{number}/{rank}" for rank in expected]
            if self.store.appear(keys, min(CHECK_SECONDS, self.timeout), self.serve):
                break
            self.raise_if_failed(f"{what} at step {step}")
            missing = [rank for rank, key in zip(expected, keys, strict=True) if not self.store.check([key])]
            self.raise_if_elsewhere(f"{what} at step {step}", missing)
            if self.pairing is not None:
                for rank, why in self._find_lost(heartbeats, missing).items():
                    self.pairing.drop(rank, f"{why}, says rank {self.rank}")
                self.pairing.read()
            elif time.monotonic() > deadline:
                raise self._time_is_over(what, step, timeout, missing)
        if self.pairing is not None:
            self._agree_on_members(self.pairing, f"meet/{number}/members", expected)

    def raise_if_elsewhere(self, doing: str, missing: Collection[int]) -> None:
        """Raises if a missing rank waits for this one elsewhere. In a job with one sequence of meetings none does."""

    def place_of(self, rank: int) -> str | None:
        """Returns the next meeting and the step, in words, if a rank waits there already for this one."""
        key = f"meet/{self._meetings + 1}/{rank}"
        if not self.store.check([key]):
            return None
        what, step, *_ = json.loads(self.store.get(key))
        return f"{what} since its step {step}, and all ranks must come there{_hint(what)}"

    def _find_lost(self, heartbeats: Heartbeats, missing: list[int]) -> dict[int, str]:
        """Returns which of the missing ranks are lost, with gossip, and why. Ranks that are slow but live are not.

        The heartbeat of a rank that lives may stop for up to the time-out, while its background thread itself waits for
        a rank that does not answer. So after one time-out its process must be stopped or out of reach, too.
        """
        lost = dict.fromkeys(
            heartbeats.silent(missing, 2 * self.timeout), f"no sign of life for {2 * self.timeout:g} s"
        )
        suspects = [rank for rank in heartbeats.silent(missing, self.timeout) if rank not in lost]
        if suspects and self.lifeline.is_started:
            reasons: dict[Status, str] = {
                "silent": "its process may be stopped",
                "unreachable": "its host does not answer",
            }
            for rank, status in self.lifeline.survey(suspects, ROLL_CALL_SECONDS).items():
                if status in reasons:
                    lost[rank] = f"no sign of life for {self.timeout:g} s: {reasons[status]}"
        return lost

    def _agree_on_members(self, pairing: Pairing, key: str, expected: list[int]) -> None:
        """Sets the members to those that the first rank to get here expected, since ranks may see a drop or not yet."""
        self.members = json.loads(self.store.compare_set(key, "", json.dumps(expected)))
        if self.rank not in self.members:
            why = pairing.read().get(self.rank, "it came too late to a meeting")
            raise Dropped(f"rank {self.rank} was dropped, the others go on without it: {why}")

    def _time_is_over(self, what: str, step: int, timeout: float, missing: list[int]) -> PeerError:
        """Returns the error for a meeting to which some ranks did not come in time."""
        doing = f"{what} at step {step}"
        if self.lifeline.is_started:
            return self.roll_call(doing, f"waited {timeout:g} s for {ranks(missing)}{_hint(what)}", missing)
        return PeerError(f"rank {self.rank}: {doing} waited {timeout:g} s for {ranks(missing)}")

    def raise_if_failed(self, doing: str) -> None:
        """Raises if some rank has failed. `doing` describes what this rank waits for."""
        why = self.lifeline.notice
        if why is None:
            with self._naming_store(doing):
                why = self.store.get("failed").decode() if self.store.check(["failed"]) else None
        if why is not None:
            raise PeerError(f"rank {self.rank}: {doing} cannot complete: {why}")

    @contextmanager
    def _naming_store(self, doing: str) -> Iterator[None]:
        """Adds to an error of the store what this rank was doing, and whether the rank that holds the store died."""
        try:
            yield
        except StoreGone as gone:
            if gone.is_named:
                raise
            if not gone.is_silent and not self._by_launcher and not self._holds_store and self.lifeline.is_started:
                self._report_if_dead(self.lifeline.survey([0], ROLL_CALL_SECONDS))
            why = self.lifeline.notice or gone
            raise StoreGone(f"rank {self.rank}: {doing} cannot complete: {why}", is_named=True) from gone

    def _explain_silence(self, is_over: bool) -> str | None:
        """Returns why the store does not answer; None if that is not known."""
        if self.lifeline.notice is not None or not is_over or not self.lifeline.is_started:
            return self.lifeline.notice
        found = self.lifeline.survey(self.members, ROLL_CALL_SECONDS)
        self._report_if_dead(found)
        if any(status != "unreachable" for status in found.values()):
            return self.lifeline.notice
        return (
            f"for {self.timeout:g} s rank {self.rank} reached neither {self.store.name} nor any other rank: "
            f"{self._cut_link(found)}"
        )

    def _report_if_dead(self, found: Mapping[int, Status]) -> None:
        for rank, status in found.items():
            if status == "gone" and rank not in self.lifeline.left:
                self._report_death(rank)

    def _report_death(self, rank: int) -> None:
        """Called by the lifeline's thread too."""
        text = f"rank {rank} died: its process ended without leaving the Worker's block (was it killed?)"
        try:
            if self.pairing is not None:
                Pairing(self.store, self.pairing.topology, self.rank).drop(rank, f"{text}, says rank {self.rank}")
            else:
                self._announce(text)
        except PeerError:
            return  # this rank was dropped itself, or the store is gone, of which the other threads find out

    def _announce(self, text: str) -> None:
        self.lifeline.tell(text)  # first: the store may not answer
        self.store.compare_set("failed", "", self.lifeline.notice or text)

    def raise_if_stuck(self, doing: str, participants: Mapping[int, str], number: int) -> None:
        """Raises if an operation can never complete: a rank failed, or waits for this rank at a meeting.

        A rank at a meeting that has started the operation is no obstacle: it was done sooner, and the rest will come.

        Args:
            doing: describes the operation.
            participants: the ranks that take part in it, with the sequence in which each of them counts it.
            number: its number in that sequence.
        """
        self.raise_if_failed(doing)
        with self._naming_store(doing):
            self._raise_if_dropped(doing, participants)
            self._answer_roll_call(doing)
            self._raise_if_at_meeting(doing, participants, number)

    def _raise_if_at_meeting(self, doing: str, participants: Mapping[int, str], number: int) -> None:
        for rank, sequence in participants.items():
            key = f"meet/{self._meetings + 1}/{rank}"
            if rank == self.rank or not self.store.check([key]):
                continue
            what, step, _, started = json.loads(self.store.get(key))
            if started.get(sequence, 0) < number:
                raise PeerError(
                    f"rank {self.rank}: {doing} cannot complete: rank {rank} has been at {what} since its step {step}, "
                    f"and all ranks must come there{_hint(what)}"
                )

    def _raise_if_dropped(self, doing: str, participants: Mapping[int, str]) -> None:
        if self.pairing is None:
            return
        dropped = self.pairing.read()
        for rank in participants:
            if rank in dropped:
                raise PeerError(f"rank {self.rank}: {doing} cannot complete: rank {rank} was dropped: {dropped[rank]}")

    def _roll_call_key(self, rank: int | None = None) -> str:
        """Returns the key of a roll call, or of a rank's answer. With gossip there may be one after each meeting."""
        number = 0 if self.pairing is None else self._meetings
        return f"roll call/{number}" if rank is None else f"alive/{number}/{rank}"

    def fail(self, text: str) -> None:
        """Reports that this rank failed. All ranks name the first that did; with gossip, the others drop this one."""
        try:
            if self.pairing is not None:
                self.pairing.drop(self.rank, text)
            else:
                self._announce(text)
        except StoreGone:
            pass  # the others have been told directly
        self.lifeline.close()
        self.store.close()

    def roll_call(self, doing: str, cause: str, participants: Collection[int]) -> PeerError:
        """Returns the error for an operation that broke or timed out, after finding out who is to blame.

        Ranks are blamed by what is known of them, the surest first: a rank that has failed or died, one that cannot be
        reached, one of which no thread answers, and last one that is not waiting for others as this one is.

        Args:
            doing: describes the operation.
            cause: what happened to it.
            participants: the ranks that this rank waits for in it.
        """
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        missing = [rank for rank in participants if rank != self.rank]
        try:
            self.raise_if_failed(doing)
            with self._naming_store(doing):
                self.store.set(self._roll_call_key(), "")
                self._answer_roll_call(doing)
                found = self.lifeline.survey(range(self.size), ROLL_CALL_SECONDS)
                self._report_if_dead(found)
                self.raise_if_failed(doing)
                for rank in missing:
                    self.store.appear([self._roll_call_key(rank)], deadline - time.monotonic(), self.serve)
                absent = [rank for rank in missing if not self._is_waiting(rank)]
                self._drop_if_lost(found, cause)
            self.raise_if_failed(doing)
        except PeerError as named:
            return named
        return PeerError(f"rank {self.rank}: {doing} failed, {self._blame(found, absent)} ({cause})")

    def _blame(self, found: Mapping[int, Status], absent: list[int]) -> str:
        """Says what a roll call has found out. `absent`: the participants that do not wait as this rank does."""
        unreachable = [rank for rank, status in found.items() if status == "unreachable"]
        silent = [rank for rank, status in found.items() if status == "silent"]
        if unreachable and len(unreachable) == len(found):
            return f"rank {self.rank} reaches no other rank: {self._cut_link(found)}"
        if unreachable:
            return f"no connection to {ranks(unreachable)}: the host or its link is down"
        within = f"within {ROLL_CALL_SECONDS:g} s"
        if silent:
            return f"no sign of life from {ranks(silent)} {within}, though the process exists: it may be stopped"
        if absent:
            return f"did not answer {within}: {ranks(absent)} (it lives, and may be computing)"
        return "all ranks are alive"

    def _drop_if_lost(self, found: Mapping[int, Status], cause: str) -> None:
        """With gossip, the others go on without ranks that cannot be reached or are stopped."""
        if self.pairing is not None:
            for rank in self.members:
                if found.get(rank) in ("unreachable", "silent"):
                    self.pairing.drop(rank, f"{found[rank]} after {cause}, says rank {self.rank}")

    def _is_waiting(self, rank: int) -> bool:
        """Returns whether a rank has answered the roll call, or is at the next meeting already."""
        return any(self.store.check([key]) for key in (self._roll_call_key(rank), f"meet/{self._meetings + 1}/{rank}"))

    def _cut_link(self, unreachable: Collection[int]) -> str:
        if len(unreachable) > 1:
            return "the link of its own host seems to be cut"
        return f"the host of one of the two ranks, or its link, is down ({ranks(sorted([self.rank, *unreachable]))})"

    def _answer_roll_call(self, doing: str) -> None:
        if self.store.check([self._roll_call_key()]):
            self.store.set(self._roll_call_key(self.rank), doing)


class Heartbeats:
    """Reads the heartbeats that workers with gossip put in the store."""

    def __init__(self, store: JobStore) -> None:
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


def _hint(what: str) -> str:
    """Returns what to do about ranks that did not come to a meeting, if users make it by a call: `consensus()`, ….

    >>> _hint("consensus()")
    '; consensus() must be called on every rank, not only under "if rank == 0:"'
    >>> _hint("the end of the worker")
    '; if ranks have more and less data, train inside "with worker.join():"'
    """
    if what == "the end of the worker":
        return '; if ranks have more and less data, train inside "with worker.join():"'
    return f'; {what} must be called on every rank, not only under "if rank == 0:"' if what.endswith("()") else ""


def ranks(numbers: list[int]) -> str:
    """Returns the ranks in words.

    >>> ranks([1]), ranks([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, since those of torch go on with a stack trace."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
