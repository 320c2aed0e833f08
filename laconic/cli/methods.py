"""`laconic methods`: lists methods and baselines."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from laconic.cli.command import Command, make_console
from laconic.cli.options import options_of, summary_of, value_text


@dataclass
class Methods(Command):
    """List all methods and baselines, with their settings and papers."""

    def run(self) -> int:
        from laconic.bench.baselines import BASELINES
        from laconic.methods import METHODS

        table = Table(title="methods of laconic, then baselines", show_lines=True)
        for header in ("name", "settings", "description", "paper"):
            table.add_column(header)
        kinds: dict[str, type] = {**METHODS, **BASELINES}
        for name, kind in kinds.items():
            defaults = "\n".join(f"{option.name}={value_text(option.default)}" for option in options_of(kind))
            table.add_row(name, defaults, summary_of(kind), getattr(kind, "paper", "") or "–")
        console = make_console()
        console.print(table)
        console.print("laconic train NAME --help explains the settings", highlight=False)
        return 0
