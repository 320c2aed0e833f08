"""Makes code that waits in real time, or uses torch.distributed, an error inside a simulated worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from laconic.simulate.engine import CURRENT


@contextmanager
def no_real_time() -> Iterator[None]:
    """Replaces functions for the length of the `with` block; outside of simulated workers they do what they always did.

    Raises:
        RuntimeError: this process is a worker of a torch.distributed job.
    """
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "laconic.simulate must not run in a process that has initialised torch.distributed: simulate in a process "
            "of its own, without torchrun"
        )
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, forbidden: Callable[..., str | None]) -> None:
        original = getattr(owner, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            task = CURRENT.get()
            text = forbidden(*args, **kwargs) if task is not None else None
            if task is not None and text is not None:
                raise RuntimeError(f"simulated worker {task.rank}: {text}")
            return original(*args, **kwargs)

        replaced.append((owner, name, original))
        setattr(owner, name, guarded)

    replace(time, "sleep", lambda seconds: f"time.sleep({seconds}) waits in real time, {_INSTEAD}")
    replace(threading.Condition, "wait", _why_not_wait)
    if dist.is_available():
        for name in ("init_process_group", "_get_default_group"):
            replace(distributed_c10d, name, lambda *args, **kwargs: _NO_DISTRIBUTED)
        replace(dist, "init_process_group", lambda *args, **kwargs: _NO_DISTRIBUTED)
    try:
        yield
    finally:
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)


_INSTEAD = (
    "and a simulated worker's time is virtual: give laconic.simulate the seconds in `compute`, "
    "or run the function with laconic.spawn"
)
_NO_DISTRIBUTED = (
    "torch.distributed has no processes to connect in a simulation: use the verbs of worker.comm, or run the function "
    "with laconic.spawn"
)


def _why_not_wait(condition: object, timeout: float | None = None) -> str | None:
    if timeout is not None:
        return f"a wait with a time-out of {timeout:g} s is in real time, {_INSTEAD}"
    if threading.active_count() == 1:  # all simulated workers share this thread, so none of them can end the wait
        return (
            "a wait for another thread would never end, since there is none: simulated workers wait for each other "
            "only in the verbs of worker.comm"
        )
    return None
