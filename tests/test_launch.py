"""laconic.spawn: results by rank, failures with their cause, and no process left behind."""

from __future__ import annotations

import os
import platform
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import laconic
from laconic.emulate import EmulationError, hosts_behind
from tests.helpers import rank


def test_results_by_rank_and_arguments() -> None:
    assert laconic.spawn(lambda a, b: (rank(), a + b), 3, 1, 2) == [(0, 3), (1, 3), (2, 3)]


def test_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = laconic.spawn(lambda: (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]), 2)
    assert found == [(1, "1")] * 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left as they are")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    def faults_of_a_step() -> float:
        lasting = []
        for step in range(30):
            if step == 10:
                begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            passing = [torch.ones(1 << 20) for _ in range(8)]  # 1024 pages each
            if step < 3:
                lasting.append(torch.ones(100_000))
            del passing
        return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin) / 20

    assert laconic.spawn(faults_of_a_step, 1)[0] < 100


def test_big_results() -> None:
    (result,) = laconic.spawn(lambda: torch.arange(3_000_000), 1)
    assert torch.equal(result, torch.arange(3_000_000))


def test_an_exception_has_its_traceback() -> None:
    def run() -> None:
        if rank() == 1:
            raise LookupError("the reason")
        time.sleep(60)

    with pytest.raises(laconic.WorkerFailed, match=r"(?s)worker 1 of 3 failed: Trace.*LookupError: the reason") as info:
        laconic.spawn(run, 3)
    assert info.value.rank == 1


def test_the_worker_that_failed_first_is_reported() -> None:
    def run() -> None:
        model = torch.nn.Linear(1, 1)
        with laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=1.0), laconic.LocalSGD(1)) as worker:
            if worker.rank == 2:
                raise LookupError("the cause")
            model(torch.ones(1)).backward()
            worker.optimizer.step()

    with pytest.raises(laconic.WorkerFailed, match="LookupError: the cause") as info:
        laconic.spawn(run, 3)
    assert info.value.rank == 2


def test_a_signal_is_named() -> None:
    def run() -> None:
        if rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(laconic.WorkerFailed, match="worker 0 of 2 failed: killed by SIGKILL"):
        laconic.spawn(run, 2)


def test_an_exit_is_named() -> None:
    with pytest.raises(laconic.WorkerFailed, match="ended with exit code 3 before its function returned"):
        laconic.spawn(lambda: os._exit(3), 1)


def test_survivors_are_spared() -> None:
    def run() -> int:
        if rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank() == 2:
            raise LookupError("the reason")
        time.sleep(0.5)  # long enough for the launcher to notice
        return rank()

    killed, one, raised = laconic.spawn(run, 3, spare_survivors=True)
    assert one == 1
    assert isinstance(killed, laconic.WorkerFailed)
    assert (killed.rank, str(killed)) == (0, "worker 0 of 3 failed: killed by SIGKILL")
    assert isinstance(raised, laconic.WorkerFailed)
    assert str(raised).endswith("LookupError: the reason\n")


def test_no_survivor_is_an_error() -> None:
    with pytest.raises(laconic.WorkerFailed, match="ended with exit code 3"):
        laconic.spawn(lambda: os._exit(3), 2, spare_survivors=True)


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    import threading

    with pytest.raises(laconic.WorkerFailed, match="cannot pickle"):
        laconic.spawn(threading.Lock, 1)


@pytest.mark.parametrize("workers", [0, -2, 1.5, "4", True])
def test_bad_number_of_workers(workers: object) -> None:
    with pytest.raises(ValueError, match=f"workers must be a whole number from 1 to 4096, not {workers!r}"):
        laconic.spawn(rank, workers)  # type: ignore[arg-type]


def test_on_emulated_hosts() -> None:
    def where() -> tuple[str, str]:
        return os.environ["GLOO_SOCKET_IFNAME"], os.environ["MASTER_ADDR"]

    try:
        with hosts_behind("10mbit,1gbit", 2) as hosts:
            places = laconic.spawn(where, 2, hosts=hosts)
    except EmulationError as error:
        pytest.skip(str(error))
    assert places == [("eth0", places[0][1])] * 2
    assert places[0][1] != "127.0.0.1"


def test_one_host_for_each_worker() -> None:
    with pytest.raises(ValueError, match="hosts must be None or have one entry for each of the 2 workers, not \\[\\]"):
        laconic.spawn(rank, 2, hosts=[])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_launcher(tmp_path: Path, sent: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        import laconic
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
        def run(folder):
            open(os.path.join(folder, f"pid-{os.getpid()}"), "w").close()
            time.sleep(60)
        if __name__ == "__main__":
            laconic.spawn(run, 2, sys.argv[1])
        """)
    )
    launcher = subprocess.Popen(
        [sys.executable, script, tmp_path], env=os.environ | {"PYTHONPATH": os.getcwd()}, stderr=subprocess.DEVNULL
    )
    pids: list[int] = []
    while len(pids) < 2:
        assert launcher.poll() is None
        time.sleep(0.05)
        pids = [int(path.name[4:]) for path in tmp_path.glob("pid-*")]
    launcher.send_signal(sent)
    launcher.wait()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)
