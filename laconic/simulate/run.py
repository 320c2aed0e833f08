"""Runs a function on many simulated workers in this process, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from laconic.comm import PeerError
from laconic.launch import WorkerFailed
from laconic.link import Link, parse_links
from laconic.rules import check_count, check_number, check_seed
from laconic.simulate.network import Host

if TYPE_CHECKING:  # these import greenlet, which is installed with laconic[simulate] only
    from laconic.simulate.engine import Engine, Task

Links = str | Link | Host | Sequence[str | Link | Host]
Compute = float | Sequence[float] | Callable[[int, int], float]
MOST_WORKERS = 1 << 16


def simulate(
    fn: Callable[..., Any],
    workers: int,
    *args: Any,
    link: Links = "1gbit",
    compute: Compute = 0.03,
    failures: Mapping[int, float] | None = None,
    starts: Mapping[int, float] | None = None,
    seed: int = 0,
    spare_survivors: bool = False,
) -> list[Any]:
    """Runs `fn(*args)` on simulated workers: the code and the methods of `spawn`, in one process and in virtual time.

    Training is real: gradients, messages and models are computed, with the same bits as by `spawn` where a method is
    deterministic. Only time is simulated: each step takes the seconds that `compute` says, and messages take the time
    of their links. `worker.comm.now()` is the simulated clock, and `worker.meter` counts bytes and simulated seconds.

    Args:
        fn: the function. It may read RANK and WORLD_SIZE, but must neither wait in real time nor use torch.distributed.
        workers: the number of workers.
        *args: the arguments of `fn`, the same for all workers.
        link: of all hosts or one for each: a text such as "1gbit+50ms" (`laconic.link`), a `laconic.link.Link` or a
            `laconic.simulate.Host`, which can also have different rates up and down, and a window.
        compute: the seconds in which a worker computes a gradient and steps: one number for all, one for each worker,
            or a function of rank and step (from 1).
        failures: when workers are killed, in seconds, by rank.
        starts: when workers start, in seconds, by rank; the others at 0.
        seed: of the jitter, and of Python's `random` on the workers.
        spare_survivors: as for `spawn`: let the others go on when a worker fails.

    Returns:
        What `fn` returned, by rank. With `spare_survivors`, a `WorkerFailed` for each worker that raised or was killed.

    Raises:
        ValueError: an argument is not valid.
        WorkerFailed: a worker raised or was killed; with `spare_survivors` only if all did.
        MemoryError: the workers would take more memory than is free; predicted when the first two have started.

    >>> import torch, laconic
    >>> def train():
    ...     model = torch.nn.Linear(1000, 1000)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     with laconic.Worker(model, optimizer, laconic.AllReduce()) as worker:
    ...         for _ in range(10):
    ...             model(torch.randn(8, 1000) + worker.rank).square().mean().backward()
    ...             optimizer.step()
    ...         return worker.comm.now()
    >>> slow = laconic.simulate(train, 8, link="100mbit+10ms", compute=0.05)
    >>> round(slow[0], 1)  # simulated seconds
    8.3
    """
    hosts, seconds = _check(fn, workers, link, compute, failures, starts, seed)
    try:
        import greenlet  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("laconic.simulate needs greenlet: pip install 'laconic[simulate]'") from error
    from laconic.simulate.engine import CURRENT
    from laconic.simulate.guards import no_real_time
    from laconic.simulate.process import kept_process
    from laconic.simulate.world import World

    if CURRENT.get() is not None:
        raise RuntimeError("a simulated worker must not call laconic.simulate")
    with kept_process(), no_real_time():
        world = World(hosts, seconds, seed)
        for rank in range(workers):
            world.start(rank, (starts or {}).get(rank, 0.0), lambda: fn(*args))
        for rank, time in (failures or {}).items():
            world.engine.at(time, world.kill, rank)
        world.run(to_first_failure=not spare_survivors)
    return _results(world.engine, spare_survivors)


def _results(engine: Engine, spare_survivors: bool) -> list[Any]:
    size = len(engine.tasks)

    def failure(task: Task) -> WorkerFailed:
        text = "killed by a simulated failure" if task.killed else task.error_text
        return WorkerFailed(task.rank, f"simulated worker {task.rank} of {size} failed: {text}")

    first = min(engine.failures, key=lambda task: isinstance(task.error, PeerError), default=None)
    killed = [task for task in engine.tasks if task.killed]
    lost = {task.rank for task in [*engine.failures, *killed]}
    if lost and not (spare_survivors and len(lost) < size):
        culprit = first if first is not None and not isinstance(first.error, PeerError) else None
        raise failure(culprit or (killed[0] if killed and not spare_survivors else first or killed[0]))
    return [failure(task) if task.rank in lost else task.result for task in engine.tasks]


def _check(
    fn: object,
    workers: int,
    link: Links,
    compute: Compute,
    failures: Mapping[int, float] | None,
    starts: Mapping[int, float] | None,
    seed: int,
) -> tuple[list[Host], Callable[[int, int], float]]:
    """Checks the arguments of `simulate`. Returns a host for each worker, and the seconds of each step."""
    if not callable(fn):
        raise ValueError(f"fn must be a function, not {fn!r}")
    check_count("workers", workers, most=MOST_WORKERS)
    check_seed(seed)
    for name, times in (("failures", failures), ("starts", starts)):
        if not isinstance(times or {}, Mapping):
            raise ValueError(f"{name} must be a dictionary of seconds by rank, not {times!r}")
        for rank, time in (times or {}).items():
            if type(rank) is not int or not 0 <= rank < workers:
                raise ValueError(f"{name} must be by rank, from 0 to {workers - 1}, not {rank!r}")
            check_number(f"{name}[{rank}] (seconds)", time, least=0)
    return _hosts(link, workers), _seconds(compute, workers)


def _hosts(link: Links, workers: int) -> list[Host]:
    if isinstance(link, str):
        return [Host(one) for one in parse_links(link, workers, Link)]
    if isinstance(link, Link | Host):
        return [link if isinstance(link, Host) else Host(link)] * workers
    if not isinstance(link, Sequence) or len(link) != workers:
        raise ValueError(f"link must be one link for all workers, or one for each of the {workers}, not {link!r}")
    return [one if isinstance(one, Host) else Host(one) for one in link]


def _seconds(compute: Compute, workers: int) -> Callable[[int, int], float]:
    if callable(compute):
        return compute
    each = list(compute) if isinstance(compute, Sequence) else [compute] * workers
    if len(each) != workers:
        raise ValueError(f"compute must be seconds for all workers, or for each of the {workers}, not {compute!r}")
    for seconds in each:
        check_number("compute (seconds a step)", seconds, least=0)
    return lambda rank, step: each[rank]
