"""Ranks that form nodes: the same training as with one worker a node, whose communication they share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.compress import Identity, TopK, Uniform
from laconic.emulate import EmulationError, hosts_behind
from laconic.nodes import arrange
from tests.helpers import OPTIMIZERS, Silent, adam, agreed_x, flat, loss, rank, sgd

STEPS = 10
BLOCK = 64  # slices begin at multiples of it, so quantizers cut x in the same way in a node


def build_model() -> nn.Sequential:
    """Returns a model of 272 entries, which two ranks divide into 128 and 144."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 2))


@dataclass(frozen=True)
class Row:
    """A mode of a method. `is_equal`: each entry's average does not depend on where its slice begins."""

    name: str
    method: laconic.Method
    is_equal: bool = True


# fmt: off
ROWS = [
    Row("allreduce", laconic.AllReduce()),
    Row("qsgd", laconic.QSGD(bits=8), is_equal=False),
    Row("local_sgd", laconic.LocalSGD(period=3)),
    Row("local_sgd, moments averaged", laconic.LocalSGD(period=2, moments="averaged")),
    Row("local_sgd, 8 bits", laconic.LocalSGD(period=2, compressor=Uniform(8)), is_equal=False),
    Row("adpsgd", laconic.ADPSGD(initial_period=1, warmup=1, calibration=3, low=0.95, high=1.05)),
    Row("efficient_adam", laconic.EfficientAdam(up=Uniform(8, block=BLOCK), down=Uniform(8, block=BLOCK))),
    Row("efficient_adam, exact",
        laconic.EfficientAdam(up=Identity(), down=Identity(), exact_below=10, moments="averaged", moments_every=3)),
    Row("efficient_adam, server", laconic.EfficientAdam(server=1, up=Identity(), down=Identity())),
    Row("efficient_adam, delay", laconic.EfficientAdam(up=Identity(), down=Identity(), delay=1)),
    Row("diloco", laconic.DiLoCo(period=3)),
    Row("diloco, fragments", laconic.DiLoCo(period=4, fragments=2, delay=1), is_equal=False),
    Row("a2cid2, synchronous", laconic.A2CiD2(rate=1.0, background=False)),
    Row("divisible, two hops", laconic.Divisible(ratio=1, period=1, background=Uniform(4, block=BLOCK), hops=2)),
    Row("divisible, corrected", laconic.Divisible(ratio=1, period=1, background=None, corrected=True)),
    Row("divisible, foreground", laconic.Divisible(ratio=1, period=None, background=None)),
    Row("divisible, pieces", laconic.Divisible(ratio=8, period=3, background=None), is_equal=False),
    Row("divisible, one hop", laconic.Divisible(period=2, background=Uniform(4), hops=1), is_equal=False),
    Row("divisible, auto", laconic.Divisible(), is_equal=False),
]
# fmt: on


@dataclass
class Trained:
    """What a rank has after a row."""

    path: list[Tensor]  # x after each step
    final: Tensor
    nbytes: dict[str, float]
    moments: Tensor


def train_row(row: Row, optimizer: str, node_size: int) -> Trained:
    """Trains on the data of this rank in a node, or of a whole node with `node_size` > 1."""
    model = build_model()
    optimizing = OPTIMIZERS[optimizer](model)
    path = []
    with laconic.Worker(model, optimizing, row.method, timeout=60, nodes="auto" if node_size == 1 else None) as worker:
        for step in range(STEPS):
            optimizing.zero_grad()
            losses = [loss(model, rank() * node_size + i, step) for i in range(node_size)]
            torch.stack(losses).mean().backward()
            optimizing.step()
            path.append(worker.x.clone())
        nbytes = worker.metrics()
    moments = [value for state in optimizing.state.values() for value in state.values() if isinstance(value, Tensor)]
    return Trained(path, flat(model), nbytes, torch.cat([moment.reshape(-1) for moment in moments]))


def train_rows(optimizer: str, node_size: int) -> list[Trained]:
    return [train_row(row, optimizer, node_size) for row in ROWS]


@pytest.mark.parametrize(("nodes", "optimizer"), [(2, "adam"), (3, "sgd")])
def test_a_node_trains_as_one_worker_with_the_data_of_its_ranks(nodes: int, optimizer: str) -> None:
    in_nodes = laconic.spawn(train_rows, 2 * nodes, optimizer, 1, nodes=nodes)
    alone = laconic.spawn(train_rows, nodes, optimizer, 2)
    failures = []
    for i, row in enumerate(ROWS):
        name = row.name
        found, expected = [one[i] for one in in_nodes], [one[i] for one in alone]
        for number, one in enumerate(found):
            mate, of_worker = found[number // 2 * 2], expected[number // 2]
            if not all(torch.equal(x, y) for x, y in zip(one.path, mate.path, strict=True)):
                failures.append(f"{name}: rank {number} and its node differ")
            if not torch.equal(one.moments, mate.moments):
                failures.append(f"{name}: the optimizers of rank {number} and its node differ")
            if not torch.equal(one.final, found[0].final):
                failures.append(f"{name}: rank {number} ends with another model")
            pairs = zip(one.path, of_worker.path, strict=True)
            moved = (expected[0].final - flat(build_model())).norm()
            if row.is_equal and not all(torch.allclose(x, y, rtol=1e-3, atol=2e-5) for x, y in pairs):
                worst = max((x - y).abs().max().item() for x, y in zip(one.path, of_worker.path, strict=True))
                failures.append(f"{name}: rank {number} differs from a worker by {worst:.1e}")
            elif (one.final - of_worker.final).norm() > 0.1 * moved:
                failures.append(f"{name}: rank {number} has gone elsewhere")
        sent = sum(one.nbytes["bytes_foreground"] + one.nbytes["bytes_background"] for one in found[:2])
        by_worker = expected[0].nbytes["bytes_foreground"] + expected[0].nbytes["bytes_background"]
        if row.is_equal and not 0.95 * by_worker <= sent <= 1.3 * by_worker + 600:
            failures.append(f"{name}: a node sends {sent:g} bytes, and one worker {by_worker:g}")
        if found[0].nbytes["bytes_node"] == 0:
            failures.append(f"{name}: nothing was sent inside the node")
    assert not failures, "\n".join(failures)


# Methods that do not give the same bits twice keep the mean of all models: linear losses make it known.


def push(model: nn.Module, worker: int, step: int) -> Tensor:
    """A loss whose gradient does not depend on the model."""
    generator = torch.Generator().manual_seed(100 * worker + step)
    return torch.stack([(torch.randn(p.shape, generator=generator) * p).sum() for p in model.parameters()]).sum()


def train_pushed(methods: list[laconic.Method]) -> list[tuple[list[Tensor], Tensor]]:
    found = []
    for method in methods:
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        path = []
        with laconic.Worker(model, optimizer, method, timeout=60, nodes="auto") as worker:
            for step in range(STEPS):
                optimizer.zero_grad()
                push(model, rank(), step).backward()
                optimizer.step()
                path.append(worker.x.clone())
        found.append((path, flat(model)))
    return found


def test_the_mean_of_all_nodes_moves_by_the_mean_of_all_steps() -> None:
    methods = [
        laconic.A2CiD2(rate=1.0, slack=2),
        laconic.A2CiD2(),
        laconic.Divisible(),
        laconic.Divisible(ratio=8, period=3, background=Uniform(2), hops=2, delay=2),
    ]
    found = laconic.spawn(train_pushed, 4, methods, nodes=2)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([push(model, worker, step) for worker in range(4)]).mean().backward()
        optimizer.step()
    for number, method in enumerate(methods):
        for worker, trained in enumerate(found):
            path, final = trained[number]
            assert torch.allclose(final, flat(model), atol=1e-5), f"{method}: rank {worker}"
            mate = found[worker // 2 * 2][number]
            assert all(torch.equal(x, y) for x, y in zip(path, mate[0], strict=True)), f"{method}: rank {worker}"


# What else the worker does


def train_wrapped(nodes: int) -> tuple[Tensor, Tensor, list[str]]:
    """Trains a bare model, and one in DistributedDataParallel over the node; returns both, and errors of mistakes."""
    results: list[Tensor] = []
    for is_wrapped in (False, True):
        bare = build_model()
        optimizer = adam(bare)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        local, _ = dist.new_subgroups(dist.get_world_size() // nodes)
        model: nn.Module = DistributedDataParallel(bare, process_group=local) if is_wrapped else bare
        with laconic.Worker(model, optimizer, laconic.Divisible(period=2, corrected=True), timeout=60, local=local):
            for step in range(STEPS):
                optimizer.zero_grad()
                loss(model, rank(), step).backward()
                optimizer.step()
        results.append(flat(bare))
    errors = []
    bare = build_model()
    whole = DistributedDataParallel(bare)
    with pytest.raises(ValueError, match="inside the node") as found:
        laconic.Worker(whole, adam(bare), laconic.LocalSGD(), timeout=60, local=local)
    errors.append(str(found.value))
    model = DistributedDataParallel(bare, process_group=local)
    optimizer = adam(bare)
    with (
        pytest.raises(RuntimeError, match="no_sync") as unsynced,
        laconic.Worker(model, optimizer, laconic.LocalSGD(), timeout=60, local=local),
        model.no_sync(),
    ):
        loss(model, rank(), 0).backward()
        optimizer.step()
    errors.append(str(unsynced.value))
    return results[0], results[1], errors


def test_a_wrapped_model_averages_inside_its_node_itself() -> None:
    for bare, wrapped, errors in laconic.spawn(train_wrapped, 4, 2):
        assert torch.allclose(bare, wrapped, rtol=1e-3, atol=1e-5)
        assert "torch.distributed.new_subgroups" in errors[0]
        assert "last backward pass" in errors[1]


SAVED = [
    laconic.AllReduce(),
    laconic.ADPSGD(initial_period=2, calibration=2, moments="averaged"),
    laconic.EfficientAdam(),
    laconic.A2CiD2(background=False),
    laconic.Divisible(ratio=8, period=3, hops=2, delay=2),
    laconic.DiLoCo(4, 1.5, 0.0, fragments=2, delay=2, mixing="steps", compressor=TopK(0.2, bits=1), decay=0.9),
]


def save_and_resume(directory: Path) -> list[tuple[Tensor, Tensor, Tensor, float, Tensor, Tensor | None]]:
    """Returns x after training with a save in between, x of a run that resumes, and what consensus() gives at the end.

    The last ones are x at the save and the agreed model at the end.
    """
    found = []
    for number, method in enumerate(SAVED):
        ends = []
        for is_resumed in (False, True):
            model = build_model()
            optimizer = adam(model)
            with laconic.Worker(model, optimizer, method, timeout=60, nodes="auto") as worker:
                if is_resumed:
                    assert worker.load(directory / str(number))["here"] == rank()
                while worker.step < STEPS:
                    optimizer.zero_grad()
                    loss(model, rank(), worker.step).backward()
                    optimizer.step()
                    if worker.step == 5 and not is_resumed:
                        worker.save(directory / str(number), {"here": rank()})
                        saved = worker.x.clone()
                ends.append(worker.x.clone())
                agreed = agreed_x(worker)
                with worker.consensus(exact=True):
                    mean = worker.x.clone()
                distance = worker.consensus_distance or 0.0
                with worker.consensus():
                    assert torch.allclose(worker.x, mean, atol=0.01)  # quantized, if the method has a reference
        found.append((ends[0], ends[1], mean, distance, saved, agreed))
    return found


def load_flat(directory: Path) -> str:
    model = build_model()
    with (
        pytest.raises(ValueError, match="ranks per node") as found,
        laconic.Worker(model, adam(model), SAVED[0], timeout=60) as worker,
    ):
        worker.load(directory / "0")
    return str(found.value)


def load_in_more_nodes(directory: Path) -> list[tuple[Tensor, Tensor]]:
    """Returns x after loading, and after training on."""
    found = []
    for number, method in enumerate(SAVED):
        model = build_model()
        optimizer = adam(model)
        with laconic.Worker(model, optimizer, method, timeout=60, nodes="auto") as worker:
            assert worker.load(directory / str(number))["here"] == 0
            loaded = worker.x.clone()
            for step in range(3):
                optimizer.zero_grad()
                loss(model, rank(), step).backward()
                optimizer.step()
            found.append((loaded, worker.x.clone()))
    return found


def test_checkpoints_resume_bit_for_bit_and_consensus_is_the_mean_of_the_nodes(tmp_path: Path) -> None:
    of_ranks = laconic.spawn(save_and_resume, 4, tmp_path, nodes=2)
    start = flat(build_model())
    for number, method in enumerate(SAVED):
        xs = [one[number] for one in of_ranks]
        mean = (xs[0][1] + xs[2][1]) / 2
        holds_one = isinstance(method, (laconic.AllReduce, laconic.EfficientAdam, laconic.Divisible, laconic.DiLoCo))
        assert [one[5] is not None for one in xs] == [holds_one] * 4, method
        for end, resumed, averaged, distance, _, agreed in xs:
            if agreed is not None:
                assert torch.equal(agreed, xs[0][5]), method
                assert (agreed - mean).norm() < 0.9 * (start - mean).norm(), method
            assert torch.equal(end, resumed), method
            assert torch.equal(averaged, xs[0][2]), method
            assert torch.allclose(averaged, mean, atol=1e-6), method
            expected = (xs[0][1] - mean).norm().item()
            assert distance == pytest.approx(expected, rel=1e-3, abs=1e-6), method
    assert "2 in the checkpoint; 1 in this run" in laconic.spawn(load_flat, 4, tmp_path)[0]
    of_more = laconic.spawn(load_in_more_nodes, 6, tmp_path, nodes=3)
    for number, method in enumerate(SAVED):
        mean = (of_ranks[0][number][4] + of_ranks[2][number][4]) / 2
        for worker, one in enumerate(of_more):
            loaded, trained = one[number]
            # Averages and mixing that are under way are applied: up to a few steps of 0.01.
            assert torch.allclose(loaded, mean, atol=0.05), method
            assert torch.equal(loaded, of_more[0][number][0]), method
            assert torch.equal(trained, of_more[worker // 2 * 2][number][1]), method


def train_unevenly(method: laconic.Method, batches: list[int], node_size: int) -> Tensor:
    model = build_model()
    optimizer = sgd(model)
    nodes: Any = "auto" if node_size == 1 else None
    with laconic.Worker(model, optimizer, method, timeout=60, nodes=nodes) as worker, worker.join():
        for step in range(batches[rank()]):
            optimizer.zero_grad()
            losses = [loss(model, rank() * node_size + i, step) for i in range(node_size)]
            torch.stack(losses).mean().backward()
            optimizer.step()
    return flat(model)


UNEVEN = [laconic.AllReduce(), laconic.LocalSGD(period=3)]


def train_all_unevenly(batches: list[int], node_size: int) -> list[Tensor]:
    return [train_unevenly(method, batches, node_size) for method in UNEVEN]


def test_nodes_may_run_out_of_data_one_after_another() -> None:
    in_nodes = laconic.spawn(train_all_unevenly, 4, [3, 3, 8, 8], 1, nodes=2)
    alone = laconic.spawn(train_all_unevenly, 2, [3, 8], 2)
    for number, method in enumerate(UNEVEN):
        for found in in_nodes:
            assert torch.allclose(found[number], alone[0][number], rtol=1e-4, atol=1e-6), method


def run_out_unevenly() -> str:
    with pytest.raises(ValueError, match="run out of data in the same") as found:
        train_unevenly(laconic.LocalSGD(period=3), [5, 3, 5, 5], 1)
    return str(found.value)


def test_ranks_of_a_node_must_run_out_of_data_together() -> None:
    for text in laconic.spawn(run_out_unevenly, 4, nodes=2):
        assert "rank 0 trains up to step 4, rank 1 trains up to step 3" in text


def unfreeze(method: laconic.Method, node_size: int) -> Tensor:
    """Trains with the first layer frozen, and then all of the model."""
    model = build_model()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    nodes: Any = "auto" if node_size == 1 else None
    with laconic.Worker(model, optimizer, method, timeout=60, nodes=nodes):
        for step in range(6):
            if step == 3:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            losses = [loss(model, rank() * node_size + i, step) for i in range(node_size)]
            torch.stack(losses).mean().backward()
            optimizer.step()
    return flat(model)


def test_parameters_that_are_unfrozen_are_divided_anew() -> None:
    method = laconic.Divisible(ratio=1, period=1, background=None)
    expected = laconic.spawn(unfreeze, 2, method, 2)[0]
    for found in laconic.spawn(unfreeze, 4, method, 1, nodes=2):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


# Mistakes: the same error on every rank


def worker_with(method: laconic.Method, **arguments: Any) -> laconic.Worker:
    model = build_model()
    return laconic.Worker(model, sgd(model), method, timeout=60, **arguments)


def group_of(members: list[list[int]]) -> dist.ProcessGroup:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    groups = [(ranks, dist.new_group(ranks)) for ranks in members]
    return next(group for ranks, group in groups if rank() in ranks)


def tiny() -> laconic.Worker:
    model = nn.Linear(1, 1, bias=False)
    return laconic.Worker(model, sgd(model), laconic.LocalSGD(), timeout=60, nodes="auto")


def with_variables(**variables: str) -> laconic.Worker:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        return worker_with(laconic.LocalSGD(), nodes="auto")
    finally:
        os.environ.clear()
        os.environ.update(before)


MISTAKES: dict[str, tuple[Callable[[], laconic.Worker], str]] = {
    "sizes": (
        lambda: worker_with(laconic.LocalSGD(), local=group_of([[0], [1, 2, 3]])),
        r"same number of ranks, not \[0\] and \[1, 2, 3\]",
    ),
    "overlapping": (
        lambda: worker_with(
            laconic.LocalSGD(), local=[group_of([[0, 1], [2, 3]]), group_of([[0, 1, 2, 3]])][rank() % 2]
        ),
        r"each rank must be in one node, and the ranks name \[0, 1\] and",
    ),
    "method": (lambda: worker_with(Silent(), nodes="auto"), "Silent cannot divide x between the ranks of a node"),
    "dedicated": (
        lambda: worker_with(laconic.EfficientAdam(server=0, dedicated=True), nodes="auto"),
        "set dedicated=False",
    ),
    "tiny model": (tiny, "each of the 2 ranks of a node needs a slice of x, and x has 1 entries"),
    "not divisible": (lambda: with_variables(LOCAL_WORLD_SIZE="3"), "LOCAL_WORLD_SIZE=3 of 4"),
    "no torchrun": (lambda: with_variables(LOCAL_WORLD_SIZE=""), "LOCAL_WORLD_SIZE is not set: start the script by"),
    "one rank flat": (
        lambda: worker_with(laconic.LocalSGD(), nodes="auto" if rank() else None),
        "all ranks must agree on nodes: None on rank 0; auto on rank 1, 2, 3",
    ),
    "both": (lambda: worker_with(laconic.LocalSGD(), nodes="auto", local=group_of([[0, 1], [2, 3]])), "one of the two"),
    "no group": (lambda: worker_with(laconic.LocalSGD(), local=3), "local must be None or the torch.distributed"),
    "a number": (lambda: worker_with(laconic.LocalSGD(), nodes=2), "nodes must be None or 'auto', not 2"),
}


def make_mistakes() -> dict[str, str]:
    found = {}
    for name, (mistake, _) in MISTAKES.items():
        try:
            mistake()
        except ValueError as error:
            found[name] = str(error)
        except Exception as error:  # noqa: BLE001  shown by the test
            found[name] = repr(error)
    return found


def test_mistakes_are_named_on_every_rank() -> None:
    of_ranks = laconic.spawn(make_mistakes, 4, nodes=2)
    for name, (_, text) in MISTAKES.items():
        for number, found in enumerate(of_ranks):
            with pytest.raises(ValueError, match=text):
                raise ValueError(f"{name}, rank {number}: {found.get(name)}")


def error_across_hosts() -> str:
    try:
        worker_with(laconic.LocalSGD(), local=group_of([[0, 1], [2, 3]]))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_local_group_across_hosts_is_refused_on_every_rank() -> None:
    try:
        with hosts_behind("1gbit", 4) as hosts:
            errors = laconic.spawn(error_across_hosts, 4, hosts=hosts)
    except EmulationError as error:
        pytest.skip(str(error))
    assert all("must be on one host, and [0, 1] are on 2 hosts: pass the group of" in error for error in errors), errors


def note(members: list[int], host: str = "a", device: str = "cpu") -> dict[str, Any]:
    return {"members": members, "host": host, "device": device, "error": None}


def test_a_node_is_on_one_host_and_on_one_kind_of_device() -> None:
    assert arrange([note([0, 2]), note([1, 3], "b"), note([0, 2]), note([1, 3], "b")]) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match=r"\[0, 1\] are on a and b: pass the group of the ranks on one machine"):
        arrange([note([0, 1]), note([0, 1], "b")])
    with pytest.raises(ValueError, match=r"not cpu \(rank 0\) and cuda \(rank 1\)"):
        arrange([note([0, 1]), note([0, 1], device="cuda")])
    with pytest.raises(ValueError, match=r"must contain it, and that of rank 1 is \[0\]"):
        arrange([note([0]), note([0])])


# A rank that is lost


def lose_a_rank(method: laconic.Method) -> str:
    model = build_model()
    optimizer = sgd(model)
    with (
        pytest.raises(laconic.PeerError) as found,
        laconic.Worker(model, optimizer, method, timeout=60, nodes="auto"),
    ):
        for step in range(1_000_000):
            if rank() == 3 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss(model, rank(), step).backward()
            optimizer.step()
    return str(found.value)


@pytest.mark.parametrize("method", [laconic.LocalSGD(period=4), laconic.A2CiD2()], ids=["local_sgd", "a2cid2"])
def test_a_rank_that_is_killed_is_named_in_all_nodes(method: laconic.Method) -> None:
    *found, lost = laconic.spawn(lose_a_rank, 4, method, nodes=2, spare_survivors=True)
    assert isinstance(lost, laconic.WorkerFailed)
    for text in found:
        assert "rank 3 died" in str(text)


def stop_early() -> str:
    with pytest.raises(laconic.PeerError) as found:
        model = build_model()
        optimizer = sgd(model)
        with laconic.Worker(model, optimizer, laconic.LocalSGD(period=4), timeout=60, nodes="auto"):
            for step in range(3 if rank() == 1 else 6):
                optimizer.zero_grad()
                loss(model, rank(), step).backward()
                optimizer.step()
    return str(found.value)


def test_a_rank_that_ends_before_its_node_is_named() -> None:
    for text in laconic.spawn(stop_early, 4, nodes=2):
        assert "rank 1 has been at the end of the worker since its step 3" in text
