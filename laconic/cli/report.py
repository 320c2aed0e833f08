"""`laconic report`: draws the report of earlier runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from laconic.cli.command import Command, make_console, parse_target
from laconic.cli.options import POSITIONAL


@dataclass
class Report(Command):
    """Draw the report of earlier runs again, or one report of the runs in several folders.

    Args:
        directories: output folders of compare, train or report; their runs are joined
        out: the folder for runs.jsonl and index.html: by default the only folder; one of them to add to it, or a new
            one
        target: a value of the task's metric, such as accuracy=85; by default that of the runs
        overwrite: replace the runs of an earlier report in --out
    """

    directories: Annotated[tuple[Path, ...], POSITIONAL] = ()
    out: Path | None = None
    target: str | None = None
    overwrite: bool = False

    def run(self) -> int:
        from laconic.bench.join import common_target, join_runs, write_runs
        from laconic.bench.record import RunsFile
        from laconic.bench.report import check_same_task, write_report
        from laconic.bench.table import table

        if not self.directories:
            raise ValueError("name at least one folder with runs: laconic report runs/compare")
        if self.out is None and len(self.directories) > 1:
            raise ValueError("several folders need --out: one of them to add the runs of the others, or a new folder")
        out = self.out or self.directories[0]
        records = join_runs(self.directories)
        check_same_task(records)
        target = common_target(records) if self.target is None else parse_target(self.target, records[0].metric)
        if out.resolve() in [directory.resolve() for directory in self.directories]:
            present = join_runs([out])
            for record in records:
                if record not in present:
                    RunsFile(out).append(record)
        else:
            write_runs(records, out, self.overwrite)
        write_report(records, out / "index.html", target)
        console = make_console()
        console.print(table(records, target))
        console.print(f"report: {out / 'index.html'}", highlight=False, soft_wrap=True)
        return 0
