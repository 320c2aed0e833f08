"""What a meeting costs: with a delay, every call of the store that waits for its answer is a round trip."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from torch import nn

import laconic
from laconic.comm.store import JobStore


def test_a_meeting_calls_the_store_equally_often_with_any_number_of_ranks() -> None:
    def run() -> tuple[dict[str, int], list[Any]]:
        model = nn.Linear(2, 1)
        with laconic.Worker(model, torch.optim.SGD(model.parameters()), laconic.AllReduce()) as worker:
            calls: Counter[str] = Counter()

            def count(name: str) -> None:
                original = getattr(JobStore, name)

                def counted(store: JobStore, *args: Any) -> Any:
                    calls[name] += 1
                    return original(store, *args)

                setattr(JobStore, name, counted)

            for _ in range(2):
                worker.comm.meet("the first meetings, whose keys are deleted later")
            time.sleep(0.1 * worker.rank)
            for name in ("get", "multi_get", "set", "delete"):
                count(name)
            notes = worker.comm.meet("the meeting that counts", worker.rank)
            return dict(calls), notes

    for size in (2, 4):
        for calls, notes in laconic.spawn(run, size):
            assert calls == {"set": 1, "multi_get": 1, "delete": 1}
            assert notes == list(range(size))


def test_deleted_keys_are_gone_before_the_next_call_of_the_same_rank() -> None:
    def run() -> tuple[bool, bool]:
        model = nn.Linear(2, 1)
        with laconic.Worker(model, torch.optim.SGD(model.parameters()), laconic.AllReduce()) as worker:
            store = worker.comm._register.store  # type: ignore[attr-defined]
            store.set(f"a {worker.rank}", "1")
            before = store.check([f"a {worker.rank}"])
            store.delete([f"a {worker.rank}", "b"])  # a key that is not there is no error
            return before, store.check([f"a {worker.rank}"])

    assert laconic.spawn(run, 2) == [(True, False)] * 2
