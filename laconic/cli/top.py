"""`laconic top`: the live view of a job in a terminal."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from rich.live import Live

from laconic.cli.command import Command
from laconic.cli.options import POSITIONAL
from laconic.tracking.server import parse_address
from laconic.tracking.top import draw, fetch

REFRESH_SECONDS = 1.0


@dataclass
class Top(Command):
    """Show the live view of a running job, which Worker(..., dashboard=8080) serves. Ends with the job.

    Args:
        address: HOST:PORT of the dashboard, or only its port on this machine
        once: print the view once and exit
    """

    address: Annotated[str, POSITIONAL] = "127.0.0.1:8080"
    once: bool = False

    def run(self) -> int:
        host, port = parse_address(int(self.address) if self.address.isdecimal() else self.address)
        console = Console() if sys.stdout.isatty() else Console(width=160)
        view = draw(fetch(host, port))
        if self.once:
            console.print(view)
            return 0
        with Live(view, console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                time.sleep(REFRESH_SECONDS)
                live.update(draw(fetch(host, port)), refresh=True)
