"""`laconic demo`: a small comparison that shows what communication buys, in one to three minutes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from laconic.bench.units import seconds_text
from laconic.cli.command import Command, fail, make_console, typed_command
from laconic.cli.compare import Compare, report_failures

# Streaming DiLoCo, in 4 bits as in its paper. It makes few outer steps in 100 steps: with the paper's outer momentum of
# 0.9 it overshoots. Its settings are the best of 12 streaming ones in a simulation of this task (periods of 8 and 16, 2
# and 4 fragments, delays of 1 to 4, mixing of 0 and 0.5, fp32 and 4 bits), where plain DiLoCo in fp32, at the best of
# 18 settings, takes twice as long. The other contenders have their defaults.
STREAMING = "diloco+period=8+fragments=4+delay=1+mixing=0+outer_momentum=0.5+compressor=Uniform(4)"
CONTENDERS = (
    "none",
    "none_averaged",
    "ddp",
    "powersgd",
    STREAMING,
    "divisible",
    "local_sgd+compressor=Uniform(4)",
    "efficient_adam",
)
LINK = "100mbit"
TASK_SETTINGS = {"model": "middle", "train_images": 200, "batch_size": 16}
INTRODUCTION = """\
Four workers learn to read handwritten digits (0.3 M parameters, 8 × 8 pixels, from scikit-learn). Each of them has 50
labelled images; 1597 other images test the result. 50 images are too few to reach the target, so workers must
communicate. Each worker is a process on an emulated host of its own, behind a link of 100 Mbit/s."""


@dataclass
class Demo(Command):
    """Run an example: four workers with 50 images each, on emulated links of 100 Mbit/s; one to three minutes.

    Args:
        out: the folder for runs.jsonl and index.html
        seeds: the number of seeds
        target: the accuracy to reach
        overwrite: delete the results of an earlier demo in --out
        resume: keep the runs of an interrupted demo in --out, and make the others
    """

    out: Path = Path("runs/demo")
    seeds: int = 2
    target: str = "accuracy=93"
    overwrite: bool = False
    resume: bool = False

    def run(self) -> int:
        from laconic.bench.compare import compare
        from laconic.bench.race import Race, race_table
        from laconic.bench.report import write_report
        from laconic.emulate import EmulationError, Network, parse_links

        start = time.monotonic()
        link = LINK
        try:
            with Network(parse_links(link, 4)):
                pass
        except EmulationError as error:
            fail(f"{error}; the demo continues on loopback, where communication costs next to nothing", 0)
            link = "none"
        comparison = Compare(methods=",".join(CONTENDERS), link=link, steps=100, seeds=self.seeds, target=self.target)
        comparison.out, comparison.overwrite, comparison.resume = self.out, self.overwrite, self.resume
        comparison.task_settings = dict(TASK_SETTINGS)
        contenders, plan, kept = comparison.prepare()
        assert plan.target is not None
        console = make_console()
        console.print(INTRODUCTION, highlight=False, soft_wrap=True)
        records = compare(contenders, plan, self.seeds, self.out, Race(console, contenders, plan.target), kept)
        write_report(records, self.out / "index.html", plan.target)
        console.print(race_table(records, plan.target))
        took = seconds_text(time.monotonic() - start)
        console.print(f"took {took}; curves: {self.out / 'index.html'}", highlight=False, soft_wrap=True)
        return report_failures(records)

    def after_interrupt(self) -> str:
        return f"resume with: {typed_command().replace(' --overwrite', '').replace(' --resume', '')} --resume"
