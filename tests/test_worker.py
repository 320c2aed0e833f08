"""The worker keeps the user's model, optimizer and loop as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from tests.helpers import Silent, batch, build_model, rank, train_step, worker_of

Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
Loop = Callable[[nn.Module, torch.optim.Optimizer], None]
shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)


def test_a_method_has_no_metrics_unless_it_says_so() -> None:
    assert worker_of(build_model()).method.metrics() == {}


@given(shapes=shapes, steps=st.integers(0, 3))
def test_state_survives_a_round_trip(shapes: list[tuple[int, ...]], steps: int) -> None:
    def build() -> tuple[nn.ParameterList, laconic.Worker]:
        torch.manual_seed(0)
        model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        return model, laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), laconic.LocalSGD(2), seed=3)

    model, worker = build()
    for _ in range(steps):
        torch.stack([p.sum() for p in model]).sum().backward()
        worker.optimizer.step()
    torch.rand(2, generator=worker.generator)
    saved = worker.state_dict()
    _, other = build()
    other.load_state_dict(saved)
    assert torch.equal(other.x, worker.x)
    assert other.step == worker.step == steps
    assert torch.equal(torch.rand(5, generator=other.generator), torch.rand(5, generator=worker.generator))
    worker.x.add_(1)
    assert not worker.x.numel() or not torch.equal(saved["x"], worker.x), "the state is a copy"


def trained_by(build: Build, loop: Loop) -> Tensor:
    torch.manual_seed(0)
    model, optimizer = build()
    loop(model, optimizer)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def check_same_as_without(build: Build, loop: Loop) -> None:
    """Asserts that the loop gives the same model, bit for bit, in a run of one worker as without laconic."""

    def inside(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with laconic.Worker(model, optimizer, laconic.AllReduce()):
            loop(model, optimizer)

    assert torch.equal(trained_by(build, loop), trained_by(build, inside))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 6) -> None:
    for step in range(number):
        train_step(model, optimizer, 0, step)


def test_parameter_groups_and_schedulers() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build_model()
        groups: list[dict[str, Any]] = [  # in another order than in the model
            {"params": model[2].parameters(), "lr": 0.5},
            {"params": model[0].parameters()},
        ]
        return model, torch.optim.AdamW(groups, lr=0.01)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=10)
        for step in range(6):
            train_step(model, optimizer, 0, step)
            schedule.step()

    check_same_as_without(build, loop)


class Everything(nn.Module):
    """Tied, frozen and unused parameters in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.unused, self.frozen = nn.Linear(6, 2), nn.Linear(6, 2)
        self.b.weight = self.a.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.b(self.a(x).tanh()))


def test_frozen_and_tied_parameters_and_those_without_gradient() -> None:
    def build() -> tuple[Everything, torch.optim.Optimizer]:
        model = Everything()
        return model, torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)

    check_same_as_without(build, steps)
    model, optimizer = build()
    worker = laconic.Worker(model, optimizer, laconic.AllReduce())
    assert worker.x.numel() == 36 + 6 + 6 + 14, "the tied weight once, the frozen layer not at all"
    assert model.a.weight is model.b.weight


def test_accumulation_and_clipping() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build_model()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(12):
            nn.functional.mse_loss(model(batch(0, step)[0]), batch(0, step)[1]).backward()
            if step % 3 == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()

    check_same_as_without(build, loop)


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # torch's, on Python 3.13.0
def test_compiled_model() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build_model()
        return torch.compile(model, backend="aot_eager"), torch.optim.Adam(model.parameters())  # type: ignore[return-value]

    check_same_as_without(build, steps)


def test_two_ranks_one_compiled_train_together() -> None:
    def run() -> Tensor:
        model = build_model()
        optimizer = torch.optim.Adam(model.parameters())
        used = torch.compile(model, backend="eager") if rank() == 0 else model
        with laconic.Worker(used, optimizer, laconic.AllReduce()) as worker:  # type: ignore[arg-type]
            train_step(used, optimizer, worker.rank, 0)  # type: ignore[arg-type]
        return worker.x

    first, second = laconic.spawn(run, 2)
    assert torch.equal(first, second)


def test_a_user_who_initialised_torch_distributed() -> None:
    def run() -> tuple[float, float]:
        torch.distributed.init_process_group("gloo")
        model = build_model()
        with worker_of(model) as worker:
            worker.x.fill_(float(worker.rank))
        mine = torch.ones(1)
        torch.distributed.all_reduce(mine)  # the user's own process group still works
        return worker.x[0].item(), mine.item()

    assert laconic.spawn(run, 3) == [(1.0, 3.0)] * 3


def test_several_workers_in_one_job_one_after_another() -> None:
    def run() -> list[float]:
        values = []
        for round_ in range(3):
            with worker_of(build_model()) as worker:
                worker.x.fill_(float(worker.rank + round_))
            values.append(worker.x[0].item())
        return values

    assert laconic.spawn(run, 2) == [[0.5, 1.5, 2.5]] * 2


def test_a_lone_worker_where_a_launcher_started_many_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.warns(UserWarning, match="SLURM_NTASKS=4 but RANK and WORLD_SIZE are not set: this worker runs alone"):
        worker_of(build_model())


def test_the_method_is_copied() -> None:
    method = laconic.LocalSGD(2)
    first, second = (laconic.Worker(m, torch.optim.SGD(m.parameters(), lr=0.1), method) for m in [build_model()] * 2)
    assert first.method is not second.method
    assert first.method == method


def test_meter_by_channel_and_verb() -> None:
    def run() -> tuple[dict[tuple[str, str], int], float]:
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, laconic.LocalSGD(1)) as worker:
            train_step(model, optimizer, worker.rank, 0)
            with worker.consensus():
                pass
            tallies = worker.meter.total.tallies
            return {key: tally.nbytes for key, tally in tallies.items()}, worker.meter.last_step.seconds("foreground")

    d = sum(p.numel() for p in build_model().parameters())
    for i, (nbytes, waited) in enumerate(laconic.spawn(run, 2)):
        assert nbytes == {
            ("control", "broadcast"): 4 * d if i == 0 else 0,
            ("foreground", "mean"): 4 * (d + 1),
            ("control", "all_gather"): 32,  # the ranks compare themselves
            ("control", "mean"): 8,  # the consensus distance; x is equal on all ranks after a round
            ("control", "meet"): 0,  # counts seconds only
        }
        assert waited > 0


def test_hooks_are_gone_after_the_block() -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.Worker(model, optimizer, Silent()) as worker:
        train_step(model, optimizer, 0, 0)
    train_step(model, optimizer, 0, 1)
    assert worker.step == 1


@pytest.mark.parametrize("workers", [2, 4])
def test_a_loop_with_everything_in_it_is_training_on_the_mean_gradient(workers: int) -> None:
    """Groups, schedule, accumulation, tied, frozen and unused parameters: equal to one process with all batches."""

    def build() -> tuple[Everything, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(0)
        model = Everything()
        groups: list[dict[str, Any]] = [
            {"params": model.b.bias, "lr": 0.05},
            {"params": [*model.a.parameters(), *model.unused.parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def accumulate(model: nn.Module, worker: int, step: int, share: float) -> None:
        for part in range(2):
            x, y = batch(worker, 2 * step + part)
            (share * nn.functional.mse_loss(model(x), y)).backward()

    def run() -> Tensor:
        model, optimizer, schedule = build()
        with laconic.Worker(model, optimizer, laconic.AllReduce()) as worker:
            for step in range(8):
                accumulate(model, worker.rank, step, 0.5)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    model, optimizer, schedule = build()
    for step in range(8):
        for worker in range(workers):
            accumulate(model, worker, step, 0.5 / workers)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    expected = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for result in laconic.spawn(run, workers):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def expect_refused(match: str, method: object) -> None:
    model = build_model()
    with pytest.raises(ValueError, match=match):
        laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), method)  # type: ignore[arg-type]


def test_not_a_method() -> None:
    expect_refused("must be an instance of a laconic.Method, such as LocalSGD.8., not 8", 8)
    expect_refused("not <class", laconic.AllReduce)


def test_a_method_that_forgot_dataclass() -> None:
    class Forgot(laconic.Method):
        period: int = 4

    expect_refused("Forgot has fields, so it must be decorated with @dataclass", Forgot())


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_bad_timeout(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be a finite number above 0"):
        worker_of(build_model(), timeout=timeout)


class Failing(torch.optim.SGD):
    """Raises in its second step."""

    made = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.made += 1
        if self.made == 2:
            raise MemoryError("no room for a step")
        super().step()


def test_training_cannot_continue_after_a_failed_step() -> None:
    model = build_model()
    torch.optim.SGD(model.parameters(), lr=0.1)  # once one exists, torch runs hooks for a parent class's step() too
    optimizer = Failing(model.parameters(), lr=0.1)
    with laconic.Worker(model, optimizer, laconic.AllReduce()) as worker:
        train_step(model, optimizer, 0, 0)
        saved = worker.state_dict()
        with pytest.raises(MemoryError):
            train_step(model, optimizer, 0, 1)
        with pytest.raises(RuntimeError, match=r"optimizer.step\(\) failed at step 2: continue from a checkpoint"):
            train_step(model, optimizer, 0, 1)
        worker.load_state_dict(saved)
        train_step(model, optimizer, 0, 1)
        assert worker.step == 2
