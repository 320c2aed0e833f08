"""A way to train: a method of laconic or a peer, asked for by name and settings, joined to a replica the same way."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from laconic import methods
from laconic.method import Method
from laconic.names import look_up
from laconic.worker import Worker

MOST_WORKERS = 64


@dataclass
class Reading:
    """What is known so far in a run of one worker."""

    payload_nbytes: dict[str, float]  # by channel
    waiting_seconds: float | None  # None where it cannot be told from computing
    method_seconds: float | None  # waiting included
    metrics: dict[str, float]


@dataclass
class Joined:
    """A replica that trains with the others: call `module`, step `optimizer`."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    read: Callable[[], Reading]
    worker: Worker | None = None


class Way(Protocol):
    is_peer: bool
    averages: bool  # whether the model to judge is the mean over workers, or rank 0's own

    def settings(self) -> dict[str, Any]: ...

    def join(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Joined]: ...


@dataclass
class MethodWay:
    method: Method
    is_peer: bool = False
    averages: bool = True

    def settings(self) -> dict[str, Any]:
        return self.method.settings()

    @contextmanager
    def join(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Joined]:
        with Worker(model, optimizer, self.method) as worker:

            def read() -> Reading:
                total = worker.meter.total
                channels = {channel for channel, _ in total.tallies} - {"control"}
                payload = {channel: float(total.nbytes(channel)) for channel in sorted(channels)}
                return Reading(payload, total.waited, total.method_seconds, worker.method.metrics())

            yield Joined(model, optimizer, read, worker)


@dataclass(frozen=True)
class Asked:
    """A way as it was asked for on the command line: `local_sgd+period=4`."""

    text: str
    name: str
    way: Way


def names() -> list[str]:
    from laconic.bench.peers import PEERS

    return [*methods.METHODS, *PEERS]


def settings_of(name: str) -> dict[str, Any]:
    """The types of a way's settings, by name."""
    kind = _kind(name.split("+")[0])
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}


def _kind(name: str) -> type[Any]:
    from laconic.bench.peers import PEERS

    return look_up("method or peer", name, {**methods.METHODS, **PEERS})


def ask(text: str, settings: dict[str, str] | None = None) -> Asked:
    """The way for `NAME+key=value+…`, or for a name and its settings as text."""
    from laconic.bench.peers import PEERS

    name, *pairs = text.split("+")
    given = dict(settings or {})
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"settings are written NAME+key=value, and {pair!r} in {text!r} has no '='")
        given[key] = value
    hints = settings_of(name)
    values = {
        key: parse_value(f"{name}.{key}", value, look_up(f"setting of {name}", key, hints))
        for key, value in given.items()
    }
    built = _kind(name)(**values)
    if isinstance(built, Method) and not all(map(built.trains, range(MOST_WORKERS))):
        raise ValueError(f"{text}: here every worker trains, so none can be kept as a server without data")
    # The text names the run everywhere, so that two settings of one method can be told apart.
    label = "+".join([name, *(f"{key}={value}" for key, value in given.items())])
    return Asked(label, name, built if name in PEERS else MethodWay(built))


def parse_value(name: str, text: str, hint: Any) -> Any:
    """Text from the command line as a value of a field: whole number, number, yes or no, None, compressor, or word."""
    options = typing.get_args(hint) if typing.get_origin(hint) is not typing.Literal else ()
    kinds = options or (hint,)
    if text == "none" and type(None) in kinds:
        return None
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    literals = [word for kind in kinds if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)]
    words = {str(word): word for word in literals}
    if any(_is_compressor(kind) for kind in kinds) and text not in words:
        from laconic.compress import parse

        return parse(text)
    if str in kinds or words:
        return words.get(text, text)
    raise ValueError(f"{name} must be {_describe(hint)}, not {text!r}")


def _is_compressor(kind: Any) -> bool:
    return getattr(kind, "__name__", "") == "Compressor"


def _describe(hint: Any) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, str(hint).replace("typing.", ""))
