"""The worker's promises about the user's model, optimizer and loop, one by one."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from tests.helpers import batch, build_model, flat, rank, train_step


@dataclass
class Silent(laconic.Method):
    """Says nothing: the worker alone."""


def worker_of(model: nn.Module, **settings: object) -> laconic.Worker:
    return laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), Silent(), **settings)  # type: ignore[arg-type]


def test_parameters_are_views_of_x() -> None:
    model = build_model()
    before = flat(model)
    worker = worker_of(model)
    assert torch.equal(worker.x, before)
    worker.x.zero_()
    assert all((p == 0).all() for p in model.parameters())


def test_a_scalar_lies_behind_x_in_the_same_memory() -> None:
    worker = worker_of(build_model())
    before = worker.x.clone()
    worker.x_and_scalar[-1] = 7.0
    assert torch.equal(worker.x, before)
    worker.x_and_scalar.zero_()
    assert all((p == 0).all() for p in worker.model.parameters())


def test_a_method_has_no_metrics_unless_it_says_so() -> None:
    assert worker_of(build_model()).method.metrics() == {}


shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)


@given(shapes=shapes, dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_flattening_keeps_every_value_and_shape(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes])
    before = [p.detach().clone() for p in model]
    worker = worker_of(model)
    assert worker.x.dtype == dtype
    assert worker.x.numel() == sum(p.numel() for p in before)
    assert all(torch.equal(p, b) and p.shape == b.shape for p, b in zip(model, before, strict=True))
    worker.x.add_(1)
    assert all(torch.equal(p, b + 1) for p, b in zip(model, before, strict=True))


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


def test_memory_order_stays() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    before = model.weight.detach().clone()
    worker_of(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.weight, before)


def plain(build: object, loop: object) -> Tensor:
    torch.manual_seed(0)
    model, optimizer = build()  # type: ignore[operator]
    loop(model, optimizer)  # type: ignore[operator]
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def check_same_as_without(build: object, loop: object) -> None:
    """The loop gives the same model, bit for bit, inside a world of one."""

    def inside(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with laconic.Worker(model, optimizer, laconic.AllReduce()):
            loop(model, optimizer)  # type: ignore[operator]

    assert torch.equal(plain(build, loop), plain(build, inside))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 6) -> None:
    for step in range(number):
        train_step(model, optimizer, 0, step)


def test_parameter_groups_and_schedulers() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build_model()
        groups = [{"params": model[2].parameters(), "lr": 0.5}, {"params": model[0].parameters()}]  # not model order
        return model, torch.optim.AdamW(groups, lr=0.01)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=10)
        for step in range(6):
            train_step(model, optimizer, 0, step)
            schedule.step()

    check_same_as_without(build, loop)


def test_frozen_and_tied_parameters_and_those_without_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused, self.frozen = (
                nn.Linear(6, 6),
                nn.Linear(6, 6),
                nn.Linear(6, 2),
                nn.Linear(6, 2),
            )
            self.b.weight = self.a.weight
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.b(self.a(x).tanh()))

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Tied()
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


def test_buffers_and_frozen_parameters_come_from_rank_0_and_are_averaged() -> None:
    def run() -> tuple[Tensor, int, float, list[float], list[int]]:
        model = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "frozen": nn.Linear(1, 1, bias=False)})
        model["frozen"].requires_grad_(False).weight.fill_(float(rank()))
        model["norm"].running_mean.fill_(float(rank()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, Silent()) as worker:
            start = model["norm"].running_mean.clone()
            model["norm"].running_mean.fill_(float(worker.rank))
            model["norm"].num_batches_tracked.fill_(10 + worker.rank)
            means, counts = [], []
            with worker.consensus():
                means.append(model["norm"].running_mean[0].item())
                counts.append(model["norm"].num_batches_tracked.item())
                with worker.consensus():  # the same model again
                    means.append(model["norm"].running_mean[0].item())
            means.append(model["norm"].running_mean[0].item())
            counts.append(model["norm"].num_batches_tracked.item())
        means.append(model["norm"].running_mean[0].item())
        return start, worker.size, model["frozen"].weight.item(), means, counts

    for i, (start, size, frozen, means, counts) in enumerate(laconic.spawn(run, 4)):
        assert (start == 0).all()
        assert size == 4
        assert frozen == 0.0
        assert means == [1.5, 1.5, float(i), 1.5]
        assert counts == [10, 10 + i]


def test_consensus_is_the_mean_of_x_and_gives_x_back_after_an_error() -> None:
    def run() -> tuple[Tensor, Tensor, Tensor]:
        model = build_model()
        with worker_of(model) as worker:
            worker.x.fill_(float(worker.rank)).add_(torch.arange(worker.x.numel()))
            own = worker.x.clone()
            try:
                with worker.consensus():
                    agreed = worker.x.clone()
                    raise KeyError("in evaluation")
            except KeyError:
                pass
            return own, agreed, worker.x.clone()

    for own, agreed, after in laconic.spawn(run, 2):
        assert torch.equal(own, after)
        assert torch.equal(agreed, torch.arange(own.numel()) + 0.5)


def test_a_user_who_initialised_torch_distributed() -> None:
    def run() -> tuple[float, float]:
        torch.distributed.init_process_group("gloo")
        model = build_model()
        with worker_of(model) as worker:
            worker.x.fill_(float(worker.rank))
        mine = torch.ones(1)
        torch.distributed.all_reduce(mine)  # the user's own group still works
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


def test_alone_where_a_launcher_started_many_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
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
            ("control", "mean"): 4 * d + 8,  # and the consensus distance
        }
        assert waited > 0


def test_hooks_are_gone_after_the_block() -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.Worker(model, optimizer, Silent()) as worker:
        train_step(model, optimizer, 0, 0)
    train_step(model, optimizer, 0, 1)
    assert worker.step == 1


def test_a_mask_of_infinities_among_the_buffers() -> None:
    """It has no mean, and every worker has the same: it stays. Entries beside it are averaged."""

    def run() -> tuple[list[float], list[float]]:
        model = nn.Linear(2, 2)
        model.register_buffer("mask", torch.tensor([float("-inf"), 0.0, 4.0]))
        with worker_of(model) as worker:
            model.mask[2] += worker.rank
            with worker.consensus():
                lent = model.mask.tolist()
        return lent, model.mask.tolist()

    agreed = [float("-inf"), 0.0, 4.5]
    assert laconic.spawn(run, 2) == [(agreed, agreed)] * 2


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


@pytest.mark.parametrize("workers", [2, 4])
def test_a_loop_with_everything_in_it_is_training_on_the_mean_gradient(workers: int) -> None:
    """Groups, schedule, accumulation, tied, frozen and unused parameters: as one process that sees all batches."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(0)
        model = Everything()
        groups = [{"params": model.b.bias, "lr": 0.05}, {"params": [*model.a.parameters(), *model.unused.parameters()]}]
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


@settings(max_examples=5)
@given(shapes=shapes, seed=st.integers(0, 100))
def test_consensus_is_the_mean_whatever_the_shapes(shapes: list[tuple[int, ...]], seed: int) -> None:
    def run() -> tuple[Tensor, Tensor, Tensor]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        with worker_of(model) as worker:
            worker.x.copy_(torch.randn(worker.x.shape, generator=torch.Generator().manual_seed(seed + worker.rank)))
            own = worker.x.clone()
            with worker.consensus():
                lent = worker.x.clone()
            return own, lent, worker.x.clone()

    results = laconic.spawn(run, 3)
    mean = torch.stack([own for own, _, _ in results]).mean(dim=0)
    for own, lent, after in results:
        torch.testing.assert_close(lent, mean)
        assert torch.equal(own, after)


def test_a_parameter_that_is_a_single_number_and_averaged_moments() -> None:
    """Adam's counter of steps has its shape, but is no moment of it."""

    def run() -> tuple[list[str], float]:
        model = nn.ParameterList([nn.Parameter(torch.ones(()))])
        optimizer = torch.optim.Adam(model.parameters())
        with laconic.Worker(model, optimizer, laconic.LocalSGD(1, "averaged")) as worker:
            (model[0] * (worker.rank + 1)).backward()
            optimizer.step()
            return sorted(worker.moments()), optimizer.state[model[0]]["step"].item()

    assert laconic.spawn(run, 2) == [(["exp_avg", "exp_avg_sq"], 1.0)] * 2


# Bad input ---------------------------------------------------------------------------------------------------------


def expect(
    error: type[Exception], match: str, model: nn.Module, optimizer: object = None, method: object = None
) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=match):
        laconic.Worker(model, optimizer, method or Silent())  # type: ignore[arg-type]


def test_no_trainable_parameter() -> None:
    model = build_model().requires_grad_(False)
    expect(ValueError, "must have a trainable parameter, and none of its 4 has requires_grad", model)


def test_mixed_dtypes() -> None:
    model = build_model()
    model[2].double()
    expect(ValueError, r"must all have one dtype, not torch.float32 \('0.bias'\) and torch.float64 \('2.bias'\)", model)


def test_mixed_devices() -> None:
    model = build_model()
    model[2].to("meta")
    expect(ValueError, "must all have one device, not cpu .* and meta", model)


def test_integer_and_complex_parameters() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    expect(ValueError, "must be real floating point numbers, and '0' is torch.complex64", model)


def test_lazy_parameters() -> None:
    model = nn.LazyLinear(3)
    expect(ValueError, "'weight' has no shape yet: run the model once", model)


def test_wrapped_already() -> None:
    expect(ValueError, "must not be wrapped already, and it is in DataParallel", nn.DataParallel(build_model()))


def test_wrapped_in_ddp() -> None:
    def run() -> str:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(build_model())
        try:
            worker_of(model)
        except ValueError as error:
            return str(error)
        return ""

    assert (
        laconic.spawn(run, 2)
        == ["model must not be wrapped already, and it is in DistributedDataParallel: pass the bare module"] * 2
    )


def test_another_models_optimizer() -> None:
    other = torch.optim.SGD(nn.Linear(5, 4).parameters(), lr=0.1)
    expect(ValueError, r"must be the model's, and number 0 of group 0, of shape \(4, 5\), is not", build_model(), other)


def test_not_a_method() -> None:
    expect(ValueError, "must be an instance of a laconic.Method, such as LocalSGD.8., not 8", build_model(), method=8)
    expect(ValueError, "not <class", build_model(), method=laconic.AllReduce)


def test_a_method_that_forgot_dataclass() -> None:
    class Forgot(laconic.Method):
        period: int = 4

    expect(ValueError, "Forgot has fields, so it must be decorated with @dataclass", build_model(), method=Forgot())


def test_closures_are_refused() -> None:
    model = build_model()
    with worker_of(model) as worker, pytest.raises(ValueError, match="without a closure"):
        worker.optimizer.step(lambda: 0.0)


def test_a_step_inside_consensus_is_refused() -> None:
    model = build_model()
    with worker_of(model) as worker, worker.consensus(), pytest.raises(RuntimeError, match=r"inside consensus\(\)"):
        train_step(model, worker.optimizer, 0, 0)


def test_parameters_that_leave_x_are_noticed() -> None:
    model = build_model()
    with worker_of(model) as worker:
        train_step(model, worker.optimizer, 0, 0)
        model.load_state_dict(copy.deepcopy(model.state_dict()))  # copies into place: fine
        train_step(model, worker.optimizer, 0, 1)
        model[0].bias.data = torch.zeros(9)
        with pytest.raises(RuntimeError, match=r"'0.bias' has left worker.x"):
            train_step(model, worker.optimizer, 0, 2)


def test_parameters_that_are_unfrozen_later_are_noticed() -> None:
    model = build_model()
    model[0].requires_grad_(False)
    with worker_of(model) as worker:
        train_step(model, worker.optimizer, 0, 0)
        model[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"has a gradient but is not in worker.x"):
            train_step(model, worker.optimizer, 0, 1)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_bad_timeout(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be more than 0 seconds"):
        worker_of(build_model(), timeout=timeout)


class Failing(torch.optim.SGD):
    """Its second step does not end."""

    made = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.made += 1
        if self.made == 2:
            raise MemoryError("no room for a step")
        super().step()


def test_a_step_that_failed_is_not_gone_on_from() -> None:
    model = build_model()
    torch.optim.SGD(model.parameters(), lr=0.1)  # from the first on, torch runs hooks for a parent's step, too
    optimizer = Failing(model.parameters(), lr=0.1)
    with laconic.Worker(model, optimizer, laconic.AllReduce()) as worker:
        train_step(model, optimizer, 0, 0)
        saved = worker.state_dict()
        with pytest.raises(MemoryError):
            train_step(model, optimizer, 0, 1)
        with pytest.raises(RuntimeError, match=r"optimizer.step\(\) did not end at step 2: go on from a checkpoint"):
            train_step(model, optimizer, 0, 1)
        worker.load_state_dict(saved)
        train_step(model, optimizer, 0, 1)
        assert worker.step == 2
