"""`laconic compare`: trains one task with several methods and baselines."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.cli.command import TrainingCommand, fail, make_console, typed_command
from laconic.rules import check_count

if TYPE_CHECKING:
    from laconic.bench.record import Record
    from laconic.bench.run import Plan
    from laconic.bench.strategies import Contender


@dataclass
class Compare(TrainingCommand):
    """Train one task with several methods and baselines, on the same data, seeds and network, and write a report.

    Args:
        methods: methods and baselines, separated by commas, with optional settings, such as
            ddp,local_sgd+period=4+compressor=Uniform(4); by default all that are installed. `laconic train METHOD
            --help` lists settings
        seeds: the number of seeds, counted up from --seed
        target: a value of the task's metric, such as accuracy=85 or loss=1.9: tables and report show the time to reach
            it; by default none
        out: the folder for runs.jsonl and index.html
        overwrite: delete the results of an earlier comparison in --out
        resume: keep the runs in --out that are complete, if they were made with the same settings, and make the others
        simulate: simulate the workers in one process and in virtual time, with --link as a simulated link such as
            1gbit+50ms; only laconic's methods can be simulated; hundreds of workers fit in one process
        compute: with --simulate, the seconds in which a worker computes a step; by default measured on this machine
    """

    methods: str = ""
    seeds: int = 1
    target: str | None = None
    out: Path = Path("runs/compare")
    overwrite: bool = False
    resume: bool = False
    simulate: bool = False
    compute: float | None = None

    @property
    def is_simulated(self) -> bool:
        return self.simulate

    def run(self) -> int:
        from laconic.bench.compare import compare
        from laconic.bench.progress import Display
        from laconic.bench.report import write_report
        from laconic.bench.table import table

        console = make_console()
        contenders, plan, kept = self.prepare()
        records = compare(contenders, plan, self.seeds, self.out, Display(console), kept)
        console.print(table(records, plan.target))
        write_report(records, self.out / "index.html", plan.target)
        console.print(f"report: {self.out / 'index.html'}", highlight=False, soft_wrap=True)
        return report_failures(records)

    def prepare(self) -> tuple[list[Contender], Plan, list[Record]]:
        """Checks all options, prepares the folder, and returns the contenders, the plan, and the runs to keep.

        Raises:
            ValueError: An option is not valid, or the runs in the folder were made with other settings.
        """
        from laconic.bench.compare import prepare_folder
        from laconic.bench.resume import finished_runs, keep_only
        from laconic.bench.strategies import MethodStrategy, installed_strategies, parse_contender, split_contenders

        check_count("seeds", self.seeds)
        if self.resume and self.overwrite:
            raise ValueError("give either --resume or --overwrite, not both")
        if self.compute is not None and not self.simulate:
            raise ValueError("--compute is for simulated workers: add --simulate, or leave it out")
        chosen = split_contenders(self.methods) if self.methods else installed_strategies()
        contenders = [parse_contender(name) for name in chosen]
        if self.simulate and not self.methods:
            contenders = [one for one in contenders if isinstance(one.strategy, MethodStrategy)]
        labels = [contender.label for contender in contenders]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"--methods has {twice[0]} twice")
        # `none` comes first: its step time is the compute time, from which the waiting time of baselines follows.
        contenders.sort(key=lambda contender: contender.method != "none")
        plan = self.plan(self.target)
        if self.simulate:
            plan = self.simulated_plan(plan, contenders)
        kept = finished_runs(self.out, contenders, plan) if self.resume else []
        if kept and self.rho is not None:
            plan = dataclasses.replace(plan, link=kept[0].link)  # the link that was measured for --rho
        else:
            plan = self.with_rate(plan)
        if kept:
            keep_only(self.out, kept)
        else:
            prepare_folder(self.out, self.overwrite)
        return contenders, plan, kept

    def simulated_plan(self, plan: Plan, contenders: list[Contender]) -> Plan:
        """Returns the plan with the seconds that a simulated step computes.

        Raises:
            ValueError: A contender or the link cannot be simulated.
        """
        from laconic.bench.simulated import measure_compute, require_simulable

        if self.rho is not None:
            raise ValueError("--rho measures real processes: with --simulate, give --link and --compute")
        for contender in contenders:
            require_simulable(contender, plan)
        seconds = measure_compute(plan) if self.compute is None else self.compute
        return dataclasses.replace(plan, simulated=seconds)

    def after_interrupt(self) -> str:
        command = typed_command().replace(" --overwrite", "").replace(" --resume", "")
        return f"resume with: {command} --resume"


def report_failures(records: list[Record]) -> int:
    """Prints why runs failed, and returns the exit code."""
    failed = [record for record in records if record.status != "ok"]
    for record in failed:
        fail(f"{record.name} (seed {record.seed}): {record.reason}", 1)
    return 1 if failed else 0
