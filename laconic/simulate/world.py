"""All simulated workers of one call, their hosts and their jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from laconic.comm import Comm, PeerError
from laconic.comm.connect import IN_PROCESS
from laconic.simulate.comm import SimulatedComm
from laconic.simulate.engine import Engine
from laconic.simulate.job import Deadlock, Job
from laconic.simulate.memory import MemoryWatch
from laconic.simulate.network import Host, Network
from laconic.simulate.process import ProcessState


class World:
    """The workers, their hosts and their jobs.

    Args:
        hosts: one for each worker.
        compute: returns the seconds of a rank's step.
        seed: of all that is random.
    """

    def __init__(self, hosts: Sequence[Host], compute: Callable[[int, int], float], seed: int) -> None:
        self.engine = Engine()
        self.size = len(hosts)
        self._network = Network(self.engine, hosts, seed)
        self._compute, self._seed = compute, seed
        self._memory = MemoryWatch(self.size)
        self._jobs: list[Job] = []
        self._connected = [0] * self.size  # how many jobs each rank has connected to
        self.engine.on_deadlock = self._resolve_deadlock

    def start(self, rank: int, time: float, function: Callable[[], Any]) -> None:
        """Plans the start of a worker."""

        def run() -> Any:
            IN_PROCESS.set(lambda: self.connect(rank))
            return function()

        self.engine.start(rank, time, run, ProcessState(_environment(rank, self.size), f"{self._seed} {rank}"))
        self.engine.at(time, self._memory.add_worker)  # the worker has started by then, and waits

    def run(self, *, to_first_failure: bool) -> None:
        """Runs until all workers have ended, or the first has failed that is no consequence of another's failure."""
        if to_first_failure:
            self.engine.on_failure = lambda task: None if isinstance(task.error, PeerError) else self.engine.stop_soon()
        try:
            self.engine.run()
        finally:
            self.engine.stop()

    def connect(self, rank: int) -> Comm:
        """Connects a worker to its next job."""
        number = self._connected[rank]
        self._connected[rank] += 1
        if number == len(self._jobs):
            self._jobs.append(Job(self.engine, self._network, self.size))
        return SimulatedComm(self._jobs[number], rank, "foreground", partial(self._compute, rank))

    def kill(self, rank: int) -> None:
        """Ends a worker without a word to the others."""
        task = self.engine.tasks[rank]
        if not task.ended:
            self.engine.kill(task)
            for job in self._jobs:
                job.die(rank)

    def _resolve_deadlock(self) -> None:
        """Raises in all workers, which wait for each other, and says who waits where."""
        places = []
        for task in self.engine.tasks:
            if task.waits_for is not None:
                places.append(f"rank {task.rank} {task.waits_for()}")
            elif task.ended:
                how = "was killed" if task.killed else "has failed" if task.error else "has returned"
                places.append(f"rank {task.rank} {how}")
        shown = "; ".join(places[:16]) + (f"; and {len(places) - 16} others" if len(places) > 16 else "")
        for task in self.engine.tasks:
            if task.waits_for is not None:
                text = f"rank {task.rank} {task.waits_for()}, for ever: no worker can go on. {shown}"
                self.engine.resume(task, Deadlock(text))


def _environment(rank: int, workers: int) -> dict[str, str]:
    """Returns the environment variables that torchrun would set, except for those that connect processes."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
    }
