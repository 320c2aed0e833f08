"""The fake device does what its users rely on: tests on it would pass in vain otherwise."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import laconic
from tests import fake_device

pytestmark = fake_device.requires_compiler


@pytest.fixture(autouse=True)
def device() -> torch.device:
    fake_device.load()
    return torch.device("fake:1")


def cost(run: Callable[[], object]) -> fake_device.Counts:
    before = fake_device.counts()
    run()
    return fake_device.counts() - before


def test_the_host_cannot_read_the_memory(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # pytest's would print the expected fault
        ctypes.string_at(x.data_ptr(), 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV


def test_it_computes_the_bits_of_the_cpu_without_waiting_for_the_host() -> None:
    def train(where: str) -> list[Tensor]:
        fake_device.load()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 2))
        x, y = torch.randn(8, 6).to(where), torch.randn(8, 2).to(where)
        model.to(where)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)

        def steps() -> None:
            for _ in range(3):
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

        assert cost(steps).synchronisations == 0
        return [p.detach().cpu() for p in model.parameters()]

    # In a new process: the engine of autograd knows only the devices that there are when it is first used.
    (both,) = laconic.spawn(lambda: (train("cpu"), train("fake:1")), 1)
    assert all(map(torch.equal, *both))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: bool(x[0] > 0),
        lambda x: torch.equal(x, x),
        lambda x: x[x > 0],
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: x.copy_(torch.zeros(3), non_blocking=True),
        lambda x: torch.tensor([1.0, 2.0, 3.0], device=x.device),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.accelerator.synchronize(x.device),
        lambda x: torch.accelerator.current_stream(x.device).synchronize(),
    ],
)
def test_what_makes_the_host_wait_is_counted(device: torch.device, run: Callable[[Tensor], object]) -> None:
    x = torch.ones(3, device=device)
    assert cost(lambda: run(x)).synchronisations == 1


def test_what_does_not_make_the_host_wait_is_not_counted(device: torch.device) -> None:
    x, pinned = torch.ones(3, device=device), torch.zeros(3).pin_memory()

    def run() -> None:
        pinned.copy_(x.mul(2).clamp_(0, 1), non_blocking=True)
        x.copy_(pinned, non_blocking=True)
        x.add_(torch.tensor(2.0)).view(1, 3).sum(1)

    counts = cost(run)
    assert (counts.synchronisations, counts.to_host, counts.to_device) == (0, 1, 1)
    assert counts.kernels >= 4


def test_each_thread_counts_its_own_operations(device: torch.device) -> None:
    thread = threading.Thread(target=lambda: torch.ones(3, device=device).sum().item())

    def run() -> None:
        thread.start()
        thread.join()

    assert cost(run) == fake_device.Counts(0, 0, 0, 0)


def test_a_copy_to_the_host_arrives_when_the_host_waits_for_it(device: torch.device) -> None:
    x, pinned = torch.ones(3, device=device), torch.zeros(3).pin_memory()
    stream, event = torch.Stream(device), torch.Event(device)
    with stream:
        pinned.copy_(x, non_blocking=True)
        event.record()
        x.fill_(7.0)
    torch.accelerator.current_stream(device).synchronize()  # of another stream
    assert pinned.tolist() == [0.0] * 3
    event.synchronize()
    assert pinned.tolist() == [1.0] * 3


def test_a_copy_to_the_device_reads_the_host_as_late_as_its_stream_allows(device: torch.device) -> None:
    x, pinned = torch.zeros(3, device=device), torch.ones(3).pin_memory()
    stream, event = torch.Stream(device), torch.Event(device)
    with stream:
        x.copy_(pinned, non_blocking=True)
        event.record()
    assert x.tolist() == [0.0] * 3  # this stream has not waited for the other
    pinned.fill_(2.0)  # too early
    event.wait()
    assert x.tolist() == [2.0] * 3


def test_an_event_is_not_over_when_it_is_first_asked(device: torch.device) -> None:
    x, pinned, event = torch.ones(3, device=device), torch.zeros(3).pin_memory(), torch.Event(device)
    pinned.copy_(x, non_blocking=True)
    event.record(torch.accelerator.current_stream(device))
    assert not event.query()
    assert pinned.tolist() == [0.0] * 3
    assert event.query()
    assert pinned.tolist() == [1.0] * 3


def test_tensors_of_the_host_and_of_another_device_are_refused(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3, device="fake:0")
    with pytest.raises(RuntimeError, match=r"same device|on the fake device"):
        torch.cat([x, torch.ones(3)])


def test_each_device_has_random_numbers_of_its_own(device: torch.device) -> None:
    module = torch.get_device_module(device)
    saved = module.get_rng_state(device)
    drawn = torch.rand(3, device=device).tolist()
    torch.rand(3, device="fake:0")
    assert torch.rand(3, device=device).tolist() != drawn
    module.set_rng_state(saved, device)
    assert torch.rand(3, device=device).tolist() == drawn
