"""Emulated networks on the real kernel: who reaches whom, how links are shaped, and that nothing is left behind."""

import errno
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from laconic.emulate import EmulationError, Host, Link, Network, holder, parse_links
from laconic.emulate.network import Namespace

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces exist only on Linux")
ROOT = Path(__file__).parents[2]
PORT = 4000

# Its children do not inherit from this process: like the workers of a comparison, they get hosts through pickle.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["laconic.emulate"])


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with ExitStack() as stack:
        try:
            network = stack.enter_context(Network(parse_links("100mbit,20mbit,1gbit", workers=3)))
        except EmulationError as error:
            pytest.skip(str(error))
        yield network


def start(work: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    ours, theirs = forkserver.Pipe()
    process = forkserver.Process(target=work, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def answer(work: Callable[..., None], *arguments: Any) -> Any:
    process, pipe = start(work, *arguments)
    received = pipe.recv()
    process.join()
    return received


def serve(host: Host, pipe: Connection) -> None:
    host.enter()
    with socket.create_server((host.address, PORT)) as server:
        pipe.send("ready")
        flow, (peer, _) = server.accept()
        with flow:
            nbytes = 0
            while data := flow.recv(1 << 16):
                nbytes += len(data)
        pipe.send((peer, nbytes))


def deliver(host: Host, target: str, nbytes: int, pipe: Connection) -> None:
    host.enter()
    with socket.create_connection((target, PORT)) as flow:
        flow.sendall(bytes(nbytes))
    pipe.send("sent")


def transfer(source: Host, target: Host, nbytes: int) -> tuple[str, int]:
    server, arrived = start(serve, target)
    assert arrived.recv() == "ready"
    assert answer(deliver, source, target.address, nbytes) == "sent"
    peer, received = arrived.recv()
    server.join()
    return peer, received


def reach(host: Host, target: str, pipe: Connection) -> None:
    """Sends the error of connecting, or 0."""
    host.enter()
    with socket.socket() as flow:
        flow.settimeout(0.5)
        pipe.send(flow.connect_ex((target, PORT)))


def describe(host: Host, pipe: Connection) -> None:
    """Sends the interfaces, the error of connecting to the outside, and whether loopback works."""
    host.enter()
    with socket.socket() as outward:
        outside = outward.connect_ex(("192.0.2.1", 80))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        loopback = True
    pipe.send(({name for _, name in socket.if_nameindex()}, outside, loopback))


def shapers(host: Host, pipe: Connection) -> None:
    """Sends rate, queue limit and frames per segment of each interface, as the kernel reports them."""
    from pyroute2 import IPRoute

    host.enter()
    with IPRoute() as netlink:
        names = {link["index"]: link.get("ifname") for link in netlink.link("dump")}
        segments = {link.get("ifname"): link.get("gso_max_segs") for link in netlink.link("dump")}
        found = {}
        for discipline in netlink.tc("dump"):
            if discipline.get("kind") == "tbf":
                parameters = discipline.get("options").get("TCA_TBF_PARMS")
                name = names[discipline["index"]]
                found[name] = (parameters["rate"], parameters["limit"], segments[name])
    pipe.send(found)


def test_a_message_arrives_and_the_counters_include_it(network: Network) -> None:
    slower, bystander, faster = network.hosts[0], 1, network.hosts[2]  # in this direction no frames are dropped
    before = network.counters()
    nbytes = 1_000_000
    assert transfer(slower, faster, nbytes) == (slower.address, nbytes)
    after = network.counters()
    sent, received = ([b[i] - a[i] for a, b in zip(before, after, strict=True)] for i in (0, 1))
    # a frame has 66 bytes of header for 1448 of payload: 4.6 %
    assert 1.04 < sent[0] / nbytes < 1.06
    assert 1.04 < received[2] / nbytes < 1.06
    # acknowledgements, one for two frames or fewer
    assert 0 < sent[2] < 0.05 * nbytes
    assert abs(received[0] - sent[2]) < 200
    # the third host received only the ARP request
    assert sent[bystander] == 0
    assert received[bystander] < 200


@pytest.mark.usefixtures("network")
def test_an_idle_network_is_silent() -> None:
    with Network([Link(10_000_000)] * 2) as network:
        assert answer(describe, network.hosts[0])[2]
        assert network.counters() == [(0, 0), (0, 0)]


def test_a_host_has_only_its_link_and_no_route_outside(network: Network) -> None:
    for host in network.hosts:
        assert answer(describe, host) == ({"lo", "eth0"}, errno.ENETUNREACH, True)
    assert [host.address for host in network.hosts] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]


def test_each_link_is_shaped_in_both_directions_at_its_rate(network: Network) -> None:
    expected = [(link.frame_bytes_per_second, link.queue_nbytes, link.frames_per_segment) for link in network.links]
    assert [round(rate * 8 / 1e6) for rate, _, _ in expected] == [105, 21, 1046]
    assert [answer(shapers, host) for host in network.hosts] == [{"eth0": shaper} for shaper in expected]
    assert network._holder is not None
    switch = Namespace.at(f"/proc/{network._holder.pid}/ns/net")
    found = answer(shapers, replace(network.hosts[0], network_namespace=switch))
    assert found == {f"port{index}": shaper for index, shaper in enumerate(expected)}


@pytest.mark.usefixtures("network")
def test_nothing_is_added_to_the_machines_own_network() -> None:
    before = socket.if_nameindex()
    with Network([Link(10_000_000)]):
        assert socket.if_nameindex() == before
    assert socket.if_nameindex() == before


OWNER = """
import os, pickle, signal, sys
from laconic.emulate import Link, Network
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
with Network([Link(10_000_000)] * 2) as network:
    if os.fork() == 0:
        # A child that outlives its parent and holds all of its descriptors must not keep the network alive.
        sys.stdin.read()
        os._exit(0)
    sys.stdout.buffer.write(pickle.dumps((network.hosts, network._holder.pid)))
    sys.stdout.buffer.flush()
    os.close(1)
    if "raise" in sys.argv:
        raise ZeroDivisionError
    signal.pause()
"""


def try_to_enter(host: Host, pipe: Connection) -> None:
    try:
        host.enter()
    except EmulationError as error:
        pipe.send(str(error))
    else:
        pipe.send("entered")


def witness(host: Host, pipe: Connection) -> None:
    """Enters one host, and reports when the switch at the other end of its link is gone."""
    host.enter()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as changes:
        changes.bind((0, 1))  # RTMGRP_LINK
        pipe.send({name for _, name in socket.if_nameindex()})
        while "eth0" in {name for _, name in socket.if_nameindex()}:
            changes.recv(1 << 16)
    pipe.send("gone")


@pytest.mark.parametrize(
    ("end", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, -signal.SIGINT), ("raise", 1)]
)
@pytest.mark.usefixtures("network")
def test_nothing_is_left_when_the_owner_ends(end: signal.Signals | str, status: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(end)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        hosts, holder_pid = pickle.load(process.stdout)
        try:
            holder_ends = os.pidfd_open(holder_pid)
        except ProcessLookupError:
            assert end == "raise"
            holder_ends = None
        if isinstance(end, signal.Signals):
            _, pipe = start(witness, hosts[0])
            assert pipe.recv() == {"lo", "eth0"}
            if end is signal.SIGINT:
                os.killpg(process.pid, end)  # as the terminal does on Ctrl-C
            else:
                process.send_signal(end)
            assert pipe.recv() == "gone"
        if holder_ends is not None:
            assert select.select([holder_ends], [], [], 30)[0]
            os.close(holder_ends)
        assert process.wait() == status
        assert "closed" in answer(try_to_enter, hosts[1])


@pytest.mark.usefixtures("network")
def test_the_owner_is_told_that_the_holder_died() -> None:
    with Network([Link(10_000_000)]) as network:
        assert network._holder is not None
        network._holder.kill()
        with pytest.raises(EmulationError, match="ended unexpectedly, with status -9"):
            network.counters()
        with pytest.raises(EmulationError, match="closed"):
            network.counters()


def test_a_process_with_threads_may_not_enter(network: Network) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(EmulationError, match=r"before it starts threads, not with \d+ running"):
            network.hosts[0].enter()
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("count", [0, 65])
def test_number_of_hosts(count: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and 64, not {count}"):
        Network([Link(10_000_000)] * count)


# Inside a user namespace, the test below loses its privilege to read files: nothing may be imported there.
WITHOUT_PRIVILEGES = """
import os, signal, socket
signal.alarm(30)
from laconic.emulate import Network, parse_links
with Network(parse_links("100mbit", workers=2)) as network:
    assert network.hosts[0].user_namespace is not None
    ready, tell = os.pipe()
    if os.fork() == 0:
        network.hosts[1].enter()
        with socket.create_server((network.hosts[1].address, 4000)) as server:
            os.write(tell, b"!")
            flow, _ = server.accept()
            flow.sendall(flow.recv(100).upper())
        network.close()  # does nothing in a forked child
        os._exit(0)
    os.read(ready, 1)
    if os.fork() == 0:
        uid = os.getuid()
        network.hosts[1].enter()  # then moves from one host to another
        network.hosts[0].enter()
        assert os.getuid() == uid
        with socket.socket() as flow:
            flow.connect((network.hosts[1].address, 4000))
            flow.sendall(b"hello")
            print(flow.recv(100).decode(), flush=True)
        os._exit(0)
    assert os.wait()[1] == os.wait()[1] == 0
    assert min(network.counters()[0]) > 0
"""


def test_a_link_that_is_cut_and_healed(network: Network) -> None:
    first, second = network.hosts[:2]
    network.cut(1)
    assert answer(reach, first, second.address) not in (0, errno.ECONNREFUSED)
    network.heal(1)
    assert transfer(first, second, 1000) == (first.address, 1000)
    with pytest.raises(ValueError, match="from 0 to 2, not 3"):
        network.cut(3)


def test_without_privileges() -> None:
    command = [sys.executable, "-c", WITHOUT_PRIVILEGES]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("run as root, and setpriv, which would drop the privileges, is not installed")
        # The privilege to read files is kept, because Python may be installed where only root can read.
        capabilities = "-all,+dac_read_search"
        drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        command = [*drop, f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}", *command]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "this user is not allowed to create a network namespace" in result.stderr:
        pytest.skip(result.stderr.splitlines()[-1])
    assert (result.returncode, result.stdout) == (0, "HELLO\n"), result.stderr


def test_a_relayed_network_in_a_user_namespace() -> None:
    """As root of a user namespace only, which has no privileges outside, but may open /dev/net/tun."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare, which would make a user namespace, is not installed")
    script = WITHOUT_PRIVILEGES.replace('"100mbit"', '"100mbit+5ms~1ms%0.1"')
    script = script.replace("    assert network.hosts[0].user_namespace is not None\n", "")
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", script]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "unshare failed" in result.stderr or "/dev/net/tun cannot be used" in result.stderr:
        pytest.skip(result.stderr.splitlines()[-1])
    assert (result.returncode, result.stdout) == (0, "HELLO\n"), result.stderr


def test_the_error_says_when_the_kernel_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(flags: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(holder, "unshare", deny)
    with pytest.raises(
        holder.CannotEmulateError, match=r"not allowed to create a network namespace.*user\.max_user_namespaces"
    ):
        holder.acquire_network_privileges()


def test_the_error_on_other_platforms_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(EmulationError, match=r"Linux, and this is darwin.*--link none"), Network([Link(10_000_000)]):
        pass


def test_the_error_without_pyroute2_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyroute2.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EmulationError, match=r"pyroute2 is not installed.*--link none"), Network([Link(10_000_000)]):
        pass
