"""The process that creates an emulated network and keeps it alive. When it ends, the kernel removes the network.

It is run by its file path, not as a module of the package, so that it starts without importing torch. It creates
nothing in the machine's own network namespace: switch and hosts are unnamed namespaces, which exist only as long as
this process holds them open.

Protocol: the first line of JSON on standard input describes the network; each further line is "counters", or the state
of a link: {"host": 2, "state": "down"}. Each line gets one line of JSON as reply.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
from typing import Any

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_ADDR_GEN_MODE_NONE = 1
_TBF_HANDLE = 0x10000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
# Without the script's folder in the path of imports, which has modules with common names; since Python 3.11.
INTERPRETER = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else [])]
_TUN_QUEUE = 4096  # packets that the relay may be late to read


class CannotEmulateError(Exception):
    """Raised when this machine lacks something. The message is shown to the user."""


def unshare(flags: int) -> None:
    _check(_libc().unshare(flags))


def setns(descriptor: int, kind: int) -> None:
    _check(_libc().setns(descriptor, kind))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def acquire_network_privileges() -> bool:
    """Enters a new user namespace if this process may not create network namespaces otherwise.

    Returns:
        Whether a user namespace was needed.
    """
    try:
        unshare(CLONE_NEWNET)
    except PermissionError:
        pass
    except OSError as error:
        raise CannotEmulateError(f"the kernel cannot create another network namespace ({error.strerror})") from error
    else:
        return False
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")  # otherwise the kernel rejects the gid_map
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
        unshare(CLONE_NEWNET)
    except OSError as error:
        raise CannotEmulateError(
            "this user is not allowed to create a network namespace, neither directly nor in a user namespace "
            f"({error.strerror}); an administrator can allow it (sysctl user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in a container, "
            "--privileged), or run it as root"
        ) from error
    return True


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _new_namespace() -> int:
    unshare(CLONE_NEWNET)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


class Fabric:
    """The switch and the hosts, with a netlink socket in each namespace."""

    def __init__(self, links: list[dict[str, Any]]) -> None:
        from pyroute2 import IPRoute

        self.namespaces = [_new_namespace() for _ in links]
        self.hosts = []
        for namespace in self.namespaces:
            setns(namespace, CLONE_NEWNET)
            self.hosts.append(IPRoute())
        unshare(CLONE_NEWNET)
        self.switch = IPRoute()
        self.ports: list[int] = []
        bridge = self._add_bridge()
        for index, link in enumerate(links):
            self._connect(index, link, bridge)

    def _add_bridge(self) -> int:
        self.switch.link("add", ifname="switch", kind="bridge", br_stp_state=0, br_mcast_snooping=0)
        (bridge,) = self.switch.link_lookup(ifname="switch")
        _up(self.switch, bridge)
        return int(bridge)

    def _connect(self, index: int, link: dict[str, Any], bridge: int) -> None:
        peer = {"ifname": "eth0", "net_ns_fd": self.namespaces[index]}
        self.switch.link("add", ifname=f"port{index}", kind="veth", master=bridge, peer=peer)
        (port,) = self.switch.link_lookup(ifname=f"port{index}")
        self.ports.append(port)
        host = self.hosts[index]
        (loopback,) = host.link_lookup(ifname="lo")
        (eth0,) = host.link_lookup(ifname="eth0")
        host.link("set", index=loopback, state="up")
        host.addr("add", index=eth0, address=link["address"], prefixlen=link["prefix"])
        for netlink, device in ((host, eth0), (self.switch, port)):
            netlink.link("set", index=device, gso_max_segs=link["frames_per_segment"])
            _shape(netlink, device, link)
            _up(netlink, device)

    def set_link(self, host: int, state: str) -> None:
        """Sets the link of a host "up" or "down" at the switch, which then drops what the host sends or should get."""
        self.switch.link("set", index=self.ports[host], state=state)

    def answer(self, request: Any) -> Any:
        if request == "counters":
            return self.counters()
        return self.set_link(**request)

    def counters(self) -> list[tuple[int, int]]:
        """Returns the bytes sent and received by each host, counted by its shapers as whole frames.

        The counters of the devices would count a TCP segment of several frames as a single frame.
        """
        received = _shaped_nbytes(self.switch)
        sent = [sum(_shaped_nbytes(host).values()) for host in self.hosts]
        return [(nbytes, received[port]) for nbytes, port in zip(sent, self.ports, strict=True)]


class RelayedFabric:
    """Hosts with a TUN device each, and the process that carries their packets (`relay.py`)."""

    def __init__(self, links: list[dict[str, Any]]) -> None:
        from pyroute2 import IPRoute

        self.namespaces, relayed = [], []
        for link in links:
            self.namespaces.append(_new_namespace())
            descriptor = _open_tun("eth0")
            with IPRoute() as host:
                (loopback,) = host.link_lookup(ifname="lo")
                (eth0,) = host.link_lookup(ifname="eth0")
                host.link("set", index=loopback, state="up")
                host.addr("add", index=eth0, address=link["address"], prefixlen=link["prefix"])
                host.link("set", index=eth0, mtu=link["mtu"], txqlen=_TUN_QUEUE)
                _up(host, eth0)
            _allow_window(round(4 * link["bytes_per_second"] * 2 * link["delay_seconds"]))
            relayed.append({**link, "descriptor": descriptor})
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "relay.py")
        self._relay = subprocess.Popen(
            [*INTERPRETER, script, json.dumps(relayed)],
            pass_fds=[link["descriptor"] for link in relayed],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for link in relayed:
            os.close(link["descriptor"])

    def answer(self, request: Any) -> Any:
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(json.dumps(request).encode() + b"\n")
        self._relay.stdin.flush()
        return json.loads(self._relay.stdout.readline())


def _allow_window(nbytes: int) -> None:
    """Lets a TCP connection of this host have so much data in flight, if the kernel's limits are lower.

    With the limits of 4 and 6 MB, of which overhead takes half, one connection reaches 440 Mbit/s at 50 ms.
    """
    for name in ("tcp_rmem", "tcp_wmem"):
        path = f"/proc/sys/net/ipv4/{name}"
        with open(path) as file:
            least, default, most = map(int, file.read().split())
        if nbytes > most:
            with contextlib.suppress(OSError):  # a read-only /proc: long fast links reach less than their rate
                _write(path, f"{least} {default} {nbytes}")


def _open_tun(name: str) -> int:
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN_NO_PI))
    except OSError as error:
        raise CannotEmulateError(
            f"delay, jitter and loss need TUN devices, and /dev/net/tun cannot be used ({error.strerror}): load the "
            f"kernel module tun, in a container pass --device /dev/net/tun, or give only a rate"
        ) from error
    return descriptor


def _up(netlink: Any, device: int) -> None:
    # Without a link-local IPv6 address there are no neighbour announcements, which the counters would include.
    if os.path.exists("/proc/net/if_inet6"):
        mode = {"attrs": [["IFLA_INET6_ADDR_GEN_MODE", _ADDR_GEN_MODE_NONE]]}
        netlink.link("set", index=device, IFLA_AF_SPEC={"attrs": [["AF_INET6", mode]]})
    netlink.link("set", index=device, state="up")


def _shape(netlink: Any, device: int, link: dict[str, Any]) -> None:
    from pyroute2.netlink.rtnl import TC_H_ROOT

    buckets = {"rate": link["bytes_per_second"], "burst": link["burst_nbytes"], "limit": link["queue_nbytes"]}
    netlink.tc("add", "tbf", device, handle=_TBF_HANDLE, parent=TC_H_ROOT, **buckets)


def _shaped_nbytes(netlink: Any) -> dict[int, int]:
    shapers = (shaper for shaper in netlink.tc("dump") if shaper.get("kind") == "tbf")
    return {shaper["index"]: shaper.get("stats2").get("TCA_STATS_BASIC")["bytes"] for shaper in shapers}


def _create(links: list[dict[str, Any]]) -> tuple[Fabric | RelayedFabric, dict[str, Any]]:
    try:
        from pyroute2.netlink.exceptions import NetlinkError
    except ImportError as error:
        raise CannotEmulateError("pyroute2 is not installed: pip install 'laconic[emulate]'") from error
    in_user_namespace = acquire_network_privileges()
    try:
        fabric = RelayedFabric(links) if any(link["is_relayed"] for link in links) else Fabric(links)
    except (OSError, NetlinkError) as error:
        raise CannotEmulateError(f"the kernel rejected the emulated network: {error}") from error
    user = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC) if in_user_namespace else None
    return fabric, {"namespaces": fabric.namespaces, "user": user}


def _watch(parent: int) -> int:
    """Returns a descriptor that becomes readable when the parent process ends.

    End-of-file on standard input is not enough: a forked child of the parent may hold the other end of the pipe open.
    PR_SET_PDEATHSIG is not enough either: it fires when the thread that started this process ends.
    """
    try:
        watched = os.pidfd_open(parent)
    except OSError as error:
        raise CannotEmulateError(f"the kernel does not support watching a process (pidfd_open: {error})") from error
    if os.getppid() != parent:
        sys.exit("the parent has ended already")
    return watched


def _reply(message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(parent: int) -> None:
    """Creates the network and answers requests until the parent process ends."""
    try:
        watched = _watch(parent)
        fabric, description = _create(json.loads(sys.stdin.buffer.readline()))
    except CannotEmulateError as error:
        _reply({"error": str(error)})
        return
    _reply(description)
    while True:
        ready, _, _ = select.select([sys.stdin.buffer, watched], [], [])
        if watched in ready or not (line := sys.stdin.buffer.readline()):
            return
        _reply(fabric.answer(json.loads(line)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
