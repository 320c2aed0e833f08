"""Gives each attempt at a job a store without the keys of attempts before it.

torchrun restarts failed workers with the same store, in which the dead workers' addresses still are. The count of
restarts that torchrun passes on does not tell attempts apart: it may differ between machines, and does not change when
workers are restarted because a machine came or went. So rank 0 of each attempt draws a name for it. The others must not
take the name of a dead rank 0: every rank writes a random greeting, and believes only a list that has it.
"""

from __future__ import annotations

import json
import secrets
import time

from torch.distributed.distributed_c10d import PrefixStore, Store

from laconic.comm.comm import PeerError

POLL_SECONDS = 0.02


def own_store(store: Store, rank: int, size: int, timeout: float) -> Store:
    """Returns a part of the store that only this attempt uses; all ranks call it.

    Args:
        store: of the job; it may have served earlier attempts.
        rank: this worker.
        size: the number of workers.
        timeout: seconds to wait for the others.

    Raises:
        PeerError: a rank did not come in time.
    """
    greeting = secrets.token_hex(8)
    store.set(f"laconic/greeting/{rank}", greeting)
    deadline = time.monotonic() + timeout
    greetings: dict[str, str] = {}
    while True:
        if rank == 0:
            seen = {str(r): _read(store, f"laconic/greeting/{r}") for r in range(size)}
            if seen != greetings:  # some may be those of dead workers, until the new ones come
                greetings = seen
                store.set("laconic/attempt", json.dumps([greeting, greetings]))
        found = _read(store, "laconic/attempt")
        name, listed = json.loads(found) if found else ("", {})
        if listed.get(str(rank)) == greeting:
            own = PrefixStore(f"laconic/attempt/{name}", store)
            own.set(f"here/{rank}", "")
            if rank != 0:
                return own
            missing = [r for r in range(size) if not own.check([f"here/{r}"])]
            if not missing:
                return own
        if time.monotonic() > deadline:
            whom = f"ranks {', '.join(map(str, missing))}" if rank == 0 else "rank 0"
            raise PeerError(f"rank {rank}: the start waited {timeout:g} s for {whom}")
        time.sleep(POLL_SECONDS)


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
