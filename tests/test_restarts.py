"""torchrun starts the workers again after a crash, and the example goes on by itself: docs/restarts.md."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

import laconic
from laconic.comm.attempt import own_store

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "resume.py"
STEPS = 1200
KILLS = 3


def run_without_interruption(directory: Path) -> None:
    sys.argv = [str(EXAMPLE), str(directory), str(STEPS)]
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_an_example_that_is_killed_three_times_ends_with_the_same_model(tmp_path: Path) -> None:
    laconic.spawn(run_without_interruption, 2, tmp_path / "whole")
    draw = random.Random(os.getpid())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(KILLS)]
    command += [str(EXAMPLE), str(tmp_path / "killed"), str(STEPS)]
    log = tmp_path / "log"
    with open(log, "w") as output:
        job = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
    deadline = time.monotonic() + 100
    try:
        for kill in range(KILLS):
            started: list[str] = []
            while len(started) < 2 * (kill + 1):
                assert job.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.01)
                started = re.findall(r"process (\d+), rank \d continues", log.read_text())
            time.sleep(draw.uniform(0, 0.5))
            os.kill(int(draw.choice(started[-2:])), signal.SIGKILL)
        assert job.wait(deadline - time.monotonic()) == 0, log.read_text()
    finally:
        job.kill()
        job.wait()
    models = [torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "killed")]
    for name in models[0]:
        assert torch.equal(models[0][name], models[1][name]), log.read_text()


def test_an_attempt_does_not_see_the_keys_of_a_dead_one() -> None:
    """In the second attempt rank 1 comes first, and must wait for the new rank 0: the old one has left its name."""
    store = HashStore()

    def attempt(order: tuple[int, int]) -> list[bool]:
        """Returns whether each rank has found a key that an earlier attempt has written; then both write it."""
        found: dict[int, bool] = {}

        def join(rank: int) -> None:
            own = own_store(store, rank, 2, timeout=20)
            found[rank] = own.check([f"key of {rank}"])
            own.set(f"key of {rank}", "")

        threads = [threading.Thread(target=join, args=(rank,)) for rank in order]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        return [found[0], found[1]]

    assert attempt((0, 1)) == [False, False]
    assert attempt((1, 0)) == [False, False]


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(laconic.PeerError, match=r"rank 0: the start waited 0.1 s for ranks 1, 2"):
        own_store(HashStore(), 0, 3, timeout=0.1)
    with pytest.raises(laconic.PeerError, match=r"rank 2: the start waited 0.1 s for rank 0"):
        own_store(HashStore(), 2, 3, timeout=0.1)
