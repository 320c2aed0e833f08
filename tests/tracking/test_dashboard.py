"""The live view of a job: what rank 0 serves, and that nothing about it can stop training."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

import laconic
from laconic import cli
from laconic.tracking import dashboard as dashboard_module
from laconic.tracking import report as report_module
from laconic.tracking.report import Overview, Report
from tests.helpers import Silent, build_model, rank, sgd, train_step, unused_port, worker_of

LIMIT_SECONDS = 60.0  # of any wait here
SAMPLE = re.compile(r'^(\w+)(?:\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)$')


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(address + path, timeout=LIMIT_SECONDS) as answer:
        text: str = answer.read().decode()
        return text


def parse(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Reads Prometheus' text format as its own parser does: every sample has a type, and values are floats."""
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            kinds[name], samples[name] = kind, []
        elif not line.startswith("# HELP "):
            match = SAMPLE.match(line)
            assert match, line
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
            samples[match[1]].append((labels, float(match[3])))
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())
    return samples


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("laconic-dashboard")]


def test_a_job_of_two_processes() -> None:
    def run() -> Any:
        dashboard_module.REPORT_SECONDS = 0.1
        model = build_model()
        optimizer = sgd(model)
        found: Any = None
        with laconic.Worker(model, optimizer, laconic.LocalSGD(period=2), dashboard=0) as worker:
            for step in range(4):
                train_step(model, optimizer, worker.rank, step)
            if worker.rank == 0:
                address = worker.dashboard
                assert address is not None
                wait_for(lambda: all(r["step"] == 4 for r in json.loads(get(address, "/status.json"))["ranks"]))
                argv, sys.argv = sys.argv, ["laconic", "top", address.removeprefix("http://"), "--once"]
                with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
                    cli.main()
                sys.argv = argv
                found = (
                    get(address, "/status.json"),
                    get(address, "/metrics"),
                    printed.getvalue(),
                    other_requests(address),
                )
            else:
                assert worker.dashboard is None
        if worker.rank == 0:
            with pytest.raises(OSError, match="refused"):
                get(str(address), "/")
        assert threads() == []
        return found, float(worker.meter.total.nbytes("foreground"))

    ((found, nbytes), _) = laconic.spawn(run, 2)
    status, metrics, printed, others = found
    for number, row in enumerate(json.loads(status)["ranks"]):
        assert (row["rank"], row["state"], row["step"], row["members"]) == (number, "training", 4, 2)
        assert row["error"] == ""
        assert row["last_seen_seconds"] < LIMIT_SECONDS
    samples = parse(metrics)
    ranks = [{"rank": "0"}, {"rank": "1"}]
    assert samples["laconic_step"] == [(label, 4.0) for label in ranks]
    assert samples["laconic_up"] == [(label, 1.0) for label in ranks]
    sent = {(labels["rank"], labels["channel"]): n for labels, n in samples["laconic_sent_bytes_total"]}
    assert sent["0", "foreground"] == sent["1", "foreground"] == nbytes
    for name in ("waiting_share", "last_seen_seconds", "link_bytes_per_second", "waited_seconds_total"):
        assert [labels for labels, _ in samples[f"laconic_{name}"]] == ranks
    assert samples["laconic_job_info"][0][0]["method"] == "LocalSGD"
    assert samples["laconic_last_error_info"] == []
    assert "LocalSGD: 2 of 2 ranks train" in printed
    assert len(re.findall(r"│ +[01] │ \S+ +│ training │ +4 │", printed)) == 2
    assert others == {"POST /": 501, "GET /../worker.py": 404, "HEAD /": 200, "evil": 403, "localhost": 200}


def other_requests(address: str) -> dict[str, int]:
    """Returns the codes of answers to requests that are not allowed, or unusual."""
    host = address.removeprefix("http://")
    port = host.rpartition(":")[2]

    def code(method: str, path: str, name: str = host) -> int:
        connection = http.client.HTTPConnection(host, timeout=LIMIT_SECONDS)
        connection.request(method, path, headers={"Host": name})
        answer = connection.getresponse()
        assert method == "POST" or "default-src 'none'" in (answer.getheader("Content-Security-Policy") or "")
        connection.close()
        return answer.status

    return {
        "POST /": code("POST", "/"),
        "GET /../worker.py": code("GET", "/../worker.py"),
        "HEAD /": code("HEAD", "/"),
        "evil": code("GET", "/status.json", f"evil.example:{port}"),
        "localhost": code("GET", "/status.json", f"localhost:{port}"),
    }


def test_a_rank_that_is_killed_stays_in_the_view_and_the_others_go_on() -> None:
    def run() -> Any:
        dashboard_module.REPORT_SECONDS, report_module.SILENT_SECONDS = 0.1, 0.7
        model = build_model()
        optimizer = sgd(model)
        gossip = laconic.A2CiD2("complete", rate=1.0, slack=4)
        with laconic.Worker(model, optimizer, gossip, dashboard=0, timeout=20.0) as worker:
            deadline, step, found = time.monotonic() + LIMIT_SECONDS, 0, None
            while found is None and time.monotonic() < deadline:
                with contextlib.suppress(UserWarning):  # of the rank that was dropped
                    train_step(model, optimizer, worker.rank, step)
                step += 1
                if step == 5 and worker.rank == 2:
                    time.sleep(0.3)  # for a report
                    os.kill(os.getpid(), signal.SIGKILL)
                if worker.rank == 1:
                    time.sleep(0.005)
                    found = True if step == 200 else None
                if worker.rank == 0:
                    time.sleep(0.005)
                    assert worker.dashboard is not None
                    last = json.loads(get(worker.dashboard, "/status.json"))["ranks"][2]
                    found = last if last["state"] == "silent" else None
        return found, worker.step

    first, second, third = laconic.spawn(run, 3, spare_survivors=True)
    assert isinstance(third, laconic.WorkerFailed)
    found, steps = first
    assert found["step"] == 5
    assert found["last_seen_seconds"] >= 0.7
    assert steps > 5
    assert second[1] == 200


def test_a_failure_of_the_view_is_logged_once_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Silent):
        def setup(self, worker: Any) -> None:
            def post(text: str) -> None:
                raise ConnectionError("no board")

            worker.comm.bulletin = lambda name: type("Board", (), {"post": staticmethod(post)})()

    model = build_model()
    optimizer = sgd(model)
    with caplog.at_level(logging.WARNING), laconic.Worker(model, optimizer, Broken(), dashboard=0) as worker:
        wait_for(lambda: caplog.records)
        for step in range(3):
            train_step(model, optimizer, 0, step)
        assert worker.dashboard is not None
        assert json.loads(get(worker.dashboard, "/status.json"))["ranks"][0]["state"] == "no report"
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0: the live view gets no more reports of this rank, training goes on: ConnectionError: no board"
    ]
    assert threads() == []


def test_the_last_error_is_shown() -> None:
    model = build_model()
    with laconic.Worker(model, sgd(model), Silent(), dashboard=0) as worker:
        assert worker.dashboard is not None
        logging.getLogger("laconic").warning('a "quoted"\nproblem \\ here')
        wait_for(lambda: json.loads(get(str(worker.dashboard), "/status.json"))["ranks"][0]["error"])
        samples = parse(get(worker.dashboard, "/metrics"))
    ((labels, value),) = samples["laconic_last_error_info"]
    assert labels == {"rank": "0", "error": r"a \"quoted\"\nproblem \\ here"}
    assert value == 1.0


def test_an_error_ends_the_view() -> None:
    model = build_model()
    with pytest.raises(KeyError), laconic.Worker(model, sgd(model), Silent(), dashboard=0) as worker:
        raise KeyError("of the user")
    with pytest.raises(OSError, match="refused"):
        get(str(worker.dashboard), "/")
    assert threads() == []


def test_a_port_that_is_taken_is_an_error_on_every_rank() -> None:
    def run(port: int) -> str:
        model = build_model()
        with pytest.raises(ValueError) as info:
            laconic.Worker(model, sgd(model), Silent(), dashboard=port)
        assert threads() == []
        return str(info.value)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first, second = laconic.spawn(run, 2, port)
    assert first == (
        f"dashboard={port}: rank 0 cannot listen at 127.0.0.1:{port}: port {port} is taken, perhaps by another job. "
        f"Choose another port, or dashboard=0 for any free one (worker.dashboard then says which)"
    )
    assert second == f"rank 0: ValueError: {first}"


def test_all_ranks_must_agree() -> None:
    def run() -> str:
        model = build_model()
        with pytest.raises(ValueError) as info:
            laconic.Worker(model, sgd(model), Silent(), dashboard=0 if rank() == 0 else None)
        assert threads() == []
        return str(info.value)

    assert laconic.spawn(run, 2) == ["all ranks must agree on dashboard: 0 on rank 0; None on rank 1"] * 2


@pytest.mark.parametrize("dashboard", [-1, 65536, True, 8080.0, "8080", ":8080", "host:port", "::1:80", "a:99999"])
def test_bad_addresses(dashboard: Any) -> None:
    model = build_model()
    with pytest.raises(
        ValueError, match=r"dashboard must be a port from 0 \(any free one\) to 65535, or a text HOST:PORT"
    ):
        laconic.Worker(model, sgd(model), Silent(), dashboard=dashboard)


def test_an_address_of_another_machine() -> None:
    model = build_model()
    with pytest.raises(
        ValueError, match=r"cannot listen at 192\.0\.2\.1:8080: 192\.0\.2\.1 is no address of this machine"
    ):
        laconic.Worker(model, sgd(model), Silent(), dashboard="192.0.2.1:8080")


def test_two_workers_one_after_another_use_the_same_port() -> None:
    port = unused_port()
    for _ in range(2):
        model = build_model()
        with laconic.Worker(model, sgd(model), Silent(), dashboard=port) as worker:
            assert json.loads(get(str(worker.dashboard), "/status.json"))["size"] == 1


def test_without_a_dashboard_nothing_runs() -> None:
    with worker_of(build_model()) as worker:
        assert worker.dashboard is None
        assert threads() == []


def test_texts_that_are_no_reports_are_ignored() -> None:
    overview = Overview("AllReduce", 2)
    overview.add({0: Report(beat=1, step=3).to_text()})
    good = json.loads(Report().to_text())
    for text in ("", "[]", "{}", "3", json.dumps(good | {"step": "x"}), json.dumps(good | {"waited_seconds": 1e999})):
        overview.add({0: text, 1: text})
    first, second = overview.status()["ranks"]
    assert (first["state"], first["step"]) == ("training", 3)
    assert second["state"] == "no report"


def test_top_without_a_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    port = unused_port()
    for words, code, message in [
        ([f"127.0.0.1:{port}", "--once"], 1, f"no dashboard answers at 127.0.0.1:{port}"),
        ([str(port)], 1, f"or its Worker was created without dashboard={port}"),
        (["nonsense"], 2, "or a text HOST:PORT such as"),
    ]:
        monkeypatch.setattr("sys.argv", ["laconic", "top", *words])
        with pytest.raises(SystemExit) as info:
            cli.main()
        assert info.value.code == code
        assert message in capsys.readouterr().err
