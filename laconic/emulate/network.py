"""An emulated network as its user sees it: hosts to move a process into, and the bytes that each has carried."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from laconic.emulate import holder
from laconic.emulate.links import Link, check_count


class EmulationError(RuntimeError):
    """This machine cannot emulate the network that was asked for, or a process cannot enter it."""


def _cannot(why: str) -> EmulationError:
    return EmulationError(f"cannot emulate a network: {why}. To go without emulation: --link none")


@dataclass(frozen=True)
class Namespace:
    """A namespace that another process holds, by path; the inode tells it from what may be there later."""

    path: str
    inode: int

    @classmethod
    def at(cls, path: str) -> Self:
        return cls(path, os.stat(path).st_ino)

    def join(self, kind: int) -> None:
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
    """One host. It can be pickled, and entered by any process of the same user while the network is open."""

    address: str
    interface: str
    network_namespace: Namespace
    user_namespace: Namespace | None

    def enter(self) -> None:
        """Move this process, and the children it will have, into the host. There is no way back.

        The kernel moves only the calling thread, so a process must enter before it starts others.
        """
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise EmulationError(f"a process must enter a host before it starts threads, not with {threads} running")
        # The kernel refuses to join the user namespace that one is already in: a process that comes from another host.
        if self.user_namespace and os.stat("/proc/self/ns/user").st_ino != self.user_namespace.inode:
            self.user_namespace.join(holder.CLONE_NEWUSER)
        self.network_namespace.join(holder.CLONE_NEWNET)


class Network:
    """Hosts on one switch, each behind its own link; made on entering the `with` block and gone after it.

    There is no route out of it, and nothing of it in the machine's own network. It ends with this process, however
    that ends; processes that have entered a host keep that host, cut off, until they end too.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        check_count(len(links), "hosts of an emulated network")
        self.links = tuple(links)
        self.hosts: list[Host] = []
        self._holder: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if self._holder is not None:
            raise RuntimeError("this network is open already")
        if sys.platform != "linux":
            raise _cannot(f"that needs the network namespaces of Linux, and this is {sys.platform}")
        self._owner = os.getpid()
        # Its own session, so that Ctrl-C in the terminal does not end it before its users. -P: laconic/emulate is no
        # place to import from.
        self._holder = subprocess.Popen(
            [sys.executable, "-P", holder.__file__, str(os.getpid())],
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
        made = self._ask([_describe(*pair) for pair in zip(self.links, addresses, strict=True)])
        if "error" in made:
            raise _cannot(made["error"])
        held = f"/proc/{holder_pid}/fd"
        user = None if made["user"] is None else Namespace.at(f"{held}/{made['user']}")
        return [
            Host(address, "eth0", Namespace.at(f"{held}/{descriptor}"), user)
            for address, descriptor in zip(addresses, made["namespaces"], strict=True)
        ]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._holder is None or self._owner != os.getpid():  # a forked child leaves its parent's network alone
            return
        self._holder.kill()  # it has nothing to tidy up: the kernel removes namespaces that nobody holds
        self._holder.communicate()
        self._holder = None

    def counters(self) -> list[tuple[int, int]]:
        """Bytes sent and received by each host since the start, in Ethernet frames, as the shapers count them."""
        return [(sent, received) for sent, received in self._ask("counters")]

    def _ask(self, request: Any) -> Any:
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
            except BaseException:  # an interrupt: half a conversation cannot be continued
                self.close()
                raise
            if not reply:
                status = self._holder.wait()
                self.close()
                raise _cannot(f"the process that holds it ended by itself, with status {status}")
            return json.loads(reply)


def _describe(link: Link, address: str) -> dict[str, Any]:
    return {
        "address": address,
        "prefix": 24,
        "bytes_per_second": link.frame_bytes_per_second,
        "burst_nbytes": link.burst_nbytes,
        "queue_nbytes": link.queue_nbytes,
        "frames_per_segment": link.frames_per_segment,
        "needs_netem": link.needs_netem,
        "delay_us": round(link.delay_seconds * 1e6),
        "loss_percent": link.loss * 100,
        "delayed_frames": link.delayed_frames,
    }
