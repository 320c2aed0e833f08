"""Every method on a device: the fake one, with and without a backend of torch.distributed of its own."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic import watch
from laconic.comm import PeerError, connect
from laconic.comm.distributed import DistributedComm
from laconic.comm.staged import Baton
from laconic.comm.work import DeviceWork
from laconic.compress import Pick, TopK, Uniform
from tests import fake_device, strict_group
from tests.helpers import adam, batch, rank
from tests.test_conformance import ROWS, WORKERS, Row, Run, equal, run_row

pytestmark = fake_device.requires_compiler

# How the device's messages travel, and what a process calls first for that.
PREPARE: dict[str, Callable[[], object]] = {"staged": fake_device.load, "strict": strict_group.register}


def is_rounded(row: Row) -> bool:
    """Whether a row averages in fp32 by the asynchronous verb, which adds up in another order on the strict group.

    Such rows are compared up to rounding there, with SGD: Adam magnifies that of gradients that would be 0 without it.
    """
    method = row.method
    if isinstance(method, laconic.DiLoCo):
        return method.compressor is None and method.delay == 0
    return isinstance(method, laconic.Divisible) and (method.hops == 2 or method.background is None)


@pytest.fixture(params=list(PREPARE))
def prepare(request: pytest.FixtureRequest) -> Callable[[], object]:
    fake_device.load()  # built once, before the ranks need it
    return PREPARE[request.param]


def own_device() -> str:
    """Returns this rank's device: not the one with index 0 that threads use unless they are told, on some."""
    return f"fake:{(rank() + 1) % 2}"


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, tuple[Run, ...]]:
    """The run of each rank, by row."""
    rows = [row for row in ROWS if row.deterministic]
    ranks = laconic.spawn(lambda: [run_row(row, optimizer_of(row), look_after=(5,)) for row in rows], WORKERS)
    return {row.name: runs for row, runs in zip(rows, zip(*ranks, strict=True), strict=True)}


@pytest.mark.timeout(300)
def test_methods_compute_the_bits_of_the_cpu(prepare: Callable[[], object], on_cpu: dict[str, tuple[Run, ...]]) -> None:
    """Half of the rows with each optimizer. Rows that are not deterministic train, and end with one model."""

    def run(row: Row) -> Run:
        prepare()
        return run_row(row, optimizer_of(row), look_after=(5,), device=own_device())

    ranks = laconic.spawn(lambda: [run(row) for row in ROWS], WORKERS)
    failures = []
    for row, *runs in zip(ROWS, *ranks, strict=True):
        ends = [run.path[-1] for run in runs]
        if not equal(ends, ends[:1] * WORKERS) or not all(run.losses[1] < 0.97 * run.losses[0] for run in runs):
            failures.append(f"{row.name}: no common model, or none that was trained")
        same = close if prepare is PREPARE["strict"] and is_rounded(row) else equal
        for one, other in zip(runs, on_cpu.get(row.name, runs), strict=True):
            if not same([*one.path, *one.seen], [*other.path, *other.seen]) or one.nbytes != other.nbytes:
                failures.append(f"{row.name}: not the bits or bytes of the CPU")
    assert not failures


def close(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.allclose(x, y, atol=1e-5) for x, y in zip(a, b, strict=True))


def optimizer_of(row: Row) -> str:
    return "sgd" if ROWS.index(row) % 2 or is_rounded(row) else "adam"


RESUMED = ["local_sgd", "adpsgd, adapting", "local_sgd, 4 bits", "efficient_adam", "divisible, two hops"]


def test_a_resumed_run_on_a_device_continues_bit_for_bit(tmp_path: Path) -> None:
    rows = [row for row in ROWS if row.name in RESUMED]
    fake_device.load()

    def run(row: Row, *, resume: bool) -> Run:
        strict_group.register()
        folder = tmp_path / str(ROWS.index(row))
        return run_row(row, optimizer_of(row), folder, resume=resume, device=own_device())

    ranks = laconic.spawn(lambda: [(run(row, resume=False), run(row, resume=True)) for row in rows], 2)
    failures = [
        row.name
        for found in ranks
        for row, (whole, resumed) in zip(rows, found, strict=True)
        if not equal(whole.path[-len(resumed.path) :], resumed.path)
    ]
    assert len(rows) == len(RESUMED)
    assert not failures


def test_random_numbers_of_the_models_own_device_are_restored(tmp_path: Path) -> None:
    fake_device.load()
    model = nn.Linear(3, 2).to("fake:1")  # the current device is fake:0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.Worker(model, optimizer, laconic.AllReduce()) as worker:
        worker.save(tmp_path)
        drawn = torch.rand(4, device="fake:1").tolist()
        elsewhere = torch.get_device_module("fake").get_rng_state("fake:0")
        worker.load(tmp_path)
        assert torch.rand(4, device="fake:1").tolist() == drawn
        assert torch.equal(torch.get_device_module("fake").get_rng_state("fake:0"), elsewhere)


def move_to_device(folder: Path, numel: int, chunk: int | None) -> tuple[str, str]:
    """Saves on the CPU, and loads on the device with `chunk`. Returns the chunk there, and the error."""
    for device in ("cpu", "fake:1"):
        model = nn.Linear(1, numel, bias=False).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = laconic.EfficientAdam(chunk=None if device == "cpu" else chunk)
        with laconic.Worker(model, optimizer, method) as worker:
            if device == "cpu":
                worker.save(folder)
                continue
            try:
                worker.load(folder)
            except ValueError as error:
                return worker.fingerprint["EfficientAdam.chunk"], str(error)
    return worker.fingerprint["EfficientAdam.chunk"], "no error"


def test_a_checkpoint_moves_to_a_device_with_its_chunk(tmp_path: Path) -> None:
    fake_device.load()
    most = 2**18  # entries of one message on the CPU
    assert move_to_device(tmp_path / "small", most, None) == (str(most), "no error")
    assert move_to_device(tmp_path / "given", most + 1, most) == (str(most), "no error")
    chunk, error = move_to_device(tmp_path / "large", most + 1, None)
    assert chunk == str(2**24)
    assert "they differ in EfficientAdam.chunk: 262144 in the checkpoint; 16777216 in this run" in error


def error_of_start(devices: list[str], prepare: Callable[[], object]) -> str:
    """Creates a worker on a rank's device. Returns its error."""
    prepare()
    model = nn.Linear(3, 2).to(devices[rank()])
    try:
        laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), laconic.AllReduce(), timeout=60.0)
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_on_different_kinds_of_devices_raise_on_every_rank(prepare: Callable[[], object]) -> None:
    errors = laconic.spawn(error_of_start, 2, ["cpu", "fake:0"], prepare)
    backend = "strict" if prepare is PREPARE["strict"] else "gloo"
    expected = (
        f"must train on the same kind of device with the same backend, not cpu (gloo) on rank 0; fake ({backend})"
    )
    assert all(expected in error for error in errors), errors


def error_of_two_devices() -> str:
    fake_device.load()
    second = "fake:1" if rank() == 1 else "fake:0"
    model = nn.Sequential(nn.Linear(3, 2).to("fake:0"), nn.Linear(2, 1).to(second))
    try:
        laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), laconic.AllReduce(), timeout=60.0)
    except (ValueError, PeerError) as error:
        return str(error)
    return "no error"


def test_a_model_on_two_devices_on_one_rank_raises_on_every_rank() -> None:
    fake_device.load()
    for error in laconic.spawn(error_of_two_devices, 2):
        assert "all have one device, not fake:0" in error


def test_a_model_on_two_devices_raises() -> None:
    fake_device.load()
    model = nn.Sequential(nn.Linear(3, 2).to("fake:0"), nn.Linear(2, 1).to("fake:1"))
    with pytest.raises(ValueError, match=r"all have one device, not fake:0 .* and fake:1"):
        laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), laconic.AllReduce())


# The rules of NCCL, as the strict group has them


def broadcast_in_two_groups() -> None:
    x = torch.ones(2, device="fake:0")
    groups = [torch.distributed.new_group(backend="strict") for _ in range(2)]
    works = [torch.distributed.broadcast(x, 0, group=groups[0], async_op=True)]
    try:
        works.append(torch.distributed.broadcast(x, 0, group=groups[1], async_op=True))
    finally:
        works[0].wait()


def refusals() -> list[str]:
    strict_group.register()
    torch.distributed.init_process_group("cpu:gloo,fake:strict")
    x = torch.ones(2, device="fake:0")
    attempts: list[Callable[[], Any]] = [
        lambda: torch.distributed.broadcast(torch.ones(2), 0),
        lambda: torch.distributed.irecv(x, 1 - rank()),
        broadcast_in_two_groups,
        lambda: torch.distributed.broadcast(x, 0, async_op=True).wait(timedelta(seconds=9)),
        lambda: torch.distributed.broadcast(x, 0),
    ]
    errors = []
    for attempt in attempts:
        try:
            attempt()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_the_strict_group_refuses_what_nccl_cannot_do() -> None:
    fake_device.load()
    for errors in laconic.spawn(refusals, 2):
        cpu, alone, together, timed, after = errors
        assert "device type cpu" in cpu
        assert "outside of batch_isend_irecv" in alone
        assert "two communicators are in flight" in together
        assert "a timed wait breaks the communicator" in timed
        assert "was broken by a timed wait" in after


class Endless:
    """An operation of a device that never completes, as NCCL's do when a rank is gone."""

    def is_completed(self) -> bool:
        return False


def error_of_endless_operation() -> str:
    comm = connect(torch.device("cpu"), timeout=60.0)
    assert isinstance(comm, DistributedComm)
    if comm.rank == 1:
        comm.fail(KeyError("no such image"))
        return ""
    work = DeviceWork([Endless()], "mean at step 4", {1: "foreground"}, 1, step=4)
    try:
        work.await_completion(comm._register)
    except PeerError as error:
        return str(error)
    return "no error"


def test_the_host_notices_a_failed_rank_while_the_device_waits() -> None:
    text, _ = laconic.spawn(error_of_endless_operation, 2)
    assert "mean at step 4 cannot complete: rank 1 failed at step 0: KeyError: 'no such image'" in text


def find_time_out_and_abort() -> tuple[float, str | None]:
    strict_group.register()
    comm = connect(torch.device("fake:0"), timeout=60.0)
    assert isinstance(comm, DistributedComm)
    comm.fail(KeyError("no such image"))
    return comm._whole.timeout.total_seconds(), comm._whole.broken


def test_a_backend_waits_longer_than_the_worker_and_is_aborted_when_the_worker_fails() -> None:
    """NCCL ends the process when its time is over, before the worker could name a rank; and blocks the device."""
    fake_device.load()
    for seconds, broken in laconic.spawn(find_time_out_and_abort, 2):
        assert seconds > 60.0
        assert broken == "an abort"


# Steps of gossip, of which one thread trains and another exchanges


def order_after_a_pause() -> list[str]:
    """Returns the threads that have made their stream wait for the other's, in a pause of gossip."""
    fake_device.load()
    model = nn.Linear(6, 2).to(own_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    names: list[str] = []
    take = Baton.take

    def spy(baton: Baton) -> None:
        names.append(threading.current_thread().name)
        take(baton)

    with laconic.Worker(model, optimizer, laconic.A2CiD2(), timeout=60.0) as worker:
        for step in range(4):
            x, y = (tensor.to(own_device()) for tensor in batch(rank(), step))
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        gossip: Any = worker.method._gossip  # type: ignore[attr-defined]
        Baton.take = spy  # type: ignore[method-assign, assignment]
        gossip.pause()
        Baton.take = take  # type: ignore[method-assign]
    return names


def test_the_device_continues_behind_what_gossip_has_launched() -> None:
    fake_device.load()
    for names in laconic.spawn(order_after_a_pause, 2):
        assert names.count("MainThread") == 1


def spoil_gossip(prepare: Callable[[], object]) -> str:
    prepare()
    model = nn.Linear(6, 2).to(own_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        with laconic.Worker(model, optimizer, laconic.A2CiD2(rate=1.0, slack=1), timeout=60.0) as worker:
            for step in range(40):
                x, y = (tensor.to(own_device()) for tensor in batch(rank(), step))
                nn.functional.mse_loss(model(x), y).backward()
                if rank() == 1 and step == 5:
                    worker.x.fill_(float("nan"))
                optimizer.step()
                optimizer.zero_grad()
    except FloatingPointError as error:
        return str(error)
    return "finite" if bool(worker.x.isfinite().all()) else "not finite"


@pytest.mark.filterwarnings("ignore:rank 1 was dropped")
def test_gossip_does_not_send_parameters_that_are_not_finite(prepare: Callable[[], object]) -> None:
    first, second, third = laconic.spawn(spoil_gossip, 3, prepare)
    assert second.startswith("rank 1: the parameters contain NaN or infinity after step ")
    assert (first, third) == ("finite", "finite")


# Waits of the host for the device

COUNTED: dict[str, laconic.Method] = {
    "allreduce": laconic.AllReduce(),
    "qsgd": laconic.QSGD(),
    "local_sgd": laconic.LocalSGD(period=2),
    "local_sgd, 4 bits": laconic.LocalSGD(period=2, compressor=Uniform(4)),
    "adpsgd": laconic.ADPSGD(initial_period=2, calibration=4),
    "diloco": laconic.DiLoCo(period=2),
    "diloco, streaming, 4 bits": laconic.DiLoCo(period=4, fragments=2, delay=1, compressor=Uniform(4)),
    "efficient_adam": laconic.EfficientAdam(),
    "efficient_adam, server": laconic.EfficientAdam(server=0),
    "a2cid2": laconic.A2CiD2(rate=1.0, slack=2),
    "divisible": laconic.Divisible(ratio=8),
    "divisible, fp32": laconic.Divisible(ratio=8, period=3, background=None),
    "divisible, two hops": laconic.Divisible(ratio=8, period=4, hops=2),
    "divisible, corrected": laconic.Divisible(ratio=8, period=3, corrected=True),
}


def waits_by_step(method: laconic.Method) -> list[int]:
    """Returns how often the host waited for the device in each of some steps, on this rank.

    Ranks and their x are compared more often than they would be, so that it falls into these steps.
    """
    strict_group.register()
    watch.EVERY, watch.EVERY_X = 4, 8
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).to("fake:1")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [[tensor.to("fake:1") for tensor in batch(rank(), step)] for step in range(30)]
    waits = []
    with laconic.Worker(model, optimizer, method):
        for x, y in batches:
            before = fake_device.counts()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            waits.append((fake_device.counts() - before).synchronisations)
    return waits


def test_the_host_waits_for_the_device_at_most_once_a_step() -> None:
    """But for the first steps, in which gradients are compared and the pace is measured."""
    fake_device.load()
    ranks = laconic.spawn(lambda: {name: waits_by_step(method) for name, method in COUNTED.items()}, 2)
    failures = {name: waits for found in ranks for name, waits in found.items() if max(waits[12:]) > 1}
    assert not failures


def test_every_method_is_counted() -> None:
    assert {type(method) for method in COUNTED.values()} == set(laconic.METHODS.values())


# Nodes: their ranks are on different devices. A mean of two ranks is the same in every order, so bits are the CPU's.

IN_NODES: dict[str, laconic.Method] = {
    "allreduce": laconic.AllReduce(),
    "local_sgd": laconic.LocalSGD(period=3),
    "local_sgd, 4 bits": laconic.LocalSGD(period=2, compressor=Uniform(4)),
    "diloco": laconic.DiLoCo(period=4, fragments=2, delay=1, compressor=Uniform(4)),
    "efficient_adam": laconic.EfficientAdam(moments="averaged", moments_every=4),
    "divisible": laconic.Divisible(ratio=8, period=3),
}
GOSSIP_IN_NODES = laconic.A2CiD2(rate=1.0, slack=2)


def train_in_node(method: laconic.Method, device: str) -> tuple[list[Tensor], list[int], list[int]]:
    """Returns x after each step and at the end, the bytes sent by channel, and the host's waits in each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 2)).to(device)
    optimizer = adam(model)
    batches = [[tensor.to(device) for tensor in batch(rank(), step)] for step in range(12)]
    path, waits = [], []
    with laconic.Worker(model, optimizer, method, timeout=60.0, nodes="auto") as worker:
        for x, y in batches:
            before = fake_device.counts()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            waits.append((fake_device.counts() - before).synchronisations)
            path.append(worker.x.cpu().clone())
    # At the end: before, a thread may not have started the last message yet.
    nbytes = [worker.meter.total.nbytes(channel) for channel in ("foreground", "background", "node")]
    return [*path, worker.x.cpu()], nbytes, waits


def compare_in_nodes() -> tuple[list[str], Tensor]:
    """Trains on the CPU, through host memory, and on the strict group. Returns what is wrong, and gossip's model."""
    fake_device.load()
    on_cpu = {name: train_in_node(method, "cpu") for name, method in IN_NODES.items()}
    failures = []
    for way, prepare in PREPARE.items():
        prepare()
        for name, method in IN_NODES.items():
            expected, path, nbytes, waits = on_cpu[name], *train_in_node(method, own_device())
            if not equal(path, expected[0]) or nbytes != expected[1]:
                failures.append(f"{name}, {way}: not the bits or bytes of the CPU")
            if way == "strict" and max(waits[6:]) > 1:
                failures.append(f"{name}: {waits} waits of the host")
    path, _, waits = train_in_node(GOSSIP_IN_NODES, own_device())
    if max(waits[6:]) > 1:
        failures.append(f"gossip: {waits} waits of the host")
    return failures, path[-1]


def test_nodes_of_devices_compute_the_bits_of_the_cpu() -> None:
    fake_device.load()
    found = laconic.spawn(compare_in_nodes, 4, nodes=2)
    assert [failures for failures, _ in found] == [[]] * 4
    assert all(torch.equal(x, found[0][1]) for _, x in found)


def raise_of_nan(method: laconic.Method) -> list[str]:
    """Trains with a NaN in rank 1's sixth gradient. Returns the error, and the steps made until then."""
    strict_group.register()
    model = nn.Linear(6, 2).to(own_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        with laconic.Worker(model, optimizer, method, timeout=60.0) as worker:
            for step in range(12):
                x, y = (tensor.to(own_device()) for tensor in batch(rank(), step))
                (nn.functional.mse_loss(model(x), y) * (math.nan if rank() == 1 and step == 5 else 1.0)).backward()
                optimizer.step()
                optimizer.zero_grad()
    except FloatingPointError as error:
        return [str(error), str(worker.step)]
    return ["no error", str(worker.step)]


def test_a_nan_raises_on_every_rank_when_the_next_step_begins() -> None:
    fake_device.load()
    methods = [
        laconic.AllReduce(),
        laconic.QSGD(),
        laconic.LocalSGD(period=1),
        laconic.LocalSGD(period=1, compressor=Uniform(4)),
        laconic.EfficientAdam(up=Pick(4), down=Pick(4)),
        laconic.EfficientAdam(up=TopK(0.5), down=TopK(0.5)),
    ]
    ranks = laconic.spawn(lambda: [raise_of_nan(method) for method in methods], 3)
    for method, *found in zip(methods, *ranks, strict=True):
        for text, step in found:
            assert "of rank 1 at step 6" in text or "mean at step 6: NaN or infinity on rank 1" in text, (method, found)
            assert int(step) <= 6, method
