"""The command line: lists methods, trains with one of them, and compares them with baselines on emulated networks.

A subcommand is a dataclass (`laconic.cli.command.Command`) and one line in `COMMANDS`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from laconic.cli.command import Command, fail
from laconic.cli.compare import Compare
from laconic.cli.data import Data
from laconic.cli.demo import Demo
from laconic.cli.methods import Methods
from laconic.cli.options import summary_of
from laconic.cli.report import Report
from laconic.cli.store import Store
from laconic.cli.top import Top
from laconic.cli.train import Train
from laconic.names import suggestion
from laconic.version import __version__

COMMANDS: dict[str, type[Command]] = {
    "methods": Methods,
    "train": Train,
    "compare": Compare,
    "report": Report,
    "demo": Demo,
    "data": Data,
    "store": Store,
    "top": Top,
}


def main() -> None:
    """Runs the command line. Exit code 2 means wrong arguments, exit code 1 a run that failed, 130 an interrupt."""
    # torch warns from C++ that emulated hosts have no host names. Nothing depends on them.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(call(sys.argv[1:]))


def call(words: Sequence[str]) -> int:
    """Runs one command, and returns its exit code."""
    command: Command | None = None
    try:
        if not words or words[0] in ("-h", "--help"):
            print(overview())
            return 0 if words else 2
        if words[0] in ("-V", "--version"):
            print(f"laconic {__version__}")
            return 0
        if words[0] not in COMMANDS:
            near = suggestion(words[0], COMMANDS)
            raise ValueError(f"no command is called {words[0]!r}{near or ';'} there are: {', '.join(COMMANDS)}")
        command = COMMANDS[words[0]].read(words[0], words[1:])
        return command.run()
    except (ValueError, FileExistsError, FileNotFoundError) as error:
        return fail(str(error), 2)
    except (OSError, RuntimeError) as error:
        return fail(str(error), 1)
    except KeyboardInterrupt:
        advice = command.after_interrupt() if command else ""
        return fail(f"interrupted; {advice}" if advice else "interrupted", 130)


def overview() -> str:
    """Returns the help text of `laconic` itself."""
    lines = [
        "usage: laconic COMMAND …",
        "",
        "Data-parallel PyTorch training over slow networks.",
        "",
        "commands:",
        *(f"  {name:<9}{summary_of(kind)}" for name, kind in COMMANDS.items()),
        "",
        "options:",
        "  -h, --help     show this text; laconic COMMAND --help shows the options of a command,",
        "                 laconic train METHOD --task TASK --help also the settings of a method and a task",
        "  -V, --version  show the version",
    ]
    return "\n".join(lines)
