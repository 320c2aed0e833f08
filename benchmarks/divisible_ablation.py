"""Which background rule, period, bits and moments for Divisible? Many workers simulated in one process, no network.

    LACONIC_DATA=… python benchmarks/divisible_ablation.py rules --out rules.jsonl

The rules are written out here again, for n workers at once, so that rules which the library does not have can be
compared with the one it has. Fashion-MNIST, MLP of 235 k parameters, Adam, cosine; accuracy of the mean model.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from laconic import compress

SIZES = (784, 256, 128, 10)
BITS = {"identity": 32, "uniform:8": 8, "uniform:4": 4, "log:4": 4, "log:3": 3, "sign": 1}


@dataclass(frozen=True)
class Run:
    """`rule`: rolling (the library's), whole (one snapshot of everything, H steps in flight), none, full (Adam on the
    mean gradient). `moments`: local, averaged (m and v), second (v alone), corrected (stale mean gradient)."""

    rule: str = "rolling"
    ratio: int = 1024
    period: int = 8
    delay: int = 1
    coder: str = "identity"
    moments: str = "local"
    partition: str = "iid"
    workers: int = 8
    steps: int = 800
    batch: int = 32
    lr: float = 3e-3
    seed: int = 0


@functools.cache
def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with np.load(Path(os.environ["LACONIC_DATA"]) / "fashion_mnist.npz") as data:
        arrays = [data[name] for name in ("x_train", "y_train", "x_test", "y_test")]
    train_x, train_y, test_x, test_y = map(torch.from_numpy, arrays)

    def flat(x: Tensor) -> Tensor:
        return (x.reshape(len(x), -1).float() / 255 - 0.2860) / 0.3530

    return flat(train_x), train_y.long(), flat(test_x), test_y.long()


def split(labels: Tensor, workers: int, partition: str, generator: torch.Generator) -> Tensor:
    """Rows of each worker (workers, rows): shuffled, or sorted by class and cut, so that each sees one or two."""
    order = torch.randperm(len(labels), generator=generator)
    if partition == "classes":
        order = order[labels[order].argsort(stable=True)]
    return order[: len(order) // workers * workers].view(workers, -1)


def layers(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Weights (n, in, out) and biases (n, 1, out) as views of the parameters (n, d)."""
    found, at = [], 0
    for fan_in, fan_out in itertools.pairwise(SIZES):
        weight = x[:, at : at + fan_in * fan_out].unflatten(1, (fan_in, fan_out))
        at += fan_in * fan_out
        found.append((weight, x[:, at : at + fan_out].unsqueeze(1)))
        at += fan_out
    return found


def gradient(x: Tensor, images: Tensor, labels: Tensor, out: Tensor) -> None:
    """Of each worker's mean cross-entropy, into `out` (n, d); written out, as autograd would copy (n, d) per layer."""
    parameters, gradients = layers(x), layers(out)
    inputs = [images]  # of each layer (n, batch, in)
    for weight, bias in parameters:
        h = torch.bmm(inputs[-1], weight) + bias
        inputs.append(h.relu())
    delta = torch.softmax(h, dim=2)
    delta.scatter_add_(2, labels.unsqueeze(2), torch.full_like(labels, -1, dtype=h.dtype).unsqueeze(2))
    delta /= labels.shape[1]
    for k in reversed(range(len(parameters))):
        gradients[k][0].copy_(torch.bmm(inputs[k].transpose(1, 2), delta))
        gradients[k][1].copy_(delta.sum(1, keepdim=True))
        if k:
            delta = torch.bmm(delta, parameters[k][0].transpose(1, 2)) * (inputs[k] > 0)


def accuracy(x: Tensor, images: Tensor, labels: Tensor) -> float:
    h = images.unsqueeze(0)
    for k, (weight, bias) in enumerate(layers(x.unsqueeze(0))):
        h = torch.bmm(h.relu() if k else h, weight) + bias
    return float((h[0].argmax(1) == labels).float().mean())


def quantize(x: Tensor, coder: str) -> Tensor:
    """Encode and decode each row of x."""
    if coder == "identity":
        return x
    compressor = compress.parse(coder)
    rows = [row.contiguous() for row in x]
    return torch.stack([compressor.decode(compressor.encode(row), row.numel()) for row in rows])


@dataclass
class Piece:
    """A part of the vectors on its way: what each worker gave (n, length), what comes back (length)."""

    part: slice
    due: int
    given: dict[str, Tensor]
    mean: dict[str, Tensor]


class Simulation:
    def __init__(self, run: Run) -> None:
        self.run = run
        generator = torch.Generator().manual_seed(run.seed)
        self.train_x, self.train_y, self.test_x, self.test_y = load()
        self.rows = split(self.train_y, run.workers, run.partition, generator)
        self.generator = generator
        parts = []
        for fan_in, fan_out in itertools.pairwise(SIZES):
            bound = 1 / math.sqrt(fan_in)
            parts.append(torch.empty(fan_in * fan_out + fan_out).uniform_(-bound, bound, generator=generator))
        start = torch.cat(parts)
        self.d = start.numel()
        n = 1 if run.rule == "full" else run.workers
        self.x = torch.nn.Parameter(start.repeat(n, 1))
        self.base = start.clone()  # x̂
        self.s = torch.zeros(n, self.d)
        self.g = torch.zeros(run.workers, self.d)
        self.g_sum = torch.zeros(n, self.d) if run.moments == "corrected" else None
        self.correction = torch.zeros(n, self.d) if run.moments == "corrected" else None
        self.server = {name: torch.zeros(self.d) for name in "xg"}
        self.optimizer = torch.optim.Adam([self.x], lr=run.lr, fused=True)
        self.flying: list[Piece] = []

    @torch.no_grad()
    def train(self) -> float:
        run = self.run
        for t in range(1, run.steps + 1):
            for group in self.optimizer.param_groups:
                group["lr"] = run.lr * 0.5 * (1 + math.cos(math.pi * t / run.steps))
            picks = torch.randint(self.rows.shape[1], (run.workers, run.batch), generator=self.generator)
            rows = self.rows.gather(1, picks)
            x = self.x.detach()
            gradient(x.expand(run.workers, -1), self.train_x[rows], self.train_y[rows], self.g)
            if run.rule == "full":
                self.x.grad = self.g.mean(0, keepdim=True)
            elif self.correction is not None and self.g_sum is not None:
                self.g_sum += self.g
                self.x.grad = self.g + self.correction
            else:
                self.x.grad = self.g
            self.optimizer.step()
            if run.rule != "full":
                self.talk(t)
        return accuracy(self.x.detach().mean(0), self.test_x, self.test_y)

    def talk(self, t: int) -> None:
        run, d, x = self.run, self.d, self.x.detach()
        length = -(-d // run.ratio)
        blocks = -(-d // length)
        stride = round(blocks * 0.618) | 1
        while math.gcd(stride, blocks) > 1:
            stride += 1
        start = t * stride % blocks * length
        part = slice(start, min(start + length, d))
        e = x[:, part] - self.base[part] - self.s[:, part]
        self.base[part] += e.mean(0)
        x[:, part] = self.base[part] + self.s[:, part]
        if run.rule == "none":
            return
        while self.flying and self.flying[0].due == t:
            self.arrive(self.flying.pop(0))
        if run.rule == "whole":
            if (t - 1) % run.period == 0:
                self.launch(slice(0, d), t, t + run.period)
            return
        width = -(-d // run.period)
        start = (t - 1) % run.period * width
        if start < d:
            self.launch(slice(start, min(start + width, d)), t, t + run.delay)

    def launch(self, part: slice, t: int, due: int) -> None:
        run, state = self.run, self.optimizer.state[self.x]
        vectors = {"x": self.x.detach()[:, part] - self.base[part] - self.s[:, part]}
        if run.moments == "averaged":
            vectors["m"] = state["exp_avg"][:, part].clone()
        if run.moments in ("averaged", "second"):
            vectors["v"] = state["exp_avg_sq"][:, part].clone()
        if self.g_sum is not None:
            vectors["g"] = self.g_sum[:, part] / min(t, run.period)
            self.g_sum[:, part] = 0
        given, mean = {}, {}
        for name, vector in vectors.items():
            if name == "v" and run.coder != "identity":  # its range is the square of the others': code the root
                given[name] = quantize(vector.sqrt(), run.coder).square()
                goal = given[name].mean(0)
                mean[name] = quantize(goal.sqrt()[None], run.coder)[0].square()
                continue
            given[name] = quantize(vector, run.coder)
            goal = given[name].mean(0)
            if name in self.server:
                goal += self.server[name][part]
            mean[name] = quantize(goal[None], run.coder)[0]
            if name in self.server:
                self.server[name][part] = goal - mean[name]
        self.s[:, part] += given["x"]
        self.flying.append(Piece(part, due, given, mean))

    def arrive(self, piece: Piece) -> None:
        part, given, mean = piece.part, piece.given, piece.mean
        state = self.optimizer.state[self.x]
        self.base[part] += mean["x"]
        self.x.detach()[:, part] += mean["x"] - given["x"]
        self.s[:, part] -= given["x"]
        if self.correction is not None:
            self.correction[:, part] = mean["g"] - given["g"]
        elif "m" in given:
            state["exp_avg"][:, part] += mean["m"] - given["m"]
        if "v" in given:
            v = state["exp_avg_sq"][:, part]
            v.copy_(torch.maximum(v + mean["v"] - given["v"], 0.1 * torch.maximum(v, mean["v"])))


def rules() -> Iterator[Run]:
    """Whole or rolling, delay, at equal bytes and fp32."""
    yield from (Run(rule="full"), Run(rule="full", partition="classes"), Run(rule="none"))
    for period in (8, 2, 32):
        yield Run(rule="whole", period=period)
        for delay in sorted({1, 2, period}):
            yield Run(rule="rolling", period=period, delay=delay)
    for rule in ("whole", "rolling"):
        yield Run(rule=rule, period=8, moments="averaged", partition="classes")
    yield Run(period=8, delay=2, moments="averaged", partition="classes")


def moments() -> Iterator[Run]:
    """What travels beside the residual, at equal periods; bytes differ (1, 3, 2, 2 vectors)."""
    for partition, period in itertools.product(("classes", "iid"), (8, 2)):
        for kind in ("local", "averaged", "second", "corrected"):
            yield Run(period=period, moments=kind, partition=partition)


def bits() -> Iterator[Run]:
    """At equal bytes: a link that takes `rho` steps for all in fp32 gives each coder its own period."""
    vectors = {"local": 1, "averaged": 3, "corrected": 2}
    for rho, coder in itertools.product((6, 30), ("identity", "uniform:4", "log:4", "sign", "uniform:8", "log:3")):
        for partition, kind in (("iid", "local"), ("classes", "corrected"), ("classes", "averaged")):
            least = 2 if coder == "identity" else 4  # as "auto" has it
            period = max(least, math.ceil(1.1 * rho * vectors[kind] * BITS[coder] / 32))
            delay = 1 if coder == "identity" else 2  # a mean of codes takes two messages
            yield Run(period=period, coder=coder, moments=kind, partition=partition, delay=delay)


def ratios() -> Iterator[Run]:
    for partition, kind in (("iid", "local"), ("classes", "corrected")):
        for ratio, period in itertools.product((64, 1024, 10**6), (1, 4)):
            yield Run(ratio=ratio, period=period, coder="uniform:4", moments=kind, partition=partition, delay=2)


GRIDS: dict[str, Callable[[], Iterator[Run]]] = {"rules": rules, "moments": moments, "bits": bits, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", choices=GRIDS)
    parser.add_argument("--out", type=Path, required=True, help="one line of JSON a run is appended")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=800)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    done = {json.dumps(json.loads(line)["run"]) for line in lines}
    for seed in range(options.seeds):
        for run in GRIDS[options.grid]():
            run = dataclasses.replace(run, seed=seed, steps=options.steps)
            if json.dumps(dataclasses.asdict(run)) in done:
                continue
            start = time.monotonic()
            result = {"run": dataclasses.asdict(run), "accuracy": round(Simulation(run).train(), 4)}
            result["seconds"] = round(time.monotonic() - start, 1)
            with open(options.out, "a") as file:
                file.write(json.dumps(result) + "\n")
            print(result, flush=True)


if __name__ == "__main__":
    main()
