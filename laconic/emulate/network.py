"""The public interface of emulated networks: hosts that a process can enter, and byte counters."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from typing_extensions import Self

from laconic.emulate import holder
from laconic.emulate.links import Link, check_hosts


class EmulationError(RuntimeError):
    """Raised when this machine cannot emulate the requested network, or a process cannot enter it."""


def _cannot_emulate(why: str) -> EmulationError:
    return EmulationError(f"cannot emulate a network: {why}. To run without emulation: --link none")


@dataclass(frozen=True)
class Namespace:
    """A kernel namespace that another process holds open.

    The inode identifies it: after the other process has ended, the path may refer to something else.
    """

    path: str
    inode: int

    @classmethod
    def at(cls, path: str) -> Self:
        """Returns the namespace that the path refers to now."""
        return cls(path, os.stat(path).st_ino)

    def join(self, kind: int) -> None:
        """Moves the calling thread into the namespace.

        Args:
            kind: CLONE_NEWNET or CLONE_NEWUSER.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise EmulationError(f"the emulated network is closed or belongs to another user ({error})") from error
        try:
            if os.fstat(descriptor).st_ino != self.inode:
                raise EmulationError("the emulated network is closed")
            holder.setns(descriptor, kind)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Host:
    """A host of an emulated network. It can be pickled, and entered by processes of the same user while it is open.

    Args:
        address: Its IP address.
        interface: The name of its network interface.
        network_namespace: Its network namespace.
        user_namespace: The user namespace that owns the network; None if root created it.
    """

    address: str
    interface: str
    network_namespace: Namespace
    user_namespace: Namespace | None

    def enter(self) -> None:
        """Moves this process and its future children into the host, permanently.

        The kernel moves only the calling thread, so a process must enter before it starts other threads.

        Raises:
            EmulationError: The process has several threads, or the network is closed.
        """
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise EmulationError(f"a process must enter a host before it starts threads, not with {threads} running")
        # A process that comes from another host is in this user namespace already; joining it again would fail.
        if self.user_namespace and os.stat("/proc/self/ns/user").st_ino != self.user_namespace.inode:
            self.user_namespace.join(holder.CLONE_NEWUSER)
        self.network_namespace.join(holder.CLONE_NEWNET)


class Network:
    """Emulates hosts on one switch, each behind its own link, for the duration of a `with` block.

    The network has no route to the outside, and adds nothing to the machine's own network. It is removed when this
    process ends, even if it is killed. Processes that have entered a host stay in it, disconnected, until they end.

    Args:
        links: One per host.

    Example (not executed by the tests of docstrings, since it needs permission to create namespaces)::

        with Network(parse_links("100mbit", workers=4)) as network:
            print([host.address for host in network.hosts])  # ['10.77.0.1', …, '10.77.0.4']
    """

    def __init__(self, links: Sequence[Link]) -> None:
        if not isinstance(links, Sequence) or not all(isinstance(link, Link) for link in links):
            raise ValueError(f"links must be a list of links, one for each host, not {links!r}")
        check_hosts(len(links), "hosts of an emulated network")
        self.links = tuple(links)
        self.hosts: list[Host] = []
        self._holder: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if self._holder is not None:
            raise RuntimeError("this network is open already: use one `with` block per Network")
        if sys.platform != "linux":
            raise _cannot_emulate(f"it needs the network namespaces of Linux, and this is {sys.platform}")
        self._owner = os.getpid()
        # A session of its own, so that Ctrl-C in the terminal does not end it before the workers. -P keeps Python from
        # importing other modules from laconic/emulate by accident.
        self._holder = subprocess.Popen(
            [*holder.INTERPRETER, holder.__file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.hosts = self._make_hosts(self._holder.pid)
        except BaseException:
            self.close()
            raise
        return self

    def _make_hosts(self, holder_pid: int) -> list[Host]:
        addresses = [f"10.77.0.{index}" for index in range(1, len(self.links) + 1)]
        reply = self._request([_describe(*pair) for pair in zip(self.links, addresses, strict=True)])
        if "error" in reply:
            raise _cannot_emulate(reply["error"])
        held = f"/proc/{holder_pid}/fd"
        user = None if reply["user"] is None else Namespace.at(f"{held}/{reply['user']}")
        return [
            Host(address, "eth0", Namespace.at(f"{held}/{descriptor}"), user)
            for address, descriptor in zip(addresses, reply["namespaces"], strict=True)
        ]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the network. Does nothing in a forked child, or if the network is closed already."""
        if self._holder is None or self._owner != os.getpid():
            return
        self._holder.kill()  # the kernel removes namespaces that no process holds, so there is nothing else to clean up
        self._holder.communicate()
        self._holder = None

    def counters(self) -> list[tuple[int, int]]:
        """Returns the bytes sent and received by each host since the start, as whole Ethernet frames."""
        return [(sent, received) for sent, received in self._request("counters")]

    def cut(self, host: int) -> None:
        """Cuts the link of a host, by its index: frames from and to it are lost, and neither side gets an error."""
        self._set_link(host, "down")

    def heal(self, host: int) -> None:
        """Undoes `cut`."""
        self._set_link(host, "up")

    def _set_link(self, host: int, state: str) -> None:
        if not 0 <= host < len(self.links):
            raise ValueError(f"host must be an index from 0 to {len(self.links) - 1}, not {host!r}")
        self._request({"host": host, "state": state})

    def _request(self, request: Any) -> Any:
        with self._lock:
            if self._holder is None:
                raise EmulationError("the emulated network is closed")
            assert self._holder.stdin is not None
            assert self._holder.stdout is not None
            try:
                self._holder.stdin.write(json.dumps(request).encode() + b"\n")
                self._holder.stdin.flush()
                reply = self._holder.stdout.readline()
            except BrokenPipeError:
                reply = b""
            except BaseException:  # an interrupt between request and reply would mix up later replies
                self.close()
                raise
            if not reply:
                status = self._holder.wait()
                self.close()
                raise _cannot_emulate(f"the process that holds it ended unexpectedly, with status {status}")
            return json.loads(reply)


def _describe(link: Link, address: str) -> dict[str, Any]:
    """Returns what the holder process needs to know about a link."""
    return {
        "address": address,
        "prefix": 24,
        "bytes_per_second": link.frame_bytes_per_second,
        "burst_nbytes": link.burst_nbytes,
        "queue_nbytes": link.queue_nbytes,
        "frames_per_segment": link.frames_per_segment,
        "is_relayed": link.is_relayed,
        "mtu": link.mtu,
        "delay_seconds": link.delay_seconds,
        "jitter_seconds": link.jitter_seconds,
        "loss": link.loss,
    }
