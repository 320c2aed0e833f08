"""Calls the public classes and functions with wrong arguments.

A bad argument must raise a ValueError that shows the value, when the object is made. If a value is accepted, the object
must work. Everything else is a fault: another kind of error, a message without the value, an error in use.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import laconic
from laconic import compress, topology
from laconic.compress.spec import NAMES
from laconic.emulate import Network
from laconic.emulate.hosts import hosts_behind
from laconic.emulate.links import Link, parse_links
from laconic.link import parse_link
from laconic.tasks import TASKS, Task

BAD: list[Any] = [
    *(
        None,
        "",
        "nonsense",
        -1,
        0,
        1,
        2,
        2.0,
        0.5,
        -0.5,
        math.nan,
        math.inf,
        -math.inf,
        10**20,
        -(10**20),
        2**31,
        2**64,
    ),
    *([], [1], (), (0, 0), {}, True, False, b"x", 1j, object(), int, lambda: 0, torch.ones(2), torch.nn.Linear(2, 1)),
]


@dataclass(frozen=True)
class Target:
    """Something to call.

    Args:
        name: for reports.
        call: makes the object.
        arguments: valid ones by name, each of which is replaced by bad ones.
        use: uses what `call` returned.
    """

    name: str
    call: Callable[..., Any]
    arguments: dict[str, Any]
    use: Callable[[Any], object] = lambda made: None


def use_method(method: laconic.Method) -> None:
    """Trains a few steps alone."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    if method.trains(0) and getattr(method, "server", 0) in (0, "sharded"):
        with laconic.Worker(model, optimizer, method):
            for _ in range(3):
                model(torch.ones(3)).sum().backward()
                optimizer.step()


def use_compressor(compressor: compress.Compressor) -> None:
    x = torch.linspace(-1, 1, 300)
    decoded = compressor.decode(compressor.encode(x), 300)
    assert decoded.isfinite().all()
    assert compress.parse(str(compressor)) == compressor
    compressor.with_stream(3).encode(x, step=5)


def use_topology(graph: topology.Topology) -> None:
    if graph.size > 1:
        graph.constants()


def use_task(task: Task) -> None:
    if getattr(task, "dimension", 0) < 10**6:
        task.build_optimizer(task.build_model())


def use_context(context: Any) -> None:
    with context:
        pass


def new_worker(**changed: Any) -> laconic.Worker:
    model = torch.nn.Linear(2, 1)
    arguments = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "method": laconic.AllReduce()}
    return laconic.Worker(**{**arguments, **changed})


def targets() -> list[Target]:
    """Returns everything that is called."""
    tables: list[tuple[Mapping[str, Any], Any]]
    tables = [(laconic.METHODS, use_method), (NAMES, use_compressor), (TASKS, use_task)]
    found = [
        Target(name, kind, {f.name: getattr(kind(), f.name) for f in dataclasses.fields(kind) if f.init}, use)
        for table, use in tables
        for name, kind in table.items()
    ]
    unchanged = object()
    worker = dict.fromkeys(("model", "optimizer", "method", "timeout", "seed", "comm"), unchanged)
    nodes, edges = (0, 1, 2), ((0, 1), (1, 2))
    return [
        *found,
        Target("Worker", lambda **a: new_worker(**{k: v for k, v in a.items() if v is not unchanged}), worker),
        Target("spawn", laconic.spawn, {"fn": int, "workers": 0, "hosts": None, "preload": ()}),
        *(
            Target(name, make, {"n": 4}, use_topology)
            for name, make in topology.TOPOLOGIES.items()
            if name != "complete"
        ),
        Target("torus", topology.torus, {"rows": 2, "cols": 2}, use_topology),
        Target("named", topology.named, {"name": "ring", "n": 3}, use_topology),
        Target("from_edges", topology.from_edges, {"edges": [(0, 1)], "n": None}, use_topology),
        Target("Topology", topology.Topology, {"name": "path", "nodes": nodes, "edges": edges}, use_topology),
        Target("constants", topology.ring(3).constants, {"rate": 1.0}),
        Target("Link", Link, {"bits_per_second": 10**8, "delay_seconds": 0.0, "loss": 0.0}, str),
        Target("parse_link", parse_link, {"text": "10mbit"}),
        Target("parse_links", parse_links, {"text": "10mbit", "workers": 2}),
        Target("hosts_behind", lambda **a: use_context(hosts_behind(**a)), {"link": "none", "workers": 2}),
        Target("Network", Network, {"links": [Link(10**8)]}),
        Target("parse", compress.parse, {"text": "log:3"}, use_compressor),
    ]


def fault_of(target: Target, bad: dict[str, Any]) -> str | None:
    """Calls the target with some arguments replaced. Returns a description of the fault, or None."""
    shown = f"{target.name}({', '.join(f'{name}={value!r}' for name, value in bad.items())})"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = target.call(**{**target.arguments, **bad})
        except ValueError as error:
            # With several bad arguments, any may be named. Values are shown as repr or str do; a module is not.
            if any(
                isinstance(value, torch.nn.Module) or (isinstance(value, list | tuple | dict) and not value)
                for value in bad.values()
            ):
                return None
            values = [text for value in bad.values() for text in (repr(value), str(value))]
            return None if any(text in str(error) for text in values) else f"{shown}: does not show the value: {error}"
        except Exception as error:  # noqa: BLE001
            return f"{shown}: {type(error).__name__}: {error}"
        try:
            target.use(made)
        except Exception as error:  # noqa: BLE001
            return f"{shown}: is accepted, and fails in use: {type(error).__name__}: {error}"
    return None


def single_faults(target: Target) -> Iterator[str]:
    """Replaces each argument by each bad value."""
    for name, value in itertools.product(target.arguments, BAD):
        if target.name == "spawn" and name != "workers" and not (name == "fn" and callable(value)):
            target = dataclasses.replace(target, arguments={**target.arguments, "workers": 1})
        if target.name == "spawn" and is_fine_for_spawn(name, value):
            continue
        fault = fault_of(target, {name: value})
        if fault:
            yield fault


def is_fine_for_spawn(name: str, value: Any) -> bool:
    """Whether spawn would accept the value and start processes, which takes long."""
    return {
        "fn": callable(value),
        "workers": type(value) is int and 1 <= value <= 64,
        "hosts": value is None,
        "preload": isinstance(value, list | tuple) and not value,
    }[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, end, calls = random.Random(options.seed), time.monotonic() + options.seconds, 0
    everything = targets()
    faults = {fault for target in everything for fault in single_faults(target)}
    pairs = [target for target in everything if len(target.arguments) > 1 and target.name != "spawn"]
    while time.monotonic() < end:
        target = rng.choice(pairs)
        names = rng.sample(list(target.arguments), rng.randint(2, min(4, len(target.arguments))))
        fault = fault_of(target, {name: rng.choice(BAD) for name in names})
        calls += 1
        if fault:
            faults.add(fault)
    for fault in sorted(faults):
        print(fault)
    print(f"seed {options.seed}: all single arguments and {calls} calls with several bad ones, {len(faults)} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
