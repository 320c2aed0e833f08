"""Screens rules for rolling background averages with Adam on a panel of tasks, in one process and without a network.

    LACONIC_DATA=… python benchmarks/panel.py run --task gpt --rule stretched --workers 4 --period 4 --code uniform:4
    LACONIC_DATA=… python benchmarks/panel.py screen --out panel.jsonl     (all cells that the file lacks; hours)
    python benchmarks/panel.py table panel.jsonl

A cell is a task, a partition of its data, a number of workers, a period, a code, a learning rate and a seed. Every rule
trains the same cell: `full` (Adam on the mean gradient of every step), `never` (workers that never talk, evaluated as
the mean of their models) and the candidates for Divisible:

    local      each worker takes plain Adam steps; moves x − x̂ are averaged, 1/period of the coordinates a step, applied
               `delay` steps later
    stretched  the same, and each worker's Adam step is multiplied by ρ = √(V/v), where V is the second moment of its
               local gradient and v that of the mean gradient, estimated from V and m alone: the library's rule
    common_v   the same moves, divided by one v̂ for all workers. `oracle` takes the true v of the mean gradient, which
               no link could carry; `estimated` derives v̂ from the averaged moves
    replay     gains of m are averaged, and all workers replay Adam on the mean gradient; `v̂` from the gains

Per cell: the metric at the end against `full`, and the worst lead of `never` at any evaluation from step 40 on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laconic import compress, tasks
from laconic.tasks.task import Task, evaluation_mode

BETA1, EPS = 0.9, 1e-8


@dataclass(frozen=True)
class Cell:
    task: str = "gpt"
    rule: str = "stretched"
    workers: int = 4
    period: int = 4
    code: str = "identity"
    lr: float = 0.0  # 0: the task's
    seed: int = 0
    partition: str = "iid"
    delay: int = 1
    corrected: bool = False  # SCAFFOLD's gradient correction, from window means that travel beside the moves
    steps: int = 0  # 0: the task's in STEPS
    v_hat: str = "oracle"  # of common_v: oracle or estimated


STEPS = {"fashion": 300, "cifar10": 240, "translate": 160, "gpt": 160, "gpt999": 160}
RATES = {"fashion": 2e-3, "cifar10": 4e-3, "translate": 3e-3, "gpt": 2e-3, "gpt999": 2e-3}
EVALUATE_EVERY = 40


class Problem:
    """One task with its workers' data; gradients and evaluations at given flat parameters."""

    def __init__(self, cell: Cell) -> None:
        is_gpt = cell.task.startswith("gpt")
        kind = tasks.find_task("shakespeare" if is_gpt else cell.task)
        settings: dict[str, Any] = (
            {"subset": True, "model": "resnet8"} if cell.task == "cifar10" else {"batch_size": 8} if is_gpt else {}
        )
        self.task: Task = kind(partition=cell.partition, **settings)
        # The usual recipe of a small GPT: accumulation, clipping, decay of matrices only.
        self.accumulate, self.clip = (2, 1.0) if is_gpt else (1, None)
        self.beta2 = 0.95 if cell.task == "gpt" else 0.999
        self.steps = cell.steps or STEPS[cell.task]
        self.peak = cell.lr or RATES[cell.task]
        self.warmup = 40 if is_gpt else max(1, self.steps // 20)
        self.floor = 0.0 if is_gpt else 0.05
        torch.manual_seed(cell.seed)
        self.model = self.task.build_model()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.d = sum(p.numel() for p in self.parameters)
        self.x = torch.cat([p.detach().flatten() for p in self.parameters])
        self._g = torch.zeros(self.d)
        start = 0
        for p in self.parameters:
            span = slice(start, start + p.numel())
            p.data, p.grad, start = self.x[span].view_as(p), self._g[span].view_as(p), span.stop
        decay = 0.1 if is_gpt else self.task.weight_decay if self.task.optimizer == "adamw" else 0.0
        only_matrices = [decay if p.dim() > 1 or not is_gpt else 0.0 for p in self.parameters]
        self.decay = torch.cat(
            [torch.full((p.numel(),), w) for p, w in zip(self.parameters, only_matrices, strict=True)]
        )
        self._shards = [self.task.load(rank, cell.workers, cell.seed) for rank in range(cell.workers)]
        self._buffers = [[b.clone() for b in self.model.buffers()] for _ in range(cell.workers)]

    def lr(self, step: int) -> float:
        if step <= self.warmup:
            return self.peak * step / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.peak * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2)

    def gradient(self, worker: int, step: int, x: Tensor, out: Tensor) -> None:
        self.x.copy_(x)
        for buffer, saved in zip(self.model.buffers(), self._buffers[worker], strict=True):
            buffer.copy_(saved)
        self._g.zero_()
        for i in range(self.accumulate):
            batch = self._shards[worker].batch((step - 1) * self.accumulate + i)
            (self.task.loss(self.model, batch) / self.accumulate).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        for buffer, saved in zip(self.model.buffers(), self._buffers[worker], strict=True):
            saved.copy_(buffer)
        out.copy_(self._g)

    def evaluate(self, x: Tensor, at_end: bool) -> dict[str, float]:
        self.x.copy_(x)
        for i, buffer in enumerate(self.model.buffers()):
            values = [saved[i] for saved in self._buffers]
            buffer.copy_(torch.stack(values).mean(0) if buffer.is_floating_point() else values[0])
        if self.task.name == "translate" and not at_end:  # decoding takes longer than training
            return {"loss": translation_loss(self.model)}
        return self.task.evaluate(self.model)


def translation_loss(model: nn.Module) -> float:
    from laconic.tasks import translate

    arrays = translate.text.MULTI30K.arrays()
    order = np.argsort(np.diff(arrays["test_source_offsets"]), kind="stable")
    total, count = 0.0, 0
    with evaluation_mode(model):
        for part in np.array_split(order, 8):
            source, target = (translate.padded_sentences(arrays, f"test_{side}", part) for side in ("source", "target"))
            pieces = int((target[:, 1:] != translate.PAD).sum())
            total += pieces * translate.cross_entropy(model, (source, target), label_smoothing=0.0).item()
            count += pieces
    return total / count


class Rule:
    """All workers' vectors as matrices (workers, d), and what a rule does with a step's gradients.

    `advance` gets the local gradients (workers, d) in `g` and leaves the new parameters in `x`.
    """

    def __init__(self, cell: Cell, problem: Problem) -> None:
        n, d = cell.workers, problem.d
        self.cell, self.problem, self.n, self.d = cell, problem, n, d
        self.beta2, self.decay = problem.beta2, problem.decay
        self.x = problem.x.repeat(n, 1)
        self.m, self.v, self.g = (torch.zeros(n, d) for _ in range(3))
        self.rates: list[float] = []
        code = compress.parse(cell.code)
        self.code: Callable[[Tensor, int], Tensor] = lambda vector, step: (
            vector.clone()
            if cell.code == "identity"
            else code.decode(code.encode(vector, step=step), vector.numel(), step=step)
        )

    def update_moments(self) -> None:
        self.m.mul_(BETA1).add_(self.g, alpha=1 - BETA1)
        self.v.mul_(self.beta2).addcmul_(self.g, self.g, value=1 - self.beta2)

    def bias(self, step: int) -> tuple[float, float]:
        return 1 - BETA1**step, 1 - self.beta2**step

    def part(self, step: int) -> slice:
        place = (step - 1) % self.cell.period
        return slice(self.d * place // self.cell.period, self.d * (place + 1) // self.cell.period)

    def advance(self, step: int) -> None:
        raise NotImplementedError


class Full(Rule):
    def advance(self, step: int) -> None:
        lr, (c1, c2), mean = self.rates[-1], self.bias(step), self.g.mean(0)
        m, v, x = self.m[0], self.v[0], self.x[0]
        m.mul_(BETA1).add_(mean, alpha=1 - BETA1)
        v.mul_(self.beta2).addcmul_(mean, mean, value=1 - self.beta2)
        x.mul_(1 - lr * self.decay).sub_(lr * (m / c1) / ((v / c2).sqrt_() + EPS))
        self.x[1:] = x


class Local(Rule):
    """Moves with plain local Adam steps; subclasses change the denominator."""

    def __init__(self, cell: Cell, problem: Problem) -> None:
        super().__init__(cell, problem)
        self.x_hat = problem.x.clone()
        self.sent = torch.zeros(self.n, self.d)  # what messages in flight carry
        self.flights: deque[tuple[int, slice, list[Tensor]]] = deque()
        if cell.corrected:
            self.total, self.shift = (torch.zeros(self.n, self.d) for _ in range(2))
            self.gradients: deque[tuple[int, slice, Tensor]] = deque()

    def denominator(self, step: int) -> Tensor:
        return (self.v / self.bias(step)[1]).sqrt_().add_(EPS)

    def talks(self) -> bool:
        return True

    def advance(self, step: int) -> None:
        if self.cell.corrected:
            self.total += self.g
            self.g += self.shift
        self.update_moments()
        lr, (c1, _) = self.rates[-1], self.bias(step)
        denominator = self.denominator(step)
        self.x.mul_(1 - lr * self.decay).sub_((self.m * (lr / c1)).div_(denominator))
        if not self.talks():
            return
        part = self.part(step)
        while self.flights and self.flights[0][0] <= step:
            self.land(*self.flights.popleft()[1:])
        own = [self.code(self.x[i, part] - self.x_hat[part] - self.sent[i, part], step) for i in range(self.n)]
        for i, message in enumerate(own):
            self.sent[i, part] += message
        self.flights.append((step + self.cell.delay, part, own))
        if self.cell.corrected:
            self.correct(step, part)

    def land(self, part: slice, own: list[Tensor]) -> None:
        mean = torch.stack(own).mean(0)
        self.x_hat[part] += mean
        for i, message in enumerate(own):
            self.x[i, part] += mean - message
            self.sent[i, part] -= message

    def correct(self, step: int, part: slice) -> None:
        while self.gradients and self.gradients[0][0] <= step:
            _, where, means = self.gradients.popleft()
            self.shift[:, where] = means.mean(0) - means
        means = self.total[:, part] / min(step, self.cell.period)
        self.total[:, part] = 0
        self.gradients.append((step + self.cell.delay, part, means))


class Never(Local):
    def talks(self) -> bool:
        return False


class Stretched(Local):
    """v/V = 1 − (1 − 1/n)(1 − Q/V)/(1 − κ₀): of V a share is common to all workers, and the rest is noise that a mean
    of n gradients divides by n. Q is the second moment of m̂, in which noise alone leaves κ₀ = (1−β₁)/(1+β₁) of V."""

    def __init__(self, cell: Cell, problem: Problem) -> None:
        super().__init__(cell, problem)
        self.q = torch.zeros(self.n, self.d)

    def denominator(self, step: int) -> Tensor:
        part = self.part(step)
        (c1, c2), period = self.bias(step), self.cell.period
        if step <= period:  # where Q were still 0, all of V would be taken for noise
            self.q.copy_((self.m / c1).square_())
        else:
            weight = (1 - self.beta2**period) / c2
            self.q[:, part].mul_(1 - weight).add_((self.m[:, part] / c1).square_(), alpha=weight)
        slope = (1 - 1 / self.n) / (1 - (1 - BETA1) / (1 + BETA1))
        ratio = self.q / (self.v / c2).clamp_(min=1e-38)
        share = (1 - ratio).mul_(-slope).add_(1).clamp_(1 / self.n, 1.0)
        return super().denominator(step).mul_(share.sqrt_())


class CommonV(Local):
    """One v̂ for all workers, so that the division is linear and the mean of the moves is Adam on the mean gradient."""

    NOISE = 2.5  # of the squared change of the window's mean gradient in v̂; restores noise that a mean of windows lacks

    def __init__(self, cell: Cell, problem: Problem) -> None:
        super().__init__(cell, problem)
        self.v_hat, self.window = torch.zeros(self.d), torch.zeros(self.d)
        self.push = torch.zeros(self.d)
        self.pushes: deque[Tensor] = deque()
        self.is_starting = True

    def denominator(self, step: int) -> Tensor:
        (c1, c2), n = self.bias(step), self.n
        if self.cell.v_hat == "oracle":
            mean = self.g.mean(0)
            self.v_hat.mul_(self.beta2).addcmul_(mean, mean, value=1 - self.beta2)
            return (self.v_hat / c2).sqrt_().add_(EPS)
        v = self.v_hat
        if self.is_starting:
            bounded = torch.minimum((self.m / c1).square_().mul_(c2), self.v)
            v = self.v / n + (1 - 1 / n) * bounded
            if step == 2 * self.cell.period:
                self.v_hat, self.window = v.mean(0), self.m.mean(0)
                self.is_starting = False
                self.push.zero_()
        denominator = (v / c2).sqrt_().add_(EPS)
        if not self.is_starting:
            self.push += self.rates[-1] / c1 / denominator if denominator.dim() == 1 else 0.0
            self.pushes.append(self.push[self.part(step)].clone())
            self.push[self.part(step)] = 0
        return denominator

    def land(self, part: slice, own: list[Tensor]) -> None:
        if self.cell.v_hat == "estimated" and len(self.pushes) > 1:
            push, kept_m, kept_v = self.pushes.popleft(), BETA1**self.cell.period, self.beta2**self.cell.period
            if len(self.rates) > 3 * self.cell.period + 1 and bool((push > 0).all()):
                window = -torch.stack(own).mean(0) / push
                g = (window - kept_m * self.window[part]) / (1 - kept_m)
                change = (g - self.window[part]).square_().mul_(self.NOISE)
                self.v_hat[part] = kept_v * self.v_hat[part] + (1 - kept_v) * (g * g + change)
                self.window[part] = window
        super().land(part, own)


class Replay(Rule):
    """x̂, m̂, v̂ are Adam on the mean gradient up to the step of the last message; workers are ahead by local steps."""

    NOISE_SHARE = 0.5  # of (ḡ − m̂)², the rest is drift of the gradient
    LEAST_UNIT = 1e-3

    def __init__(self, cell: Cell, problem: Problem) -> None:
        super().__init__(cell, problem)
        self.x_hat, self.m_hat, self.v_hat = problem.x.clone(), torch.zeros(self.d), torch.zeros(self.d)
        self.since = [0] * cell.period
        self.flights: deque[tuple[int, int, int, slice, list[Tensor]]] = deque()

    def advance(self, step: int) -> None:
        self.update_moments()
        lr, (c1, c2) = self.rates[-1], self.bias(step)
        self.x.mul_(1 - lr * self.decay).sub_((self.m * (lr / c1)).div_((self.v / c2).sqrt_().add_(EPS)))
        while self.flights and self.flights[0][0] + self.cell.delay <= step:
            self.land(step, *self.flights.popleft())
        part, place = self.part(step), (step - 1) % self.cell.period
        since, self.since[place] = self.since[place], step
        root = self.v_hat[part].sqrt()
        least = torch.stack([block.max() for block in root.split(2048)]) * self.LEAST_UNIT + 1e-12
        unit = torch.maximum(root, least.repeat_interleave(2048)[: root.numel()])
        gains = [self.m[i, part] - BETA1 ** (step - since) * self.m_hat[part] for i in range(self.n)]
        self.flights.append((step, since, place, part, [self.code(gain / unit, step) * unit for gain in gains]))

    def land(self, step: int, sent: int, since: int, place: int, part: slice, gains: list[Tensor]) -> None:
        mean, k, f = torch.stack(gains).mean(0), sent - since, step - sent
        decay, coast, push = self.factors(since, sent, part)
        g, ratio = mean / (1 - BETA1**k), (1 + BETA1) / (1 - BETA1)
        effective = ratio * (1 - BETA1**k) / (1 + BETA1**k)
        noise = self.NOISE_SHARE * (effective - 1) / (1 + effective / ratio)
        before = self.m_hat[part] / (1 - BETA1**since) if since else 0.0
        kept = self.beta2**k
        self.v_hat[part] = kept * self.v_hat[part] + (1 - kept) * (g * g + noise * (g - before).square())
        root = (self.v_hat[part] / (1 - self.beta2**sent)).sqrt_().add_(EPS)
        self.x_hat[part] = self.x_hat[part] * decay - (self.m_hat[part] * coast + g * push) / root
        self.m_hat[part] = BETA1**k * self.m_hat[part] + mean
        decay, coast, push = self.factors(sent, step, part)
        for i, gain in enumerate(gains):
            m, v = self.m[i, part], self.v[i, part]
            m += BETA1**f * (mean - gain)
            local = (m - BETA1**f * self.m_hat[part]) / (1 - BETA1**f)
            v_since = self.v_hat[part] * self.beta2**f + local * local * (1 - self.beta2**f)
            root = (torch.maximum(v, v_since) / self.bias(step)[1]).sqrt_().add_(EPS)
            self.x[i, part] = self.x_hat[part] * decay - (self.m_hat[part] * coast + local * push) / root
            v.copy_(v_since)

    def factors(self, start: int, stop: int, part: slice) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """Of x, m and ḡ in x after steps start+1 to stop of Adam with the constant gradient ḡ."""
        decay, coast, push = torch.ones(part.stop - part.start), 0.0, 0.0
        for i, step in enumerate(range(start + 1, stop + 1), start=1):
            rate, left = self.rates[step - 1] / (1 - BETA1**step), 1 - self.rates[step - 1] * self.decay[part]
            coast, push = coast * left + rate * BETA1**i, push * left + rate * (1 - BETA1**i)
            decay = decay * left
        return decay, coast, push


RULES = {"full": Full, "never": Never, "local": Local, "stretched": Stretched, "common_v": CommonV, "replay": Replay}


def run(cell: Cell) -> dict[str, Any]:
    """Trains one cell; the curve has [step, metric, loss] of the mean model."""
    torch.set_num_threads(1)
    began = time.time()
    problem = Problem(cell)
    rule = RULES[cell.rule](cell, problem)
    curve = []
    for step in range(1, problem.steps + 1):
        rule.rates.append(problem.lr(step))
        for worker in range(cell.workers):
            problem.gradient(worker, step, rule.x[worker], rule.g[worker])
        with torch.no_grad():
            rule.advance(step)
        if step % EVALUATE_EVERY == 0 or step == problem.steps:
            found = problem.evaluate(rule.x.mean(0), step == problem.steps)
            curve.append([step, round(found.get(problem.task.metric, math.nan), 4), round(found["loss"], 4)])
    return {**dataclasses.asdict(cell), "curve": curve, "seconds": round(time.time() - began)}


def screen() -> list[Cell]:
    """Returns the cells of the recorded panel: all rules in the middle of every task, and one factor at a time around
    it for full communication and the library's rule."""
    four_bits = Cell(code="uniform:4")
    candidates = ["stretched", "replay", "local"]
    cells = []
    for task in STEPS:
        cells += [Cell(task, rule) for rule in ("full", "never")]
        cells += [replace(four_bits, task=task, rule=rule) for rule in candidates]
        cells += [Cell(task, "common_v", v_hat=v_hat) for v_hat in ("oracle", "estimated")]
    for task in STEPS:
        middle = replace(four_bits, task=task)
        # The shortest period, and with a code that sends fewer bytes than four bits do at a period of 4.
        cells += [replace(middle, period=1), replace(middle, period=1, code="pick:7")]
    for seed in (1, 2):
        middle = replace(four_bits, task="cifar10", seed=seed)
        cells += [replace(middle, rule=rule, code="identity") for rule in ("full", "never")]
        cells += [middle, replace(middle, period=1), replace(middle, period=1, code="pick:7")]
        cells += [replace(middle, rule="replay")]
    for task in ("fashion", "gpt", "cifar10", "translate"):
        other = {"fashion": "classes:2", "gpt": "contiguous", "cifar10": "classes:2", "translate": ""}[task]
        middle = replace(four_bits, task=task)
        around: list[dict[str, Any]] = [
            {"workers": 2},
            {"workers": 8},
            {"lr": RATES[task] / 2},
            {"lr": RATES[task] * 2},
        ]
        around += [{"seed": 1}] + [{"partition": other}] * bool(other)
        for change in around:
            cells += [replace(middle, **change), replace(middle, rule="full", code="identity", **change)]
            if task != "translate":  # which takes longest, and where `never` is far behind
                cells += [replace(middle, rule="never", code="identity", **change)]
        if task != "translate":
            cells += [replace(middle, period=period) for period in (8, 16)]
            cells += [replace(middle, code="pick:7")]
    unequal = replace(four_bits, task="fashion", partition="classes:2")
    cells += [replace(unequal, rule="replay")]
    cells += [replace(unequal, corrected=True, period=p, lr=lr) for p in (4, 2, 1) for lr in (1e-3, 0.0)]
    cells += [replace(unequal, corrected=True, period=1, lr=1e-3, code="pick:7")]
    return sorted(dict.fromkeys(cells), key=lambda cell: cell.task == "translate")  # the longest last


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of a Markdown table: for every cell the metric and its gap to full communication at the end
    (loss in percent, accuracy in points; below 0 is better for a loss and worse for an accuracy), and the worst gap to
    `never`."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("task", "workers", "lr", "partition", "seed", "steps"))

    by_rule = {(key(row), row["rule"]): row for row in rows if row["rule"] in ("full", "never")}
    yield "| task | data | steps | rule | workers | period | code | rate | seed | end | to full | worst to never |"
    yield "|---" * 12 + "|"
    for row in sorted(rows, key=lambda row: (row["task"], row["partition"], row["workers"], row["lr"], row["rule"])):
        by_loss = row["task"] not in ("fashion", "cifar10")
        column = 2 if by_loss else 1

        def gap(point: list[float], other: list[float], by_loss: bool = by_loss, column: int = column) -> float:
            return 100 * (point[column] / other[column] - 1 if by_loss else point[column] - other[column])

        full, never = (by_rule.get((key(row), rule)) for rule in ("full", "never"))
        last = row["curve"][-1]
        to_full = f"{gap(last, full['curve'][-1]):+.2f} {'%' if by_loss else 'points'}" if full else "–"
        gaps = [gap(a, b) for a, b in zip(row["curve"], never["curve"], strict=True)] if never else []
        worst = f"{(max if by_loss else min)(gaps):+.2f}" if gaps and row["rule"] not in ("full", "never") else "–"
        name = row["rule"] + (", corrected" if row["corrected"] else "")
        name += f", {row['v_hat']} v̂" if row["rule"] == "common_v" else ""
        rate = row["lr"] or RATES[row["task"]]
        yield (
            f"| {row['task']} | {row['partition']} | {last[0]} | {name} | {row['workers']} | {row['period']} | "
            f"{row['code']} | {rate:g} | {row['seed']} | {last[column]:.4f} | {to_full} | {worst} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    for field in dataclasses.fields(Cell):
        kind = {"str": str, "int": int, "float": float}.get(str(field.type))
        if kind is None:
            one.add_argument(f"--{field.name}", action="store_true")
        else:
            one.add_argument(f"--{field.name}", type=kind, default=field.default)
    every = commands.add_parser("screen")
    for command in (one, every):
        command.add_argument("--out", type=Path)
    commands.add_parser("table").add_argument("file", type=Path)
    options = vars(parser.parse_args())
    command, out = options.pop("command"), options.pop("out", None)
    if command == "table":
        rows = [json.loads(line) for line in options["file"].read_text().splitlines()]
        print(*table(rows), sep="\n")
        return
    done = [] if out is None or not out.exists() else [json.loads(line) for line in out.read_text().splitlines()]
    names = [field.name for field in dataclasses.fields(Cell)]
    known = {Cell(**{name: row[name] for name in names}) for row in done}
    for cell in [Cell(**options)] if command == "run" else [cell for cell in screen() if cell not in known]:
        line = json.dumps(run(cell))
        if out is None:
            print(line, flush=True)
        else:
            with out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
