"""`laconic store`: holds the store of a job."""

from __future__ import annotations

import contextlib
import signal
import socket
from dataclasses import dataclass

from laconic.cli.command import Command


@dataclass
class Store(Command):
    """Hold the store of a job, outside of its workers, so that the job survives the loss of any of them.

    Args:
        port: the port at which workers reach the store
        address: the address of this machine to listen at; by default all its addresses
    """

    port: int = 29500
    address: str = ""

    def run(self) -> int:
        from laconic.launch import open_store

        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port must be from 0 (any free port) to 65535, not {self.port}")
        store = open_store(self.address, self.port)
        where = self.address or socket.gethostname()
        print(f"laconic: holding a store at {where}:{store.port}, until interrupted. Set for each worker:", flush=True)
        print(f"MASTER_ADDR={where} MASTER_PORT={store.port} TORCHELASTIC_USE_AGENT_STORE=True", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
        return 0
