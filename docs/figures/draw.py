"""Draws timelines of the methods, a flow chart and a chart: `python docs/figures/draw.py` writes the SVG files here.

The time axes are schematic, not measured; the chart is of recorded runs. Colours follow the page where the site puts a
figure into it, and the reader's light or dark theme elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

WIDTH, LABELS, LANE, ROW = 520, 70, 22, 46
STYLE = """<style>
.fig { font: 14px system-ui, "Segoe UI", sans-serif; --i: var(--ink, #24292f); --f: var(--faint, #c8ccd1); }
@media (prefers-color-scheme: dark) { .fig { --i: var(--ink, #e6edf3); --f: var(--faint, #555d66); } }
.fig text { fill: var(--i); } .fig .small { font-size: 12.5px; } .fig .bold { font-weight: 600; }
.fig .compute { fill: var(--i); fill-opacity: .14; stroke: var(--i); stroke-opacity: .45; }
.fig .wait { fill: #d55e00; } .fig .hidden { fill: #56b4e9; }
.fig .line { stroke: var(--f); fill: none; } .fig .join { stroke: #d55e00; stroke-width: 1.5; }
.fig .pair { stroke: #56b4e9; stroke-width: 2; } .fig .arrow { stroke: var(--i); stroke-width: 1.3; fill: none; }
.fig .head { fill: var(--i); } .fig .box { fill: var(--i); fill-opacity: .05; stroke: var(--i); stroke-opacity: .6; }
.fig .answer { fill: #009e73; fill-opacity: .16; stroke: #009e73; stroke-width: 1.5; }
</style>"""


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def svg(height: float, marks: Iterable[str]) -> str:
    opening = f'<svg class="fig" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">'
    return "\n".join([opening, STYLE, *marks, "</svg>"]) + "\n"


@dataclass
class Timeline:
    """Workers as rows: a lane of computing above a lane of messages. Time is in units of one step's computing."""

    workers: int
    end: float
    marks: list[str] = field(default_factory=list)
    top: float = 22

    def x(self, time: float) -> float:
        return LABELS + time * (WIDTH - LABELS - 6) / self.end

    def y(self, worker: int) -> float:
        return self.top + worker * ROW

    def _bar(self, kind: str, worker: int, start: float, stop: float, y: float, height: float) -> None:
        left, width = self.x(start), self.x(min(stop, self.end)) - self.x(start) - 1
        self.marks.append(
            f'<rect class="{kind}" x="{left:.1f}" y="{y:g}" width="{width:.1f}" height="{height}" rx="2"/>'
        )

    def compute(self, worker: int, start: float, stop: float) -> None:
        self._bar("compute", worker, start, stop, self.y(worker), LANE)

    def wait(self, start: float, stop: float, workers: Iterable[int] | None = None) -> None:
        """Draws a message that all the workers wait for."""
        chosen = list(range(self.workers) if workers is None else workers)
        for worker in chosen:
            self._bar("wait", worker, start, stop, self.y(worker) + LANE + 3, 9)
        middle = self.x((start + stop) / 2)
        self.marks.append(
            f'<line class="join" x1="{middle:.1f}" x2="{middle:.1f}" y1="{self.y(chosen[0]) + LANE + 7:g}" '
            f'y2="{self.y(chosen[-1]) + LANE + 8:g}"/>'
        )

    def hidden(self, worker: int, start: float, stop: float) -> None:
        self._bar("hidden", worker, start, stop, self.y(worker) + LANE + 3, 9)

    def exchange(self, one: int, other: int, start: float, stop: float) -> None:
        """Draws an exchange between two workers in the background, joined near its end."""
        for worker in (one, other):
            self.hidden(worker, start, stop)
        middle = self.x(stop - 0.15)
        self.marks.append(
            f'<line class="pair" x1="{middle:.1f}" x2="{middle:.1f}" y1="{self.y(one) + LANE + 8:g}" '
            f'y2="{self.y(other) + LANE + 8:g}"/>'
        )

    def applied(self, worker: int, time: float) -> None:
        """Marks where an average is applied."""
        self.marks.append(f'<path class="head" d="M{self.x(time) - 5:.1f} {self.y(worker) + LANE + 3:g} h8 l-4 -7 z"/>')

    def note(self, time: float, content: str, anchor: str = "middle") -> None:
        self.marks.append(text(self.x(time), 14, content, "small", anchor))

    def draw(self, *kinds: str) -> str:
        names = [text(0, self.y(worker) + 16, f"worker {worker}") for worker in range(self.workers)]
        bottom = self.top + self.workers * ROW
        axis = [
            f'<line class="line" x1="{LABELS}" x2="{WIDTH - 4}" y1="{bottom:g}" y2="{bottom:g}"/>',
            text(WIDTH - 4, bottom + 16, "time →", "small", "end"),
        ]
        meaning = {
            "compute": "forward, backward, optimizer step",
            "wait": "message that workers wait for",
            "hidden": "message in the background: nobody waits",
            "applied": "average applied",
        }
        legend, y = [], bottom + 16
        for kind in kinds:
            mark = (
                f'<path class="head" d="M6 {y:g} h10 l-5 -9 z"/>'
                if kind == "applied"
                else f'<rect class="{kind}" x="1" y="{y - 10:g}" width="20" height="11" rx="2"/>'
            )
            legend += [mark, text(28, y, meaning[kind], "small")]
            y += 19
        return svg(y - 6, [*names, *axis, *self.marks, *legend])


def allreduce() -> str:
    line = Timeline(3, 7.5)
    for step in range(3):
        start = 2.5 * step
        for worker in range(3):
            line.compute(worker, start, start + 1)
        line.wait(start + 1, start + 2.5)
        line.note(start + 1.75, "gradient, fp32")
    return line.draw("compute", "wait")


def qsgd() -> str:
    line = Timeline(3, 7.2)
    for step in range(4):
        start = 1.8 * step
        for worker in range(3):
            line.compute(worker, start, start + 1)
        line.wait(start + 1, start + 1.37)
        line.wait(start + 1.42, start + 1.8)
        line.note(start + 1.8, "8 bits ×2", "end")
    return line.draw("compute", "wait")


def rounds(periods: list[int], label: str) -> str:
    line = Timeline(3, sum(periods) + 1.2 * len(periods))
    start = 0.0
    for period in periods:
        for _ in range(period):
            for worker in range(3):
                line.compute(worker, start, start + 1)
            start += 1
        line.wait(start, start + 1.2)
        line.note(start + 1.2, label.format(period=period), "end")
        start += 1.2
    return line.draw("compute", "wait")


def efficient_adam() -> str:
    line = Timeline(3, 6.4)
    for step in range(4):
        start = 1.6 * step
        for worker in range(3):
            line.compute(worker, start, start + 1)
        line.wait(start + 1, start + 1.27)
        line.wait(start + 1.32, start + 1.6)
        line.note(start + 1.6, "3 bits ↑ ↓", "end")
    return line.draw("compute", "wait")


def diloco() -> str:
    """Two fragments in a period of four steps, each applied one step after it was sent."""
    line = Timeline(3, 9)
    for step in range(9):
        for worker in range(3):
            line.compute(worker, step, step + 1)
            if step and step % 2 == 0:
                line.hidden(worker, step + 0.05, step + 0.9)
                line.applied(worker, step + 1)
    for step, name in ((2, "first half"), (4, "second half"), (6, "first half")):
        line.note(step + 0.5, name)
    line.note(9, "second half", "end")  # centred above its bar it would leave the figure
    return line.draw("compute", "hidden", "applied")


def divisible() -> str:
    line = Timeline(3, 6.1)
    for step in range(6):
        start = 1.02 * step
        for worker in range(3):
            line.compute(worker, start, start + 1)
            if step:
                line.hidden(worker, start + 0.1, start + 0.95)
                line.applied(worker, start + 1)
        if step < 5:
            line.wait(start + 0.985, start + 1.05)
    line.note(1.05, "block of d/1024")
    line.note(3.6, "next quarter of the model, 4 bits")
    return line.draw("compute", "wait", "hidden", "applied")


def a2cid2() -> str:
    line = Timeline(4, 6)
    for worker, length in enumerate([1.0, 0.9, 1.7, 1.0]):
        start = 0.0
        while start < 6:
            line.compute(worker, start, min(start + length, 6))
            start += length
    line.exchange(0, 1, 0.3, 1.5)
    line.exchange(2, 3, 0.7, 1.9)
    line.exchange(1, 2, 2.1, 3.3)
    line.exchange(0, 3, 2.4, 3.7)
    line.exchange(0, 1, 3.9, 5.1)
    line.exchange(2, 3, 4.1, 5.3)
    line.note(3, "one neighbour at a time; worker 2 is slow and delays nobody")
    return line.draw("compute", "hidden")


def box(x: float, y: float, width: float, lines: list[str], kind: str) -> list[str]:
    height = 18 * len(lines) + 14
    marks = [f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>']
    for i, line in enumerate(lines):
        indent = 7 * (len(line) - len(line.lstrip()))
        marks.append(text(x + 10 + indent, y + 20 + 18 * i, line.lstrip(), "" if i else "bold"))
    return marks


def arrow(x1: float, y1: float, x2: float, y2: float, label: str) -> list[str]:
    tip = f"M{x2:g} {y2:g} l-8 -4 v8 z" if y1 == y2 else f"M{x2:g} {y2:g} l-4 -8 h8 z"
    where = (x1 + 6, y1 - 6) if y1 == y2 else (x1 + 8, (y1 + y2) / 2 + 4)
    return [
        f'<line class="arrow" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>',
        f'<path class="head" d="{tip}"/>',
        text(*where, label, "small"),
    ]


def choose() -> str:
    rows = [
        (
            ["1. How slow is the link?", "ρ = time to all-reduce the", "gradient / time to compute it"],
            "ρ < 0.2",
        ),
        (["2. Are workers reliable?", "equally fast, always there,", "each can connect to each"], "no"),
        (["3. Is the data iid?", "shuffled over the workers", "by a sampler"], "no"),
    ]
    answers = [
        ["DDP, or AllReduce()", "little to gain here"],
        ["A2CiD2()", "waits for nobody and", "outlives lost workers"],
        ["Divisible(", "    corrected=True)", "or QSGD(): every step"],
    ]
    marks: list[str] = []
    y, onward = 4.0, ["ρ > 0.2", "yes", "yes"]
    for (question, aside), answer, down in zip(rows, answers, onward, strict=True):
        height = 18 * len(question) + 14
        marks += box(2, y, 246, question, "box") + box(328, y, 190, answer, "answer")
        marks += arrow(248, y + 24, 326, y + 24, aside) + arrow(60, y + height, 60, y + height + 36, down)
        y += height + 36
    hidden = ["Divisible()", "or DiLoCo(8, fragments=4,", "    delay=2,", "    compressor=Uniform(4))"]
    hidden += ["both hide sending behind", "computing; any optimizer"]
    marks += box(2, y, 246, hidden, "answer")
    simplest = ["or LocalSGD(8,", "    compressor=Uniform(4))", "simplest: waits in 1 of 8 steps"]
    marks += box(262, y, 256, simplest, "answer")
    return svg(y + 18 * len(hidden) + 18, marks)


def scale() -> str:
    """Draws the distance among workers on rings, from the record of simulated runs."""
    record = Path(__file__).parents[2] / "benchmarks" / "simulate" / "claims.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    variants = [
        ("with momentum, 1 exchange a step", True, 1, "answer"),
        ("without, 2 exchanges a step", False, 2, "compute"),
        ("without, 1 exchange a step", False, 1, "wait"),
    ]
    marks, y = [text(2, 14, "distance among workers at step 500 (iid data, simulated)", "bold")], 26.0
    for workers in (16, 32, 64):
        marks.append(text(2, y + 32, f"ring of {workers}"))
        for label, momentum, rate, kind in variants:
            settings = {"claim": "gossip", "task": "fashion", "data": "iid", "graph": "ring", "workers": workers}
            settings |= {"momentum": momentum, "rate": rate}
            found = [line["distances"][1] for line in lines if settings.items() <= line.items()]
            distance = sum(found) / len(found)
            width = 110 * distance
            marks.append(f'<rect class="{kind}" x="86" y="{y:g}" width="{width:.1f}" height="14" rx="2"/>')
            marks.append(text(92 + width, y + 12, f"{distance:.2f}  {label}", "small"))
            y += 18
        y += 12
    return svg(y, marks)


FIGURES = {
    "scale": scale,
    "allreduce": allreduce,
    "qsgd": qsgd,
    "local_sgd": lambda: rounds([4, 4], "mean of x"),
    "adpsgd": lambda: rounds([1, 2, 3, 4], "period {period}"),
    "efficient_adam": efficient_adam,
    "diloco": diloco,
    "divisible": divisible,
    "a2cid2": a2cid2,
    "choose": choose,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw())
