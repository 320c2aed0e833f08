"""What consensus() costs and loses by sending quantized differences to the agreed model.

LACONIC_DATA=… python benchmarks/comm/consensus.py accuracy     (simulated; 2 minutes)
python benchmarks/comm/consensus.py seconds --link 10mbit       (emulated, as root)
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import laconic
from laconic.compress import Log, Uniform
from laconic.emulate import hosts_behind
from laconic.tasks import Fashion

STEPS, EVERY, PARAMETERS, REPETITIONS = 300, 20, 1_860_000, 3
COMPRESSORS = (Uniform(4), Uniform(6), Uniform(8), Log(4))


def accuracy(link: str) -> None:
    """Prints the accuracy of the exact mean, of the agreed model x̂, and of quantized means, with their errors."""
    task = Fashion()
    copies: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def train() -> None:
        torch.manual_seed(0)
        model = task.build_model()
        optimizer = task.build_optimizer(model)
        schedule = task.build_schedule(optimizer, STEPS)
        with laconic.Worker(model, optimizer, laconic.Divisible()) as worker:
            shard = task.load(worker.rank, worker.size, 0)
            for step in range(STEPS):
                task.backward(model, shard, step)
                optimizer.step()
                optimizer.zero_grad()
                if schedule is not None:
                    schedule.step()
                reference = worker.method.reference()
                if (step + 1) % EVERY == 0 and reference is not None:
                    copies.setdefault(step + 1, []).append((worker.x.clone(), reference.clone()))

    laconic.simulate(train, 4, link=link, compute=0.028)
    model = task.build_model()

    def evaluate(x: Tensor) -> float:
        nn.utils.vector_to_parameters(x.clone(), list(model.parameters()))
        return 100 * task.evaluate(model)["accuracy"]

    print("| step | exact | x̂ |" + "".join(f" {one} | error |" for one in COMPRESSORS))
    print("|---" * (3 + 2 * len(COMPRESSORS)) + "|")
    for step, found in copies.items():
        xs, reference = [x for x, _ in found], found[0][1]
        mean = torch.stack(xs).mean(0)
        line = f"| {step} | {evaluate(mean):.2f} | {evaluate(reference):.2f} |"
        for one in COMPRESSORS:
            sent = [one.decode(one.encode(x - reference), len(mean)) for x in xs]
            answer = one.encode(torch.stack(sent).mean(0))
            average = reference + one.decode(answer, len(mean))
            error = (average - mean).norm() / (mean - reference).norm()
            line += f" {evaluate(average):.2f} | {error:.2f} |"
        print(line, flush=True)


def time_consensus(exact: bool) -> list[float]:
    x = nn.Parameter(torch.zeros(PARAMETERS))
    optimizer, model = torch.optim.Adam([x], lr=1e-4), nn.ParameterList([x])
    seconds = []
    with laconic.Worker(model, optimizer, laconic.Divisible()) as worker:
        torch.manual_seed(worker.rank)
        for _ in range(15):
            x.grad = torch.randn_like(x)
            optimizer.step()
            time.sleep(0.02)
        for _ in range(REPETITIONS):
            start = time.perf_counter()
            with worker.consensus(exact=exact):
                seconds.append(round(time.perf_counter() - start, 2))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "seconds"])
    parser.add_argument("--link", default="10mbit")
    options = parser.parse_args()
    if options.what == "accuracy":
        accuracy(options.link)
        return
    for exact in (False, True):
        with hosts_behind(options.link, 4) as hosts:
            found = laconic.spawn(time_consensus, 4, exact, hosts=hosts)
        print(f"exact={exact}: {found[0]} s on rank 0")


if __name__ == "__main__":
    main()
