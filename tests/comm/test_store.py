"""The deadline of a call to the job's store."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import laconic
from laconic.comm.store import LOOK_SECONDS, JobStore, StoreGone


def open_store(timeout: float) -> JobStore:
    return JobStore(HashStore(), "this test", timeout)


def test_a_store_that_does_not_answer_is_named() -> None:
    store = open_store(timeout=0.2)
    with pytest.raises(StoreGone, match=r"the job's store, held by this test, did not answer for 0\.2 s"):
        store._caller.call(lambda _: time.sleep(1.0))
    store.close()


def test_a_process_that_was_stopped_reads_the_answer_that_came_meanwhile() -> None:
    """A process stopped for longer than the time-out used to call the store gone as soon as it continued."""

    def run() -> str:
        store = open_store(timeout=0.5)
        start = time.monotonic()

        def answer_soon_after_the_stop(_: object) -> str:
            while time.monotonic() < start + LOOK_SECONDS:
                time.sleep(0.01)
            time.sleep(0.2)
            return "answer"

        signals = f"sleep 0.1; kill -STOP {os.getpid()}; sleep {LOOK_SECONDS + 2}; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", signals]):
            return store._caller.call(answer_soon_after_the_stop)

    assert laconic.spawn(run, 1) == ["answer"]
