"""Efficient-Adam: the toy convex problem with and without error feedback.

python benchmarks/efficient_adam/toy.py --out docs/methods/efficient_adam_toy.svg
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import laconic
from laconic.compress import Compressor, Identity, Log, Sign
from laconic.method import Replica

D = 256


@dataclass
class WithoutFeedback(laconic.EfficientAdam):
    """Discards the quantization errors at both ends after each step."""

    def after_step(self, worker: Replica) -> None:
        super().after_step(worker)
        self.e.zero_()
        self.e_server.zero_()


def methods() -> dict[str, laconic.Method]:
    def both(compressor: Compressor) -> dict[str, Compressor]:
        return {"up": compressor, "down": compressor}

    return {
        "no quantization": laconic.EfficientAdam(**both(Identity())),
        "3 bits, feedback": laconic.EfficientAdam(**both(Log(3, block=D))),
        "3 bits, no feedback": WithoutFeedback(**both(Log(3, block=D))),
        "1 bit, feedback": laconic.EfficientAdam(**both(Sign(block=D))),
        "1 bit, no feedback": WithoutFeedback(**both(Sign(block=D))),
    }


class Toy(nn.Module):
    """f(w) = ½ Σ s_j (w_j − w*_j)² over 248 of 256 coordinates; the gradient of the other 8 is pure noise.

    Convex, with the same optimum for every worker. The noise keeps the block's scale large while the rest approaches
    its optimum, so small steps are rounded to zero unless error feedback accumulates them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(D))
        self.optimum = torch.randn(D, generator=torch.Generator().manual_seed(seed))
        self.is_noise = torch.arange(D) % 32 == 0
        self.s = torch.logspace(0, -0.5, D) * ~self.is_noise

    def gradient(self, generator: torch.Generator) -> Tensor:
        noise = torch.randn(D, generator=generator) * self.is_noise
        return self.s * (self.w.detach() - self.optimum) + noise

    def loss(self) -> float:
        return float((0.5 * self.s * (self.w.detach() - self.optimum) ** 2).sum())


def descend(seed: int, steps: int) -> dict[str, list[float]]:
    """Trains with every method and returns f after every step, on one worker."""
    curves = {}
    for name, method in methods().items():
        model = Toy(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        curve = []
        with laconic.Worker(model, optimizer, method) as worker:
            generator = torch.Generator().manual_seed(1000 * seed + worker.rank)
            for _ in range(steps):
                model.w.grad = model.gradient(generator)
                optimizer.step()
                schedule.step()
                curve.append(model.loss())
        curves[name] = curve
    return curves


def toy(workers: int, steps: int, seeds: int, out: Path) -> None:
    runs = [laconic.spawn(descend, workers, seed, steps)[0] for seed in range(seeds)]
    print(f"f − f* after {steps} steps, {workers} workers, {seeds} seeds: median (smallest to largest)")
    for name in runs[0]:
        last = sorted(run[name][-1] for run in runs)
        print(f"  {name:22s} {statistics.median(last):.1e}  ({last[0]:.1e} to {last[-1]:.1e})")
    medians = {
        name: [statistics.median(values) for values in zip(*(run[name] for run in runs), strict=True)]
        for name in runs[0]
    }
    out.write_text(plot(medians, f"f − f*, median of {seeds} seeds"))
    print(f"wrote {out}")


def plot(curves: dict[str, list[float]], title: str) -> str:
    """Draws curves over steps with a logarithmic axis, as a plain SVG."""
    width, height, left, top, bottom = 720, 400, 60, 30, 40
    steps = max(map(len, curves.values()))
    low, high = -9, 2

    def x(step: int) -> float:
        return left + step / steps * (width - left - 170)

    def y(value: float) -> float:
        exponent = min(high, max(low, math.log10(max(value, 1e-30))))
        return top + (high - exponent) / (high - low) * (height - top - bottom)

    colours = ["#444444", "#1b6ca8", "#7fb3d5", "#b03a2e", "#e6a39a"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        '  font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="18">{title}</text>',
    ]
    for exponent in range(low, high + 1):
        level = y(10.0**exponent)
        parts.append(f'<line x1="{left}" x2="{x(steps)}" y1="{level:.1f}" y2="{level:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{level + 4:.1f}" text-anchor="end">1e{exponent}</text>')
    for step in range(0, steps + 1, max(1, steps // 6)):
        parts.append(f'<text x="{x(step):.1f}" y="{height - 20}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{x(steps // 2):.1f}" y="{height - 4}" text-anchor="middle">step</text>')
    for (name, curve), colour in zip(curves.items(), colours, strict=True):
        every = max(1, len(curve) // 240)
        points = " ".join(f"{x(i):.1f},{y(curve[i]):.1f}" for i in range(0, len(curve), every))
        dashes = ' stroke-dasharray="5 4"' if name == "no quantization" else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
    placed = sorted((y(curve[-1]), name, colour) for (name, curve), colour in zip(curves.items(), colours, strict=True))
    last = 0.0
    for level, name, colour in placed:
        last = max(level + 4, last + 14)
        parts.append(f'<text x="{x(steps) + 8:.1f}" y="{last:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/methods/efficient_adam_toy.svg"))
    arguments = parser.parse_args()
    toy(arguments.workers, arguments.steps, arguments.seeds, arguments.out)


if __name__ == "__main__":
    main()
