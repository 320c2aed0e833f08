"""Training strategies: laconic's methods and the baselines behind one interface, chosen by name and settings."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from laconic import methods
from laconic.bench.values import parse_value
from laconic.method import Method
from laconic.names import look_up
from laconic.worker import Worker

MAX_WORKERS = 64
MAX_SIMULATED_WORKERS = 4096


@dataclass
class Reading:
    """What one worker has measured since the start of its run.

    Args:
        payload_nbytes: Bytes sent, by channel.
        waiting_seconds: Seconds blocked on the network or on other workers; None if the strategy cannot measure it.
        method_seconds: Seconds inside the method, waiting included; None if the strategy cannot measure it.
        metrics: The method's own metrics, by name.
    """

    payload_nbytes: dict[str, float]
    waiting_seconds: float | None
    method_seconds: float | None
    metrics: dict[str, float]


@dataclass
class Session:
    """One replica during training. The training loop calls `module` and steps `optimizer`.

    Args:
        module: The model, wrapped if the strategy wraps it.
        optimizer: Its optimizer.
        read: Reads what was measured so far.
        worker: The worker, if the strategy is a method of laconic.
        average: Averages the models of all workers once, as a user would to evaluate them; all ranks call it. Returns
            the bytes that this worker has sent for it. None: the cost of that is not measured.
        agreed: Returns the trained parameters that all ranks hold (d, in fp32), if there are any: a model that can be
            evaluated without sending anything.
        sends_differences: Whether that average sends quantized differences to them.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    read: Callable[[], Reading]
    worker: Worker | None = None
    average: Callable[[], float] | None = None
    agreed: Callable[[], torch.Tensor | None] = lambda: None
    sends_differences: bool = False


class Strategy(Protocol):
    """How the workers of a run train together."""

    is_baseline: bool
    averages: bool
    """Whether the mean of all workers' models is evaluated; otherwise rank 0's model is."""

    def settings(self) -> dict[str, Any]:
        """Returns the settings by name."""

    def join(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Session]:
        """Connects this replica with the other workers for the duration of a `with` block."""


@dataclass
class MethodStrategy:
    """Trains with a method of laconic, through `laconic.Worker`."""

    method: Method
    is_baseline: bool = False
    averages: bool = True

    def settings(self) -> dict[str, Any]:
        return self.method.settings()

    @contextmanager
    def join(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
        with Worker(model, optimizer, self.method) as worker:

            def read() -> Reading:
                total = worker.meter.total
                channels = {channel for channel, _ in total.tallies} - {"control"}
                payload = {channel: float(total.nbytes(channel)) for channel in sorted(channels)}
                return Reading(payload, total.waited, total.method_seconds, worker.method.metrics())

            def average() -> float:
                before = worker.meter.total.nbytes("control")
                with worker.consensus():
                    return float(worker.meter.total.nbytes("control") - before)

            def agreed() -> torch.Tensor | None:
                found = worker.method.agreed(worker)
                return None if found is worker.x else found  # all hold the same model: it is evaluated anyway

            yield Session(
                model,
                optimizer,
                read,
                worker,
                average,
                agreed=agreed,
                sends_differences=worker.method.reference() is not None,
            )


@dataclass(frozen=True)
class Contender:
    """One entry of a comparison.

    Args:
        label: Its name in tables and charts, settings included: "local_sgd+period=4".
        method: The name of its method or baseline: "local_sgd".
        strategy: How it trains.
    """

    label: str
    method: str
    strategy: Strategy


def strategy_names() -> list[str]:
    """Returns the names of all methods, then of all baselines."""
    from laconic.bench.baselines import BASELINES

    return [*methods.METHODS, *BASELINES]


def installed_strategies() -> list[str]:
    """Returns the names of all methods and of those baselines whose packages are installed."""
    from laconic.bench.baselines import BASELINES

    missing = {name for name, kind in BASELINES.items() if kind.needs and importlib.util.find_spec(kind.needs) is None}
    return [name for name in strategy_names() if name not in missing]


def setting_types(name: str) -> dict[str, Any]:
    """Returns the type of each setting of a method or baseline.

    Example:
        >>> setting_types("powersgd")
        {'rank': <class 'int'>, 'start': <class 'int'>}
    """
    kind = find_strategy(name.split("+")[0])
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}


def find_strategy(name: str) -> type[Any]:
    """Returns the class of the method or baseline called `name`.

    Raises:
        ValueError: There is none; the message lists similar names.
    """
    from laconic.bench.baselines import BASELINES

    return look_up("method or baseline", name, {**methods.METHODS, **BASELINES})


def split_contenders(text: str) -> list[str]:
    """Splits a list of contenders at its commas, except those between parentheses.

    Example:
        >>> split_contenders("ddp, local_sgd+compressor=Uniform(4, stochastic=True)")
        ['ddp', 'local_sgd+compressor=Uniform(4, stochastic=True)']
    """
    return [part.strip() for part in re.split(r",(?![^(]*\))", text)]


def parse_contender(text: str, settings: dict[str, str] | None = None) -> Contender:
    """Returns the contender that `text` describes.

    Args:
        text: `NAME`, or `NAME+key=value+…`.
        settings: More settings, as text.

    Raises:
        ValueError: The name, a setting or a value is not valid.

    Example:
        >>> contender = parse_contender("local_sgd+period=4")
        >>> contender.method, contender.strategy.settings()["period"]
        ('local_sgd', 4)
    """
    from laconic.bench.baselines import BASELINES

    name, *pairs = text.split("+")
    given = dict(settings or {})
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"settings are written NAME+key=value, and {pair!r} in {text!r} has no '='")
        given[key] = value
    hints = setting_types(name)
    values = {
        key: parse_value(f"{name}.{key}", value, look_up(f"setting of {name}", key, hints))
        for key, value in given.items()
    }
    built = find_strategy(name)(**values)
    if isinstance(built, Method) and not all(map(built.trains, range(MAX_WORKERS))):
        raise ValueError(f"{text}: laconic train and compare have no dedicated server, every worker must train")
    # The label identifies the run everywhere, so it must distinguish two settings of one method.
    label = "+".join([name, *(f"{key}={value}" for key, value in given.items())])
    return Contender(label, name, built if name in BASELINES else MethodStrategy(built))
