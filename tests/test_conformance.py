"""What every method must keep, in every mode. A mode is one row of ROWS, a property is one test over all rows.

A test trains all of its rows one after another in the same processes, since starting processes takes longest.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.comm import Solo
from laconic.compress import Log, Pick, Sign, TopK, Uniform
from tests.helpers import OPTIMIZERS, agreed_x, batch, build_model, rank, train, train_alone

WORKERS = 3
SAVED_AFTER, STEPS = 5, 12
LOOKED_AFTER = (4, 5, 9)
HOLDS_AGREED = (
    laconic.AllReduce,
    laconic.QSGD,
    laconic.EfficientAdam,
    laconic.DiLoCo,
    laconic.Divisible,
)  # after every step


@dataclass(frozen=True)
class Row:
    """One mode of a method.

    Args:
        name: for the messages of failed tests.
        method: with settings that make it act within a few steps; or all defaults.
        deterministic: a run that is repeated or resumed gives the same bits.
        lossless: the mean of all models moves by exactly the mean of the local steps.
        sends_at_once: it has surely sent something after `STEPS` steps, however fast they are.
    """

    name: str
    method: laconic.Method
    deterministic: bool = True
    lossless: bool = False
    sends_at_once: bool = True


# fmt: off
ROWS = [
    Row("allreduce", laconic.AllReduce(), lossless=True),

    Row("local_sgd", laconic.LocalSGD(), lossless=True),
    Row("local_sgd, moments averaged", laconic.LocalSGD(period=3, moments="averaged"), lossless=True),
    Row("local_sgd, moments rarely",
        laconic.LocalSGD(period=2, moments="averaged", moments_every=2), lossless=True),
    Row("local_sgd, 4 bits", laconic.LocalSGD(period=3, compressor=Uniform(4))),
    Row("local_sgd, 1 bit, moments averaged", laconic.LocalSGD(period=2, moments="averaged", compressor=Sign())),

    Row("diloco", laconic.DiLoCo(), sends_at_once=False),
    Row("diloco, no outer step", laconic.DiLoCo(period=3, outer_lr=1.0, outer_momentum=0.0), lossless=True),
    Row("diloco, mixing", laconic.DiLoCo(4, 1.0, 0.0, fragments=3, mixing=0.25, moments="averaged"), lossless=True),
    Row("diloco, fragments", laconic.DiLoCo(period=3, fragments=3, moments="averaged")),
    Row("diloco, streaming", laconic.DiLoCo(period=5, outer_lr=0.4, fragments=2, delay=3)),
    Row("diloco, 4 bits", laconic.DiLoCo(period=2, compressor=Uniform(4))),
    Row("diloco, streaming, 4 bits", laconic.DiLoCo(period=4, fragments=2, delay=3, compressor=Uniform(4))),
    Row("diloco, streaming, 1 bit", laconic.DiLoCo(3, 0.4, fragments=3, delay=1, mixing=0.0, compressor=Sign())),

    Row("diloco, sparse",
        laconic.DiLoCo(4, 1.5, 0.0, fragments=4, delay=1, mixing="steps", compressor=TopK(0.2, bits=1), decay=0.95)),
    Row("diloco, one hop, keeps steps",
        laconic.DiLoCo(5, 1.0, 0.0, fragments=2, delay=3, mixing="steps", compressor=Uniform(4), hops=1)),
    Row("diloco, decay at both ends", laconic.DiLoCo(3, delay=2, compressor=TopK(0.5), hops=2, decay=0.9)),

    Row("qsgd", laconic.QSGD()),
    Row("qsgd, 4 bits", laconic.QSGD(bits=4, seed=3)),
    Row("qsgd, 2 bits, short blocks", laconic.QSGD(bits=2, block=64)),

    Row("adpsgd", laconic.ADPSGD(), lossless=True),
    Row("adpsgd, adapting", laconic.ADPSGD(initial_period=2, warmup=2, calibration=2, min_period=1), lossless=True),
    Row("adpsgd, total_steps", laconic.ADPSGD(initial_period=1, total_steps=12, moments="averaged"), lossless=True),
    Row("adpsgd, 3 bits", laconic.ADPSGD(initial_period=2, calibration=4, max_period=3, compressor=Log(3))),

    Row("efficient_adam", laconic.EfficientAdam()),
    Row("efficient_adam, small exact", laconic.EfficientAdam(exact_below=10, moments="averaged", moments_every=4)),
    Row("efficient_adam, chunks", laconic.EfficientAdam(up=Uniform(4), down=Log(4), chunk=20)),
    Row("efficient_adam, 1 bit", laconic.EfficientAdam(up=Sign(), down=Sign())),
    Row("efficient_adam, server", laconic.EfficientAdam(server=0, up=Uniform(8), down=Uniform(8))),
    Row("efficient_adam, dedicated", laconic.EfficientAdam(server=0, dedicated=True)),
    Row("efficient_adam, dedicated, moments",
        laconic.EfficientAdam(server=2, dedicated=True, exact_below=10, moments="averaged", moments_every=3)),

    Row("efficient_adam, delay", laconic.EfficientAdam(delay=1)),
    Row("efficient_adam, server, longer delay",
        laconic.EfficientAdam(server=0, exact_below=10, chunk=20, moments="averaged", moments_every=4, delay=3)),
    Row("efficient_adam, dedicated, delay", laconic.EfficientAdam(server=0, dedicated=True, delay=2)),

    Row("a2cid2", laconic.A2CiD2(), deterministic=False, lossless=True, sends_at_once=False),
    Row("a2cid2, rate", laconic.A2CiD2(rate=1.0, slack=2), deterministic=False, lossless=True),
    Row("a2cid2, no momentum", laconic.A2CiD2(rate=1.0, slack=2, momentum=False), deterministic=False, lossless=True),
    Row("a2cid2, synchronous", laconic.A2CiD2(background=False), lossless=True),
    Row("a2cid2, complete graph", laconic.A2CiD2("complete", rate=2.0, background=False), lossless=True),
    Row("a2cid2, exponential graph", laconic.A2CiD2("exponential", rate=0.5, background=False), lossless=True),
    Row("a2cid2, synchronous, no momentum",
        laconic.A2CiD2(rate=1.0, momentum=False, background=False), lossless=True),

    Row("divisible", laconic.Divisible(), deterministic=False, lossless=True),
    Row("divisible, fixed period", laconic.Divisible(ratio=8, period=4), lossless=True),
    Row("divisible, fp32", laconic.Divisible(ratio=8, period=3, background=None, delay=2), lossless=True),
    Row("divisible, no background", laconic.Divisible(ratio=4, period=None), lossless=True),
    Row("divisible, 1 bit in every step", laconic.Divisible(ratio=8, period=1, background=Sign()), lossless=True),
    Row("divisible, picks", laconic.Divisible(ratio=8, period=2, background=Pick(7)), lossless=True),
    Row("divisible, two hops", laconic.Divisible(ratio=8, period=4, background=Uniform(4), hops=2), lossless=True),
    Row("divisible, one hop, short periods",
        laconic.Divisible(ratio=8, max_period=2, hops=1), deterministic=False, lossless=True),
    Row("divisible, long delay", laconic.Divisible(ratio=8, period=2, delay=5), lossless=True),
    Row("divisible, given delay", laconic.Divisible(ratio=8, delay=3), deterministic=False, lossless=True),
    Row("divisible, corrected", laconic.Divisible(ratio=8, period=3, corrected=True), lossless=True),
    Row("divisible, corrected, two hops", laconic.Divisible(ratio=8, period=3, corrected=True, hops=2, delay=2)),
]
# fmt: on


def all_train(row: Row) -> bool:
    return all(row.method.trains(rank) for rank in range(WORKERS))


# The table


def test_every_default_is_in_the_table() -> None:
    missing = [name for name, method in laconic.METHODS.items() if all(row.method != method() for row in ROWS)]
    assert not missing


@pytest.mark.parametrize("method", list(laconic.METHODS.values()))
def test_every_mode_is_in_the_table(method: type[laconic.Method]) -> None:
    """Each value of a setting that is a choice, and a compressor or None where either is possible."""
    hints = typing.get_type_hints(method)
    used: dict[str, list[Any]] = {
        f.name: [getattr(row.method, f.name) for row in ROWS if type(row.method) is method]
        for f in dataclasses.fields(method)
        if f.init
    }
    for name, values in used.items():
        hint = hints[name]
        kinds = typing.get_args(hint) if typing.get_origin(hint) is not typing.Literal else (hint,)
        for kind in kinds or (hint,):
            if typing.get_origin(kind) is typing.Literal:
                missing = set(typing.get_args(kind)) - {value for value in values if isinstance(value, str | int)}
                assert not missing, f"no row has {name} in {missing}"
            elif kind is bool:
                assert {True, False} <= set(values), f"both values of {name} need a row"
            elif kind is type(None):
                assert {value is None for value in values} == {True, False}, f"{name} needs rows with and without"


# One worker


def test_one_worker_alone_is_the_plain_optimizer_bit_for_bit() -> None:
    failures = []
    for optimizer, optimize in OPTIMIZERS.items():
        alone = train_alone(optimize, STEPS)
        for row in filter(all_train, ROWS):
            path = train(row.method, optimize, STEPS)
            if not all(torch.equal(x, y) for x, y in zip(path, alone, strict=True)):
                failures.append(f"{row.name} with {optimizer}")
    assert not failures


class BesideAnother(Solo):
    """Communication of one rank that reads, at the start, the note of another rank besides its own."""

    def __init__(self, other: Any = None) -> None:
        super().__init__()
        self.other, self.own = other, None

    def meet(self, what: str, note: Any = None) -> list[Any]:
        if what != "the start of the worker":
            return super().meet(what, note)
        self.own = note
        return [note] if self.other is None else [self.other, note]


def test_settings_that_differ_between_ranks_raise_and_are_named() -> None:
    """Of all pairs of rows of the same method."""
    pairs = [(a, b) for a, b in itertools.permutations(filter(all_train, ROWS), 2) if type(a.method) is type(b.method)]
    for a, b in pairs:
        model = build_model()
        first = BesideAnother()
        laconic.Worker(model, OPTIMIZERS["adam"](model), a.method, comm=first)
        model = build_model()
        differing = [name for name, value in a.method.settings().items() if b.method.settings()[name] != value]
        expected = f"all ranks must agree on {type(a.method).__name__}.{differing[0]}: .* on rank 0; .* on rank 1"
        with pytest.raises(ValueError, match=expected):
            laconic.Worker(model, OPTIMIZERS["adam"](model), b.method, comm=BesideAnother(first.own))


# Several workers


@dataclass
class Run:
    """What one rank has seen of one training run."""

    start: Tensor
    path: list[Tensor]  # parameters and running statistics after each step, and after the block
    seen: list[Tensor]  # predictions of the averaged model
    agreed: list[Tensor]  # parameters of the agreed model, where there is one
    nbytes: int
    losses: tuple[float, float]  # of the averaged model on all workers' data, at the start and at the end


def model_with_statistics(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 2))


def values_of(worker: laconic.Worker) -> Tensor:
    buffers = (buffer for buffer in worker.model.buffers() if buffer.is_floating_point())
    return torch.cat([worker.x, *buffers]).cpu()


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        model.eval()
        device = next(model.parameters()).device
        batches = [batch(worker, 1000 + i) for worker in range(WORKERS) for i in range(4)]
        total = sum(nn.functional.mse_loss(model(x.to(device)).cpu(), y).item() for x, y in batches)
        model.train()
    return total


def run_row(
    row: Row,
    optimizer: str,
    directory: Path | None = None,
    *,
    resume: bool = False,
    look_after: tuple[int, ...] = (),
    device: str = "cpu",
) -> Run:
    """Trains one row, on a rank; with a directory, saves there after a few steps or resumes from there.

    After the steps `look_after` it evaluates the averaged model, also in training mode, which changes its statistics.
    """
    model = model_with_statistics(rank()).to(device)
    optimize = OPTIMIZERS[optimizer](model)
    before = loss_of(model_with_statistics(0))
    run = Run(torch.empty(0), [], [], [], 0, (0.0, 0.0))

    def train_until(step: int) -> None:
        if not worker.method.trains(worker.rank):
            worker.serve()
            return
        while worker.step < step:
            x, y = (tensor.to(device) for tensor in batch(worker.rank, worker.step))
            nn.functional.mse_loss(model(x), y).backward()
            optimize.step()
            optimize.zero_grad()
            run.path.append(values_of(worker))

    with laconic.Worker(model, optimize, row.method) as worker:
        run.start = worker.x.to("cpu", copy=True)
        if resume and directory is not None:
            assert worker.load(directory) == {"note": "halfway"}
        elif directory is not None:
            train_until(SAVED_AFTER)
            worker.save(directory, {"note": "halfway"})
        for step in look_after:
            train_until(step)
            if (agreed := agreed_x(worker)) is not None:
                run.agreed.append(agreed.cpu())
            with worker.consensus() as averaged, torch.no_grad():
                averaged.eval()
                run.seen.append(averaged(batch(0, 99)[0].to(device)).cpu())
                averaged.train()
                averaged(batch(0, 98)[0].to(device))
        train_until(STEPS)
    tallies = worker.meter.total.tallies
    run.nbytes = sum(tally.nbytes for (channel, _), tally in tallies.items() if channel != "control")
    run.path.append(values_of(worker))
    run.losses = before, loss_of(model)
    return run


Key = tuple[str, str]  # a row's name and an optimizer's


def run_rows(rows: list[Row], run: Callable[[Row, str], Run]) -> dict[Key, Run]:
    results: dict[Key, Run] = {}
    for row, optimizer in itertools.product(rows, OPTIMIZERS):
        try:
            results[row.name, optimizer] = run(row, optimizer)
        except BaseException as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"in the row {row.name!r} with {optimizer}")
            raise
    return results


def on_all_ranks(
    rows: list[Row], run: Callable[[Row, str], Run], launch: Callable[..., list[Any]] = laconic.spawn
) -> dict[Key, list[Run]]:
    """Returns the run of each rank, by row and optimizer."""
    ranks = launch(run_rows, WORKERS, rows, run)
    return {key: [results[key] for results in ranks] for key in ranks[0]}


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.timeout(600)  # trains all rows three times
def test_training_together_and_again_and_resumed(tmp_path: Path) -> None:
    """All rows are trained, trained again with `consensus()` in between, resumed in new processes, and simulated."""

    def folder_of(row: Row, optimizer: str) -> Path:
        return tmp_path / f"{ROWS.index(row)}-{optimizer}"

    whole = on_all_ranks(ROWS, lambda row, optimizer: run_row(row, optimizer, folder_of(row, optimizer)))
    looked = on_all_ranks(ROWS, lambda row, optimizer: run_row(row, optimizer, look_after=LOOKED_AFTER))
    simulated = on_all_ranks(
        ROWS, lambda row, optimizer: run_row(row, optimizer, look_after=LOOKED_AFTER), laconic.simulate
    )
    deterministic = [row for row in ROWS if row.deterministic]
    resumed = on_all_ranks(
        deterministic, lambda row, optimizer: run_row(row, optimizer, folder_of(row, optimizer), resume=True)
    )

    first = torch.cat([p.detach().reshape(-1) for p in model_with_statistics(0).parameters()])
    rows = {row.name: row for row in ROWS}
    failures = []
    for (name, optimizer), runs in whole.items():
        row, others = rows[name], looked[name, optimizer]
        ends = [run.path[-1] for run in runs]
        properties = {
            "all ranks start from rank 0's parameters": all(torch.equal(run.start, first) for run in runs),
            "all ranks end with the same model": equal(ends, ends[:1] * WORKERS),
            "something was sent": not row.sends_at_once or sum(run.nbytes for run in runs) > 0,
            "the loss falls": all(after < 0.97 * before for before, after in (run.losses for run in runs)),
            "consensus() is the same model on all ranks": all(equal(run.seen, others[0].seen) for run in others),
            "agreed() is the same model on all ranks": all(equal(run.agreed, others[0].agreed) for run in others),
            "agreed() is there": not isinstance(row.method, HOLDS_AGREED) or len(others[0].agreed) == len(LOOKED_AFTER),
            "the loss falls if simulated": all(
                run.losses[1] < 0.97 * run.losses[0] for run in simulated[name, optimizer]
            ),
        }
        if row.deterministic:
            again = resumed[name, optimizer]
            properties["consensus() changes nothing"] = all(
                equal(run.path, other.path) for run, other in zip(runs, others, strict=True)
            )
            properties["simulated workers compute the same bits"] = all(
                equal([*run.path, *run.seen, *run.agreed], [*other.path, *other.seen, *other.agreed])
                and run.nbytes == other.nbytes
                for run, other in zip(others, simulated[name, optimizer], strict=True)
            )
            properties["a resumed run continues bit for bit"] = all(
                equal(run.path[-len(other.path) :], other.path) for run, other in zip(runs, again, strict=True)
            )
        failures += [f"{name} with {optimizer}: {text}" for text, holds in properties.items() if not holds]
    assert not failures


def moved_by(row: Row) -> tuple[Tensor, Tensor]:
    """Returns how far plain SGD would have moved this rank's x, whose gradients are constant, and how far it moved."""
    model = nn.Linear(30, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.Worker(model, optimizer, row.method) as worker:
        start, steps = worker.x.clone(), torch.zeros(30)
        for step in range(11):
            gradient = torch.randn(30, generator=torch.Generator().manual_seed(50 * step + worker.rank))
            steps -= 0.1 * gradient
            (model.weight * gradient).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return steps, worker.x - start


def test_the_mean_of_lossless_methods_moves_by_the_mean_of_the_local_steps() -> None:
    rows = [row for row in ROWS if row.lossless]
    ranks = laconic.spawn(lambda: [moved_by(row) for row in rows], 4)
    failures = []
    for row, results in zip(rows, zip(*ranks, strict=True), strict=True):
        expected = torch.stack([steps for steps, _ in results]).mean(dim=0)
        if not all(torch.allclose(moved, expected, rtol=1e-5, atol=1e-6) for _, moved in results):
            failures.append(row.name)
    assert not failures
