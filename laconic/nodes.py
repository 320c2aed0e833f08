"""Nodes: ranks with fast links between them, which train as one worker and share its communication.

Inside a node the gradients are averaged in every step, so all its ranks hold the same x. Each rank runs the method on
its slice of x, with the ranks of the other nodes that have the same slice: together they are a *rail*. After the step
the slices are gathered inside the node. So a node sends what one worker would, each rank an equal share of it. This
takes the place of the replicate dimension of hybrid sharding (HSDP).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from laconic.comm import Comm
from laconic.comm.finite import raise_together
from laconic.comm.subset import open_subset
from laconic.wrappers import BareModel

Nodes = Literal["auto"] | None
VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")


@dataclass(frozen=True)
class Node:
    """The node of this rank. `worker.node` is None where every rank is a worker of its own.

    Attributes:
        index: of the node, from 0.
        count: how many nodes there are.
        rank: this rank's place in its node, from 0.
        size: how many ranks a node has.
        layout: the ranks of each node, by their numbers in the job.
        local: the communication inside the node.
        rail: the communication with the ranks of the other nodes that have the same place; a rank's number in it is the
            index of its node.
        control: the same, for the averages of `consensus()` and of the end.
        notes: the communication of numbers of the host inside the node.
    """

    index: int
    count: int
    rank: int
    size: int
    layout: list[list[int]]
    local: Comm
    rail: Comm
    control: Comm
    notes: Comm

    def require_same_ends(self, lasts: Sequence[int]) -> None:
        """Raises a ValueError, on all ranks, if ranks of one node run out of data in different steps.

        Args:
            lasts: the last step in which each rank of the job has trained.
        """
        for members in self.layout:
            steps = {lasts[rank] for rank in members}
            if len(steps) > 1:
                found = ", ".join(f"rank {rank} trains up to step {lasts[rank]}" for rank in members)
                raise ValueError(
                    f"all ranks of a node average their gradients in every step, so they must run out of data in the "
                    f"same one, and of ranks {members} {found}: give them equally many batches"
                )


def check_arguments(local: object, nodes: object) -> None:
    """Raises a ValueError if the arguments of `Worker` that describe nodes are not valid."""
    if nodes not in (None, "auto"):
        raise ValueError(f"nodes must be None or 'auto', not {nodes!r}: to choose a node's ranks, give local=group")
    if local is None:
        return
    if nodes is not None:
        raise ValueError("nodes='auto' finds the ranks of a node, and local=group names them: give one of the two")
    if not (dist.is_available() and isinstance(local, dist.ProcessGroup)):
        raise ValueError(
            f"local must be None or the torch.distributed process group of this node's ranks, not {local!r}: "
            f"torch.distributed.new_subgroups() makes one on each node"
        )


def find_node(
    comm: Comm, local: dist.ProcessGroup | None, nodes: Nodes, device: torch.device, model: BareModel
) -> Node | None:
    """Compares the places of all ranks, and opens the communication of this one. All ranks call it.

    Args:
        comm: of all ranks.
        local, nodes: as given to `Worker`.
        device: of the trained parameters.
        model: which may be wrapped to average inside the node.

    Returns:
        None if every node is one rank.

    Raises:
        ValueError: the ranks cannot form nodes of one size; the same on every rank.
    """
    if comm.size == 1:
        return None
    note: dict[str, Any] = {"device": device.type, "host": _host(), "error": None, "members": []}
    try:
        members = _members_by_launcher(comm) if local is None else sorted(dist.get_process_group_ranks(local))
        model.require_group(members)
        note["members"] = members
    except ValueError as error:
        note["error"] = str(error)
    notes = comm.meet("the nodes of the job", note)
    try:
        layout = arrange(notes)
    except ValueError as error:
        raise_together(comm, error)
    index = next(i for i, members in enumerate(layout) if comm.rank in members)
    members = layout[index]
    place = members.index(comm.rank)
    if len(members) == 1:
        return None
    inside = open_subset(comm, "node", layout, "node")
    rail = open_subset(comm, "rail", [list(ranks) for ranks in zip(*layout, strict=True)])
    control = rail.channel("control")
    of_host = inside if device.type == "cpu" else inside.channel("node")  # a device's backend takes its tensors only
    return Node(index, len(layout), place, len(members), layout, inside, rail, control, of_host)


def arrange(notes: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Returns the ranks of each node, from what every rank says of itself.

    Raises:
        ValueError: says which ranks do not fit together, and what to do.

    >>> note: dict[str, Any] = {"device": "cpu", "host": "a", "error": None}
    >>> arrange([note | {"members": members} for members in ([0, 1], [0, 1], [2, 3], [2, 3])])
    [[0, 1], [2, 3]]
    >>> arrange([note | {"members": members} for members in ([0, 1], [0, 1], [2])])
    Traceback (most recent call last):
    ValueError: all nodes must have the same number of ranks, not [0, 1] and [2]: start as many on each machine
    """
    errors = [f"rank {rank}: {note['error']}" for rank, note in enumerate(notes) if note["error"]]
    if errors:
        raise ValueError("; ".join(errors))
    devices = {note["device"]: rank for rank, note in enumerate(notes)}
    if len(devices) > 1:
        found = " and ".join(f"{device} (rank {rank})" for device, rank in devices.items())
        raise ValueError(f"all ranks must train on devices of one kind, not {found}")
    layout = sorted({tuple(sorted(note["members"])) for note in notes})
    for rank, note in enumerate(notes):
        if rank not in note["members"]:
            raise ValueError(
                f"the local group of a rank must contain it, and that of rank {rank} is {note['members']}: "
                f"pass the group of this rank's node"
            )
    if sum(map(len, layout)) != len(notes):
        raise ValueError(
            f"each rank must be in one node, and the ranks name {_listed(layout)}: all ranks of a node must pass the "
            f"same local group"
        )
    if len(set(map(len, layout))) > 1:
        raise ValueError(
            f"all nodes must have the same number of ranks, not {_listed(layout)}: start as many on each machine"
        )
    for members in layout:
        hosts = sorted({notes[rank]["host"] for rank in members})
        if len(hosts) > 1:
            names = sorted({host.split()[0] for host in hosts})  # without what tells apart those of the same name
            where = " and ".join(names) if len(names) == len(hosts) else f"{len(hosts)} hosts"
            raise ValueError(
                f"the ranks of a node must be on one host, and {list(members)} are on {where}: pass the group of the "
                f"ranks on one machine"
            )
    return [list(members) for members in layout]


def _listed(layout: Sequence[Sequence[int]]) -> str:
    shown = [str(list(members)) for members in layout[:4]]
    return " and ".join(shown) + (f" and {len(layout) - 4} more" if len(layout) > 4 else "")


def _members_by_launcher(comm: Comm) -> list[int]:
    """Returns the ranks of this node by torchrun's variables. Ranks of one machine have consecutive numbers."""
    missing = [name for name in VARIABLES if not os.environ.get(name, "").isdecimal()]
    if missing:
        raise ValueError(
            f"nodes='auto' needs torchrun, which sets {', '.join(VARIABLES)}, and {', '.join(missing)} is not set: "
            f"start the script by torchrun, or pass local=group"
        )
    size, place, index = (int(os.environ[name]) for name in VARIABLES)
    if size == 0 or comm.size % size or place >= size or comm.rank != index * size + place:
        raise ValueError(
            f"all machines must run as many processes, and this one runs LOCAL_WORLD_SIZE={size} of {comm.size} (with "
            f"LOCAL_RANK={place} and GROUP_RANK={index} for rank {comm.rank}): start torchrun with the same "
            f"--nproc-per-node everywhere, or pass local=group"
        )
    return list(range(index * size, (index + 1) * size))


def _host() -> str:
    """Returns a name that is the same for all processes of one host, also of an emulated one.

    Machines may have the same name, such as "localhost", and the same number of their network namespace.
    """
    try:
        namespace = os.readlink("/proc/self/ns/net")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()
    return f"{socket.gethostname()} {boot} {namespace}"
