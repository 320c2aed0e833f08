"""Other rules for Divisible's background, tried on a task: its workers simulated in one process, no network.

    LACONIC_DATA=… python benchmarks/divisible_rules.py hops corrected mixed replicas --seeds 2
    LACONIC_DATA=… python benchmarks/divisible_rules.py v common --task translate --steps 300 --seeds 1

Accuracy of the mean model in percent, or its BLEU, for each seed; with four workers.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from divisible import SETTINGS
from torch import Tensor

from laconic import compress, tasks
from laconic.methods.common import find_kernels
from laconic.methods.steering import KEPT, LEAST_SHARE
from laconic.methods.windows import Cut, Run, Step, Vectors, Window, in_m, least_units
from laconic.tasks import Task

BETA2 = 0.999


@dataclass(frozen=True)
class Case:
    """`moments`: full (Adam on the fresh mean gradient), common, local and corrected as in the library, replicas (Adam
    on the stale mean gradient: all are alike). `coder` is for what travels, `gradient_coder` for gradients beside it.
    """

    moments: str = "local"
    period: int = 4
    delay: int = 1
    coder: str = "identity"
    gradient_coder: str = "identity"
    feedback: bool = False  # what a gradient's code loses goes into the next one
    fresh: int = 0  # the smallest tensors, up to d / fresh entries, have the fresh mean gradient in every step
    lookahead: float = 0.0  # replicas: gradients are taken where x will be after so many more steps like the last
    own: float = 1.0  # corrected: the share of the own gradient, and of the own stale one that is taken off
    steer: float | str = "lasting"  # common: by the share of a difference that lasts, or by this share of it
    v: str = "as moments say"  # or made in each step of the fresh mean gradient: "fresh", or with one factor a "tensor"
    partition: str = "iid"
    lr: float = 2e-3


CASES = {
    "hops": [
        Case("full"),
        Case(period=1, delay=0),
        Case(period=1),
        Case(period=4),
        Case(period=4, delay=2),
        Case(period=4, coder="uniform:4"),
        Case(period=4, coder="log:4"),
        Case(period=8, coder="uniform:4"),
        Case(period=8, coder="log:4"),
    ],
    "corrected": [
        Case("corrected", period, delay, coder, gradient_coder, feedback, fresh, partition="classes:2")
        for period, delay, coder, gradient_coder, feedback, fresh in [
            (1, 0, "identity", "identity", False, 0),
            (1, 1, "identity", "identity", False, 0),
            (4, 1, "identity", "identity", False, 0),
            (4, 2, "identity", "identity", False, 0),
            (4, 1, "uniform:4", "uniform:4", False, 0),
            (4, 1, "uniform:4", "uniform:4", True, 0),
            (4, 1, "uniform:4", "log:3", False, 0),
            (4, 1, "uniform:4", "log:4", False, 0),
            (4, 1, "uniform:4", "uniform:8", False, 0),
            (4, 1, "log:4", "log:4", False, 0),
            (4, 1, "log:4", "log:4", True, 0),
            (3, 1, "log:4", "log:4", False, 0),
            (2, 1, "log:4", "log:4", False, 0),
            (2, 1, "log:4", "log:4", True, 0),
            (2, 1, "uniform:4", "uniform:4", False, 0),
            (4, 1, "identity", "identity", False, 128),
        ]
    ],
    "mixed": [
        Case("corrected", own=0.5),
        Case("corrected", own=0.5, partition="classes:2"),
    ],
    "v": [
        Case("full", lr=3e-3),
        Case("local", 1, 0, lr=3e-3),
        Case("local", 1, 0, lr=6e-3),
        Case("local", 4, coder="uniform:4", lr=3e-3),
        Case("local", 1, 0, v="tensor", lr=3e-3),
        Case("local", 1, 0, v="fresh", lr=3e-3),
        Case("local", 2, coder="uniform:4", v="fresh", lr=3e-3),
    ],
    "common": [
        Case("full", lr=3e-3),
        *(Case("common", period, coder="uniform:4", lr=3e-3) for period in (1, 2, 4, 8, 16)),
        *(Case("local", period, coder="uniform:4", lr=3e-3) for period in (4, 8, 16)),
        Case("common", 4, lr=3e-3),
        Case("common", 4, coder="log:4", lr=3e-3),
        Case("common", 4, coder="uniform:2", lr=3e-3),
        Case("common", 4, coder="uniform:4", lr=3e-3, delay=2),
    ],
    "unlike": [
        *(Case("common", period, coder="uniform:4", partition="classes:2") for period in (1, 2, 3, 4, 8)),
        *(Case("common", 4, coder="uniform:4", partition="classes:2", steer=share) for share in (0.0, 0.5, 1.0)),
        Case("common", 4, partition="classes:2"),
        Case("common", 4, coder="log:4", partition="classes:2"),
    ],
    "replicas": [
        Case("replicas", period, delay, lookahead=lookahead, lr=lr)
        for period, delay, lookahead, lr in [
            (1, 0, 0.0, 2e-3),
            (1, 1, 0.0, 2e-3),
            (1, 1, 1.0, 2e-3),
            (2, 1, 2.0, 2e-3),
            (1, 2, 2.0, 2e-3),
            (4, 1, 3.0, 2e-3),
            (1, 1, 0.0, 1e-3),
            (1, 1, 1.0, 1e-3),
        ]
    ],
}


class Replica:
    """One worker's model and optimizer, its parameters and gradients as vectors (d)."""

    def __init__(self, task: Task, shard: Any, steps: int) -> None:
        self.model = task.build_model()
        parameters = list(self.model.parameters())
        self.x = torch.cat([p.data.reshape(-1) for p in parameters])
        self.g = torch.zeros_like(self.x)
        self.spans, start = [], 0
        for p in parameters:
            span = slice(start, start + p.numel())
            p.data, p.grad = self.x[span].view_as(p), self.g[span].view_as(p)
            self.spans.append(span)
            start = span.stop
        self.optimizer = task.build_optimizer(self.model)
        self.schedule = task.build_schedule(self.optimizer, steps)
        self._task, self._shard = task, shard

    def gradient(self, step: int) -> Tensor:
        self.g.zero_()
        self._task.loss(self.model, self._shard.batch(step - 1)).backward()
        return self.g

    def step(self) -> None:
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()


class Channel:
    """Means of one vector that all workers sent: each coordinate once a `period`, back after `delay` steps."""

    def __init__(self, period: int, delay: int, d: int, coder: str) -> None:
        self._compressor = compress.parse(coder)
        self._width, self._pieces, self._delay = -(-d // period), period, delay
        self._flying: deque[tuple[int, slice, list[Tensor], Tensor]] = deque()

    def piece(self, step: int, d: int) -> slice:
        start = (step - 1) % self._pieces * self._width
        return slice(start, min(start + self._width, d))

    def send(self, step: int, piece: slice, vectors: list[Tensor]) -> list[Tensor]:
        """What the codes say."""
        said = [self._compressor.decode(self._compressor.encode(v), v.numel()) for v in vectors]
        self._flying.append((step + self._delay, piece, said, torch.stack(said).mean(0)))
        return said

    def due(self, step: int) -> list[tuple[slice, list[Tensor], Tensor]]:
        arrived = []
        while self._flying and self._flying[0][0] <= step:
            arrived.append(self._flying.popleft()[1:])
        return arrived


class FreshV:
    """v in each step as the mean gradient makes it, or the own one times their ratio over each tensor."""

    def __init__(self, case: Case, replicas: list[Replica]) -> None:
        self._by_tensor = case.v == "tensor"
        self._own = torch.zeros(len(replicas), replicas[0].x.numel())
        self._mean = torch.zeros(replicas[0].x.numel())
        self._spans = replicas[0].spans
        self._recent = torch.zeros(2, len(self._spans))  # sums of squares of each tensor: of the mean, own

    def before_step(self, replicas: list[Replica], mean: Tensor) -> None:
        n = len(replicas)
        self._mean.mul_(BETA2).addcmul_(mean, mean, value=1 - BETA2)
        for i, span in enumerate(self._spans):
            squares = torch.stack([mean[span].square().sum(), sum(r.g[span].square().sum() for r in replicas) / n])
            self._recent[:, i].mul_(0.95).add_(squares)
        for own, replica in zip(self._own, replicas, strict=True):
            own.mul_(BETA2).addcmul_(replica.g, replica.g, value=1 - BETA2)
            wanted = self._mean.clone()
            if self._by_tensor:
                for i, span in enumerate(self._spans):
                    wanted[span] = own[span] * self._recent[0, i] / self._recent[1, i]
            wanted = torch.minimum(torch.maximum(wanted, own / n), own)
            before = (wanted - (1 - BETA2) * replica.g.square()) / BETA2  # the optimizer will add the own square
            for p, span in zip(replica.model.parameters(), self._spans, strict=True):
                if p not in replica.optimizer.state:
                    zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    replica.optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}
                replica.optimizer.state[p]["exp_avg_sq"].copy_(before[span].view_as(p))


class Steered:
    """One worker of `common_adam`: its vectors, and what it steers by."""

    def __init__(self, case: Case, replica: Replica, common: list[Tensor]) -> None:
        d = replica.x.numel()
        self.vectors = Vectors(*common, replica.x, torch.zeros(d), torch.zeros(d), torch.zeros(d))
        self.share = 0.0 if case.steer == "lasting" else float(case.steer)
        self.shares = [0.0]
        self._replica, self._lasts, self._seen = replica, case.steer == "lasting", (0.0, 0.0)
        for p, span in zip(replica.model.parameters(), replica.spans, strict=True):
            m, v = self.vectors.m[span].view_as(p), self.vectors.v[span].view_as(p)
            replica.optimizer.state[p] = {"step": torch.tensor(0.0), "exp_avg": m, "exp_avg_sq": v}

    def step(self, step: int) -> None:
        self._replica.gradient(step).add_(self.vectors.apart, alpha=self.share)
        self.shares.append(self.share)
        self._replica.step()

    def see(self, seen: tuple[float, float]) -> None:
        self._seen = KEPT * self._seen[0] + seen[0], KEPT * self._seen[1] + seen[1]
        if self._lasts and self._seen[1] > 0:
            share = self._seen[0] / self._seen[1]
            self.share = min(share, 1.0) if share >= LEAST_SHARE else 0.0


def common_adam(case: Case, replicas: list[Replica], steps: int) -> Tensor:
    """The library's rule, without a foreground: the mean model (d)."""
    group, d = replicas[0].optimizer.param_groups[0], replicas[0].x.numel()
    common = [replicas[0].x.clone(), torch.zeros(d), torch.zeros(d)]  # x̂, m̂ and v̂
    workers = [Steered(case, replica, common) for replica in replicas]
    gains = Channel(case.period, case.delay, d, case.coder)
    last, least, made = {}, {}, [Step(0.0, 0.0, 0.0, 0.0, 0.0)]
    kernels = find_kernels(common[0])
    assert kernels is not None
    for step in range(1, steps + 1):
        made.append(Step.of(group))
        for worker in workers:
            worker.step(step)
        with torch.no_grad():
            for piece, told, mean in gains.due(step):
                began, sent = last[piece.start]
                for worker, said in zip(workers, told, strict=True):  # each makes up the common ones, all alike
                    window = Window.of(group, made[began + 1 : sent + 1], began, worker.shares[began + 1 : sent + 1])
                    since = Window.of(group, made[sent + 1 : step + 1], sent, worker.shares[sent + 1 : step + 1])
                    made_up = [vector[piece].clone() for vector in common]
                    vectors = Vectors(*made_up, *worker.vectors.over(piece)[3:])
                    cuts = [Cut(slice(0, piece.stop - piece.start), window, since)]
                    worker.see(
                        kernels.make_up(kernels.arrays_of(vectors), mean, said, cuts, least[piece.start], True, True)
                    )
                for vector, part in zip(common, made_up, strict=True):
                    vector[piece] = part
            piece = gains.piece(step, d)
            began = last.get(piece.start, (0, 0))[1]
            last[piece.start] = began, step
            least[piece.start] = least_units(common[2][piece])
            beta, told = group["betas"][0], []
            for worker in workers:
                steered = in_m(made[began + 1 :], worker.shares[began + 1 :])
                runs = [Run(slice(0, piece.stop - piece.start), beta ** (step - began), steered)]
                told.append(kernels.gain(kernels.arrays_of(worker.vectors.over(piece)), runs, least[piece.start]))
            gains.send(step, piece, told)
    return torch.stack([replica.x for replica in replicas]).mean(0)


def own_steps(case: Case, replicas: list[Replica], steps: int) -> Tensor:
    """The library's rules for moves, and full communication: the mean model (d)."""
    n, d = len(replicas), replicas[0].x.numel()
    x_hat, s = replicas[0].x.clone(), torch.zeros(n, d)
    total, shift = torch.zeros(n, d), torch.zeros(n, d)
    moves = Channel(case.period, case.delay, d, case.coder)
    gradients = Channel(case.period, case.delay, d, case.gradient_coder)
    fresh_v = FreshV(case, replicas) if case.v in ("fresh", "tensor") else None
    fresh = (
        [slice(0, d)] if case.moments == "full" else smallest(replicas[0].spans, d // case.fresh if case.fresh else 0)
    )

    def apply_due(step: int) -> None:
        for piece, given, mean in moves.due(step):
            x_hat[piece] += mean
            for i, replica in enumerate(replicas):
                replica.x[piece] += mean - given[i]
                s[i, piece] -= given[i]
        for piece, given, mean in gradients.due(step):
            for i in range(n):
                shift[i, piece] = mean - case.own * given[i]

    for step in range(1, steps + 1):
        for replica in replicas:
            replica.gradient(step)
        with torch.no_grad():
            if fresh_v is not None:
                fresh_v.before_step(replicas, torch.stack([replica.g for replica in replicas]).mean(0))
            news = [torch.stack([replica.g[span] for replica in replicas]).mean(0) for span in fresh]
            for i, replica in enumerate(replicas):
                total[i] += replica.g
                replica.g.mul_(case.own).add_(shift[i])
                for span, mean in zip(fresh, news, strict=True):
                    replica.g[span] = mean
        for replica in replicas:
            replica.step()
        if case.moments == "full":
            continue
        with torch.no_grad():
            apply_due(step)
            piece = moves.piece(step, d)
            e = [replica.x[piece] - x_hat[piece] - s[i, piece] for i, replica in enumerate(replicas)]
            for own, said in zip(s, moves.send(step, piece, e), strict=True):
                own[piece] += said
            if case.moments == "corrected":
                piece, age = gradients.piece(step, d), min(step, case.period)
                told = gradients.send(step, piece, [own[piece] / age for own in total])
                for own, said in zip(total, told, strict=True):
                    own[piece] = own[piece] - age * said if case.feedback else 0
            apply_due(step)  # without a delay, what was sent now is there now
    return torch.stack([replica.x for replica in replicas]).mean(0)


def stale(case: Case, replicas: list[Replica], steps: int) -> Tensor:
    """All replicas are the first one, which takes each worker's gradient in turn."""
    first, d = replicas[0], replicas[0].x.numel()
    x, known = first.x.clone(), torch.zeros(d)
    total = torch.zeros(len(replicas), d)
    gradients = Channel(case.period, case.delay, d, case.gradient_coder)
    for step in range(1, steps + 1):
        for own, replica in zip(total, replicas, strict=True):
            replica.x.copy_(first.x)
            own += replica.gradient(step)
        with torch.no_grad():
            piece, age = gradients.piece(step, d), min(step, case.period)
            told = gradients.send(step, piece, [own[piece] / age for own in total])
            for own, said in zip(total, told, strict=True):
                own[piece] -= age * said
            for arrived, _, mean in gradients.due(step):
                known[arrived] = mean
            first.g.copy_(known)
            first.x.copy_(x)
        first.step()
        with torch.no_grad():
            moved = first.x - x
            x.copy_(first.x)
            first.x.add_(moved, alpha=case.lookahead)
    return x


def smallest(spans: list[slice], budget: int) -> list[slice]:
    found = []
    for span in sorted(spans, key=lambda span: span.stop - span.start):
        if span.stop - span.start <= budget:
            found.append(span)
            budget -= span.stop - span.start
    return found


def judge(case: Case, task: Task, seed: int, workers: int, steps: int) -> float:
    task = dataclasses.replace(task, lr=case.lr, partition=case.partition)
    torch.manual_seed(seed)
    replicas = [Replica(task, task.load(rank, workers, seed), steps) for rank in range(workers)]
    for replica in replicas[1:]:
        replica.x.copy_(replicas[0].x)
    x = {"replicas": stale, "common": common_adam}.get(case.moments, own_steps)(case, replicas, steps)
    replicas[0].x.copy_(x)
    for buffers in zip(*(replica.model.buffers() for replica in replicas), strict=True):
        if buffers[0].is_floating_point():  # statistics of BatchNorm
            buffers[0].copy_(torch.stack(buffers).mean(0))
    value = task.evaluate(replicas[0].model)[task.metric]
    return 100 * value if task.metric == "accuracy" else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=CASES)
    parser.add_argument("--task", default="fashion")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = tasks.find_task(options.task)(**SETTINGS.get(options.task, {}))
    names = [f.name for f in dataclasses.fields(Case)]
    print("| " + " | ".join(names) + f" | {task.metric} | mean |")
    print("|---" * (len(names) + 2) + "|")
    for case in (case for group in options.groups for case in CASES[group]):
        values = [judge(case, task, seed, options.workers, options.steps) for seed in range(options.seeds)]
        cells = [str(getattr(case, name)) for name in names] + [" ".join(f"{v:.2f}" for v in values)]
        print("| " + " | ".join(cells) + f" | {statistics.fmean(values):.2f} |", flush=True)


if __name__ == "__main__":
    main()
