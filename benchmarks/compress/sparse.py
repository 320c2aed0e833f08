"""Codes for periodic averaging on very slow links: accuracy at equal steps and equal bytes, in one process, simulated.

python benchmarks/compress/sparse.py --period 8 pick topk:0.0145 sparse:0.083
python benchmarks/compress/sparse.py --period 21 pick --decay 0.9
python benchmarks/compress/sparse.py --partition classes:2 uniform:4 --moments-every 4

Local steps of Adam on all workers, then an average with error feedback at both ends, as `LocalSGD(period, compressor)`
makes it. `sparse:RATIO` is a code that laconic does not have, because of what this script has shown: the largest
entries of a part, each as its index (Elias–Fano coded, as in `TopK`) and its sign; `sparse:RATIO:2` has two magnitudes,
`sparse:RATIO:2:4096` selects in chunks of 4096 entries and sends indices of 12 bits, as SparseLoCo does.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.compress import Compressor, bits_per_entry, parse
from laconic.tasks.fashion import Fashion
from laconic.tasks.vision import mlp

BLOCK = 512  # values that share a scale


@dataclass(frozen=True)
class Narrow(Fashion):
    """fashion with a narrower model, of 0.27 M parameters."""

    def build_model(self) -> nn.Module:
        return mlp(784, 256, 256, 10)


@dataclass(frozen=True)
class Sparse:
    """Rounds a vector as a sparse code would; the code itself is not written."""

    ratio: float
    bits: int = 1  # of a value: its sign, and with 2 one of two magnitudes
    chunk: int = 0  # entries among which the largest are selected; 0: all

    def bits_per_entry(self) -> float:
        index = math.log2(self.chunk) if self.chunk else 2 + math.log2(1 / self.ratio)
        scales = 32 * self.bits / (self.ratio * self.chunk if self.chunk else BLOCK)
        return self.ratio * (index + self.bits + scales)

    def __call__(self, vector: Tensor) -> Tensor:
        length = self.chunk or vector.numel()
        rows = nn.functional.pad(vector, (0, -vector.numel() % length)).view(-1, length)
        chosen = rows.abs().topk(max(1, round(self.ratio * length))).indices.sort().values
        values = rows.gather(1, chosen)
        in_block = values.shape[1] if self.chunk else BLOCK
        blocks = nn.functional.pad(values, (0, -values.shape[1] % in_block)).view(-1, in_block)
        rounded = self._round(blocks).view(len(rows), -1)[:, : values.shape[1]]
        return torch.zeros_like(rows).scatter_(1, chosen, rounded).view(-1)[: vector.numel()]

    def _round(self, blocks: Tensor) -> Tensor:
        magnitude = blocks.abs()
        is_used = magnitude > 0
        mean = mean_where(is_used, magnitude)
        if self.bits == 1:
            return blocks.sign() * mean
        is_large = magnitude > mean
        large, small = mean_where(is_large, magnitude), mean_where(is_used & ~is_large, magnitude)
        return blocks.sign() * torch.where(is_large, large, small)


def mean_where(mask: Tensor, values: Tensor) -> Tensor:
    return (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def parse_code(text: str) -> tuple[Callable[[Tensor], Tensor], float]:
    """Returns the function that rounds a vector, and its bits per entry."""
    if text.startswith("sparse:"):
        ratio, *rest = text.removeprefix("sparse:").split(":")
        sparse = Sparse(float(ratio), *map(int, rest))
        return sparse, sparse.bits_per_entry()
    compressor: Compressor = parse(text)
    return lambda x: compressor.decode(compressor.encode(x), x.numel()), bits_per_entry(compressor)


class Feedback:
    """Rounds vectors part by part, and adds the error to the next vector, times `decay`."""

    def __init__(self, code: Callable[[Tensor], Tensor], parts: int, decay: float) -> None:
        self.code, self.parts, self.decay, self.residual = code, parts, decay, torch.zeros(())

    def __call__(self, vector: Tensor) -> Tensor:
        total = vector + self.decay * self.residual
        rounded = torch.cat([self.code(part) for part in torch.tensor_split(total, self.parts)])
        self.residual = total - rounded
        return rounded


@dataclass(frozen=True)
class Trial:
    task: Fashion
    steps: int
    workers: int
    period: int
    decay: float
    moments_every: int  # rounds between averages of Adam's m and v; 0: never


def flatten(model: nn.Module) -> Tensor:
    """Moves the parameters into one vector and returns it."""
    x = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(x, model.parameters())
    return x


def run(trial: Trial, text: str, seed: int) -> str:
    code, bits = parse_code(text)
    task, n = trial.task, trial.workers
    models = []
    for _ in range(n):
        torch.manual_seed(seed)
        models.append(task.build_model())
    xs = [flatten(model) for model in models]
    optimizers = [task.build_optimizer(model) for model in models]
    schedules = [task.build_schedule(optimizer, trial.steps) for optimizer in optimizers]
    shards = [task.load(rank, n, seed) for rank in range(n)]
    up = [Feedback(code, n, trial.decay) for _ in range(n)]
    down, anchor, rounds = Feedback(code, n, trial.decay), xs[0].clone(), 0
    for step in range(trial.steps):
        for model, optimizer, schedule, shard in zip(models, optimizers, schedules, shards, strict=True):
            task.backward(model, shard, step)
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
        if (step + 1) % trial.period:
            continue
        rounds += 1
        anchor += down(torch.stack([send(x - anchor) for send, x in zip(up, xs, strict=True)]).mean(0))
        for x in xs:
            x.copy_(anchor)
        if trial.moments_every and rounds % trial.moments_every == 0:
            states = [[optimizer.state[p] for p in optimizer.param_groups[0]["params"]] for optimizer in optimizers]
            for of_workers in zip(*states, strict=True):
                for name in ("exp_avg", "exp_avg_sq"):
                    mean = torch.stack([state[name] for state in of_workers]).mean(0)
                    for state in of_workers:
                        state[name].copy_(mean)
    xs[0].copy_(torch.stack(xs).mean(0))
    figures = task.evaluate(models[0])
    bits += 64 / trial.moments_every if trial.moments_every else 0
    kilobytes = 2 * (n - 1) / n * bits * anchor.numel() / 8e3 / trial.period
    return (
        f"| {text} | {trial.period} | {bits:.2f} | {kilobytes:.2f} | {seed} | "
        f"{100 * figures['accuracy']:.2f} | {figures['loss']:.4f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("codes", nargs="+")
    parser.add_argument("--full", action="store_true", help="the model of 1.86 M parameters, not that of 0.27 M")
    parser.add_argument("--partition", default="iid")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--period", type=int, default=8)
    parser.add_argument("--decay", type=float, default=1.0, help="of the residual, per round")
    parser.add_argument("--moments-every", type=int, default=0, help="rounds between averages of m and v; 0: never")
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = (Fashion if given.full else Narrow)(partition=given.partition)
    trial = Trial(task, given.steps, given.workers, given.period, given.decay, given.moments_every)
    print("| code | period | bits an entry and round | kB a step and worker | seed | accuracy, % | loss |")
    print("|---|---|---|---|---|---|---|")
    for text in given.codes:
        for seed in range(given.seeds):
            print(run(trial, text, seed), flush=True)


if __name__ == "__main__":
    main()
