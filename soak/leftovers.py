"""Finds what an attempt has left behind: processes, sockets, files, namespaces."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

from laconic.emulate import Network, holder
from laconic.emulate.network import Namespace

_PR_SET_CHILD_SUBREAPER = 36
_LISTEN, _ESTABLISHED = "0A", "01"


def adopt_orphans() -> None:
    """Makes this process the parent of all its descendants that lose theirs, so that `strangers` sees them."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot become the reaper of orphans")


def children() -> set[int]:
    """Returns the living children of this process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def bad_checkpoints(directory: Path) -> list[str]:
    """Returns files that are no part of a complete checkpoint."""
    if not directory.exists():
        return []
    found = [path.name for path in directory.iterdir() if not (path / "manifest.json").exists() and path.is_dir()]
    return found + [path.name for path in directory.rglob("manifest.json.*")]


def shared_memory_of(pids: list[int]) -> list[str]:
    """Returns files in shared memory whose names have one of these process numbers in them."""
    return [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in f"_{name}_" for pid in pids)]


def open_sockets(network: Network) -> list[str]:
    """Returns the connections and servers that are still open on the hosts of an emulated network."""
    found: list[str] = []

    def read() -> None:  # in a thread of its own, since the kernel moves single threads to a namespace
        for index, host in enumerate(network.hosts):
            host.network_namespace.join(holder.CLONE_NEWNET)
            for line in Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] in (_LISTEN, _ESTABLISHED):
                    found.append(f"host {index}: {fields[1]} to {fields[2]}")

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return found


def processes_in(namespaces: list[Namespace]) -> list[int]:
    """Returns the processes that are in one of these network namespaces."""
    inodes, found = {namespace.inode for namespace in namespaces}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.stat(entry / "ns" / "net").st_ino in inodes:
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended meanwhile
    return found
