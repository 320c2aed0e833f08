"""Accuracy of gossip by the age of the differences applied: a ring of 4 in one process, 14 steps per exchange.

python benchmarks/a2cid2/pieces.py [--steps 300] [--seeds 1]
"""

from __future__ import annotations

import argparse
import copy
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic import topology
from laconic.methods.a2cid2 import mixing
from laconic.tasks.fashion import Fashion

WORKERS = 4


@dataclass
class Link:
    exchange_steps: int  # the duration of an exchange, in steps; 0: no exchanges
    pieces: int = 1  # a piece is read every exchange_steps / pieces steps
    age: int = 1  # steps between reading a piece and applying its difference


@dataclass
class Exchange:
    pair: tuple[int, int]
    start: int


@dataclass
class Difference:
    pair: tuple[int, int]
    due: int
    piece: slice
    values: Tensor


def flatten(model: nn.Module) -> Tensor:
    """Makes the parameters views of one vector and returns it."""
    x = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    offset = 0
    for parameter in model.parameters():
        parameter.data = x[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return x


@torch.no_grad()
def read_pieces(exchanges: list[Exchange], x: list[Tensor], link: Link, step: int) -> list[Difference]:
    """Returns the differences of the pieces that are read at this step."""
    d, differences = x[0].numel(), []
    for exchange in exchanges:
        part, rest = divmod((step - exchange.start) * link.pieces, link.exchange_steps)
        if rest < link.pieces and part < link.pieces:
            i, j = exchange.pair
            piece = slice(d * part // link.pieces, d * (part + 1) // link.pieces)
            differences.append(Difference(exchange.pair, step + link.age, piece, x[i][piece] - x[j][piece]))
    return differences


def train(task: Fashion, steps: int, seed: int, link: Link, momentum: bool) -> tuple[float, float]:
    """Returns the accuracy of the mean model, and √ mean ‖x − x̄‖² after a third of the steps."""
    torch.manual_seed(seed)
    first = task.build_model()
    models = [copy.deepcopy(first) for _ in range(WORKERS)]
    x = [flatten(model) for model in models]
    delta = [torch.zeros_like(vector) for vector in x]
    optimizers = [task.build_optimizer(model) for model in models]
    schedules = [task.build_schedule(optimizer, steps) for optimizer in optimizers]
    shards = [task.load(rank, WORKERS, seed) for rank in range(WORKERS)]
    graph, rng = topology.ring(WORKERS), random.Random(seed)
    constants = graph.constants(1 / link.exchange_steps) if link.exchange_steps else None
    eta, alpha_tilde = (constants.eta, constants.alpha_tilde) if momentum and constants else (0.0, 0.5)
    exchanges: list[Exchange] = []
    differences: list[Difference] = []
    distance = 0.0
    for step in range(steps):
        for model, optimizer, schedule, shard in zip(models, optimizers, schedules, shards, strict=True):
            task.loss(model, shard.batch(step)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
        with torch.no_grad():
            c, shrinking = mixing(eta)
            for i in range(WORKERS if eta else 0):
                x[i].add_(delta[i], alpha=c)
                delta[i].mul_(shrinking)
            for difference in [difference for difference in differences if difference.due <= step]:
                for i, sign in zip(difference.pair, (1, -1), strict=True):
                    x[i][difference.piece].sub_(difference.values, alpha=sign * 0.5)
                    delta[i][difference.piece].sub_(difference.values, alpha=sign * (alpha_tilde - 0.5))
        differences = [difference for difference in differences if difference.due > step]
        if link.exchange_steps:
            exchanges = [exchange for exchange in exchanges if step < exchange.start + link.exchange_steps]
            busy = {i for exchange in exchanges for i in exchange.pair}
            for pair in rng.sample(graph.edges, len(graph.edges)):
                if busy.isdisjoint(pair):
                    busy.update(pair)
                    exchanges.append(Exchange(pair, step))
            differences += read_pieces(exchanges, x, link, step)
        if step == steps // 3:
            all_x = torch.stack(x)
            distance = (all_x - all_x.mean(dim=0)).square().sum(dim=1).mean().sqrt().item()
    x[0].copy_(torch.stack(x).mean(dim=0))
    return task.evaluate(models[0])["accuracy"], distance


VARIANTS = {
    "never": Link(0),
    "every 14 steps, applied at once": Link(14),
    "every 14 steps, whole, applied 14 steps later": Link(14, age=14),
    "every 14 steps, 14 pieces, applied 2 steps later": Link(14, pieces=14, age=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| exchange | momentum | seed | accuracy of the mean model | distance after a third |")
    print("|---|---|---|---|---|")
    for seed in range(arguments.seeds):
        for name, link in VARIANTS.items():
            for momentum in (True, False) if link.exchange_steps else (False,):
                accuracy, distance = train(Fashion(), arguments.steps, seed, link, momentum)
                print(
                    f"| {name} | {'yes' if momentum else 'no'} | {seed} | {accuracy:.4f} | {distance:.2f} |", flush=True
                )


if __name__ == "__main__":
    main()
