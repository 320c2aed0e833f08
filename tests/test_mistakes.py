"""Mistakes that would spoil training without an error: the worker notices them and says what to do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.compress import Uniform
from tests.helpers import Silent, adam, build_model, flat, loss, rank, sgd, train_step, worker_of

METHODS = [
    laconic.AllReduce(),
    laconic.QSGD(),
    laconic.EfficientAdam(),
    laconic.LocalSGD(3),
    laconic.LocalSGD(3, compressor=Uniform(4)),
    laconic.ADPSGD(initial_period=2),
    laconic.Divisible(8, 3),
    laconic.Divisible(8, 3, corrected=True),
    laconic.Divisible(8, 3, hops=2, delay=2),
    laconic.A2CiD2(),
    laconic.A2CiD2(background=False),
]
IN_STEP = [method for method in METHODS if method != laconic.A2CiD2()]  # those whose ranks step together

Loop = Callable[[laconic.Worker], object]


def run_one(method: laconic.Method, loop: Loop, optimize: Callable[[nn.Module], torch.optim.Optimizer]) -> str:
    """Runs a loop in a worker. Returns the error or the warning that the user of this rank reads, and the last step."""
    model = build_model()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            with laconic.Worker(model, optimize(model), method, timeout=60) as worker:
                loop(worker)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__} in step {worker.step}: {error}"
    return f"Warning in step {worker.step}: {found[0].message}" if found else "nothing"


def on_all_ranks(
    methods: list[laconic.Method], loop: Loop, optimize: Callable[[nn.Module], torch.optim.Optimizer] = sgd
) -> list[tuple[laconic.Method, list[str]]]:
    """Runs a loop with each method, one after another in the same three processes. Returns the texts of all ranks."""
    ranks = laconic.spawn(lambda: [run_one(method, loop, optimize) for method in methods], 3)
    return list(zip(methods, map(list, zip(*ranks, strict=True)), strict=True))


def train(worker: laconic.Worker, steps: int, data_of: int | None = None) -> None:
    for step in range(steps):
        train_step(worker.model, worker.optimizer, worker.rank if data_of is None else data_of, step)


# Ranks that step differently


def test_optimizer_settings_that_differ_raise_with_every_method() -> None:
    def loop(worker: laconic.Worker) -> None:
        if worker.rank == 1:
            worker.optimizer.param_groups[0]["momentum"] = 0.8
        train(worker, 7)

    for method, texts in on_all_ranks(METHODS, loop):
        assert len(set(texts)) == 1, (method, texts)
        assert texts[0].startswith("ValueError in step "), (method, texts)
        assert "rank 1: lr=0.05 weight_decay=0.001 momentum=0.8" in texts[0]


def test_other_settings_while_ranks_are_at_different_steps_of_a_schedule_are_fine() -> None:
    def loop(worker: laconic.Worker) -> None:
        for step in range(4 + worker.rank):
            worker.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            train_step(worker.model, worker.optimizer, worker.rank, step)
        with worker.consensus():
            pass

    for method, texts in on_all_ranks([laconic.A2CiD2(), laconic.LocalSGD(8), Silent()], loop):
        assert texts == ["nothing"] * 3, method


def test_parameters_that_differ_are_noticed_in_a_step() -> None:
    """With the same settings: one rank's optimizer has another state."""

    def loop(worker: laconic.Worker) -> None:
        for p in worker.parameters:
            worker.optimizer.state[p]["momentum_buffer"] = torch.full_like(p, float(worker.rank == 2))
        train(worker, 5)

    for method, texts in on_all_ranks([laconic.AllReduce(), laconic.QSGD()], loop):
        assert len(set(texts)) == 1, (method, texts)
        expected = (
            r"RuntimeError in step 2: .* keeps the parameters equal on all ranks, and after step 1 those of rank 2 "
        )
        assert re.match(expected, texts[0]), texts[0]


def test_parameters_that_one_rank_loads_are_noticed_at_the_end() -> None:
    def loop(worker: laconic.Worker) -> None:
        train(worker, 6)
        if worker.rank == 0:
            worker.model.load_state_dict(build_model(9).state_dict())

    for method, texts in on_all_ranks([laconic.AllReduce(), laconic.EfficientAdam(), laconic.LocalSGD(3)], loop):
        assert len(set(texts)) == 1, (method, texts)
        assert "after step 6 those of rank 0 differ from the others'" in texts[0], (method, texts)


def test_a_nan_raises_on_every_rank_with_every_method() -> None:
    def loop(worker: laconic.Worker) -> None:
        for step in range(1, 13):
            loss(worker.model, worker.rank, step).backward()
            if (worker.rank, step) == (1, 5):
                next(worker.model.parameters()).grad[0, 0] = torch.nan  # type: ignore[index]
            worker.optimizer.step()

    for method, texts in on_all_ranks(IN_STEP, loop):
        assert len(set(texts)) == 1, (method, texts)
        assert re.match(r"FloatingPointError in step .*NaN or infinity .*rank 1\b", texts[0]), (method, texts)
        step = re.search(r"at step (\d+)", texts[0])
        assert step, texts[0]
        assert 5 <= int(step[1]) <= 9


# GradScaler


def scaled_loop(worker: laconic.Worker, overflow: tuple[int, ...], agree: bool) -> None:
    """Trains with a GradScaler. In step 4 gradients overflow on some ranks; `agree`: all ranks skip that step then."""
    scaler = torch.amp.GradScaler("cpu")
    for step in range(9):
        scaler.scale(loss(worker.model, worker.rank, step)).backward()
        first = next(worker.model.parameters()).grad
        assert first is not None
        if step == 4 and worker.rank in overflow:
            first[0, 0] = torch.inf
        if agree:
            overflows = torch.tensor(float(any(not p.grad.isfinite().all() for p in worker.parameters)))  # type: ignore[union-attr]
            worker.average_(overflows)
            if overflows > 0:
                first.fill_(torch.inf)
        scaler.step(worker.optimizer)
        scaler.update()
        worker.optimizer.zero_grad()


def test_a_step_that_gradscaler_skips_on_one_rank_is_noticed() -> None:
    for method, texts in on_all_ranks(IN_STEP, lambda worker: scaled_loop(worker, (1,), agree=False)):
        assert len(set(texts)) == 1, (method, texts)
        assert texts[0].startswith("RuntimeError in step "), (method, texts)
        assert "its scale is 65536 on rank 0, 32768 on rank 1, 65536 on rank 2" in texts[0]


@pytest.mark.parametrize(("overflow", "agree"), [((1,), True), ((0, 1, 2), False)])
def test_a_step_that_gradscaler_skips_on_all_ranks_is_fine(overflow: tuple[int, ...], agree: bool) -> None:
    methods = [laconic.AllReduce(), laconic.LocalSGD(3), laconic.Divisible(8, 3)]
    for method, texts in on_all_ranks(methods, lambda worker: scaled_loop(worker, overflow, agree)):
        assert texts == ["nothing"] * 3, method


# Equal data


def test_equal_data_on_all_ranks_is_warned_of_once() -> None:
    for method, texts in on_all_ranks(METHODS, lambda worker: train(worker, 7, data_of=0)):
        assert texts[1:] == ["nothing"] * 2, method
        expected = "Warning in step 7: the local gradients of all 3 ranks were equal, bit for bit, in the first 2 steps"
        assert texts[0].startswith(expected), method
        assert "DistributedSampler" in texts[0]
        assert "DistributedDataParallel" in texts[0]


def test_a_ddp_wrapper_around_the_model_is_warned_of() -> None:
    def loop(worker: laconic.Worker) -> None:
        ddp = nn.parallel.DistributedDataParallel(worker.model)
        for step in range(4):
            train_step(ddp, worker.optimizer, worker.rank, step)

    for _, texts in on_all_ranks([laconic.LocalSGD(2)], loop):
        assert "DistributedDataParallel" in texts[0]


def test_equal_gradients_without_a_mistake_are_not_warned_of() -> None:
    def zeros(worker: laconic.Worker) -> None:
        for _ in range(4):
            for p in worker.parameters:
                p.grad = torch.zeros_like(p)
            worker.optimizer.step()

    def equal_once(worker: laconic.Worker) -> None:
        train_step(worker.model, worker.optimizer, 0, 0)
        train(worker, 4)

    def permuted(worker: laconic.Worker) -> None:
        for _ in range(4):
            for p in worker.parameters:
                p.grad = torch.zeros_like(p)
            next(iter(worker.parameters)).grad[0, worker.rank] = 1.0  # type: ignore[index]
            worker.optimizer.step()

    for loop in (zeros, equal_once, permuted):
        for _, texts in on_all_ranks([laconic.AllReduce(), laconic.A2CiD2()], loop):
            assert texts == ["nothing"] * 3


# Weights changed inside the block


def weights_after(loop: Loop, methods: list[laconic.Method], optimize: Callable[[nn.Module], torch.optim.Optimizer]):
    """Runs a loop with each method on three ranks, and returns x of each rank after the block, by method."""

    def run() -> list[Tensor]:
        found = []
        for method in methods:
            model = build_model()
            with laconic.Worker(model, optimize(model), method) as worker:
                loop(worker)
            found.append(worker.x.clone())
        return found

    return list(zip(methods, zip(*laconic.spawn(run, 3), strict=True), strict=True))


def load_best(worker: laconic.Worker) -> None:
    worker.model.load_state_dict(build_model(9).state_dict())


def test_weights_that_all_ranks_load_at_the_end_are_the_result_bit_for_bit() -> None:
    def loop(worker: laconic.Worker) -> None:
        train(worker, 10)
        load_best(worker)

    for method, xs in weights_after(loop, METHODS, adam):
        assert all(torch.equal(x, flat(build_model(9))) for x in xs), method


def test_reset_begins_anew_from_the_present_weights() -> None:
    """After a reset nothing of the time before is left: steps without gradients leave the weights as they are."""

    def loop(worker: laconic.Worker) -> None:
        train(worker, 10)
        load_best(worker)
        worker.reset()
        for _ in range(8):
            for p in worker.parameters:
                p.grad = torch.zeros_like(p)
            worker.optimizer.step()

    for method, xs in weights_after(loop, METHODS, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)):
        for x in xs:  # the mean of three equal numbers may differ from them in the last bit
            torch.testing.assert_close(x, flat(build_model(9)), rtol=0, atol=1e-7, msg=str(method))


def test_reset_refuses_weights_that_differ() -> None:
    def loop(worker: laconic.Worker) -> None:
        train(worker, 3)
        if worker.rank != 1:
            load_best(worker)
        worker.reset()

    expected = "ValueError in step 3: reset() needs the same parameters on all ranks, and those of rank 1 differ"
    for method, texts in on_all_ranks([laconic.Divisible(8, 3), laconic.A2CiD2(), Silent()], loop):
        assert all(text.startswith(expected) for text in texts), (method, texts)


def test_changes_between_steps_are_warned_of_where_gossip_would_mix_them() -> None:
    def loading(worker: laconic.Worker) -> None:
        train(worker, 3)
        load_best(worker)
        train(worker, 3)

    def resetting(worker: laconic.Worker) -> None:
        train(worker, 3)
        load_best(worker)
        worker.reset()
        train(worker, 3)

    def in_a_hook(worker: laconic.Worker) -> None:
        def clamp(*_: object) -> None:
            with torch.no_grad():
                for p in worker.parameters:
                    p.clamp_(-0.1, 0.1)

        worker.optimizer.register_step_post_hook(clamp)
        train(worker, 4)

    def in_consensus(worker: laconic.Worker) -> None:
        train(worker, 3)
        with worker.consensus():
            load_best(worker)
        train(worker, 3)

    gossip = laconic.A2CiD2()
    for _, texts in on_all_ranks([gossip], loading):
        for text in texts:
            assert "parameters were changed outside optimizer.step() after step 3, and with A2CiD2 exchanges" in text
            assert "call worker.reset()" in text
    for loop in (resetting, in_a_hook, in_consensus):
        for _, texts in on_all_ranks([gossip], loop):
            assert texts == ["nothing"] * 3, loop.__name__
    for method, texts in on_all_ranks([laconic.AllReduce(), laconic.Divisible(8, 3), laconic.LocalSGD(3)], loading):
        assert texts == ["nothing"] * 3, (method, texts)


# Parameters that are not in the optimizer


def test_parameters_outside_the_optimizer_are_warned_of() -> None:
    model = build_model()
    with pytest.warns(UserWarning, match=r"parameters '2.weight', '2.bias' of the model require gradients and are not"):
        laconic.Worker(model, torch.optim.SGD(model[0].parameters(), lr=0.1), Silent())


def test_a_second_optimizer_raises() -> None:
    def loop(worker: laconic.Worker) -> None:
        other = torch.optim.SGD(worker.model[2].parameters(), lr=0.1)  # type: ignore[index]
        for step in range(3):
            loss(worker.model, worker.rank, step).backward()
            worker.optimizer.step()
            other.step()

    first_layer = lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1)  # noqa: E731
    for method, texts in on_all_ranks([laconic.AllReduce(), laconic.A2CiD2()], loop, first_layer):
        for text in texts:
            assert "'2.weight', '2.bias' of the model: something has changed them before step 2" in text, method


def test_a_worker_for_each_optimizer_trains_both() -> None:
    def run() -> tuple[Tensor, Tensor]:
        model = build_model()
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
        with (
            laconic.Worker(model[0], optimizers[0], laconic.AllReduce()) as first,
            laconic.Worker(model[2], optimizers[1], laconic.AllReduce()) as second,
        ):
            for step in range(3):
                loss(model, first.rank, step).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        return flat(model), torch.cat([first.x, second.x])

    results = laconic.spawn(run, 2)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(*results[0])
    assert not torch.equal(results[0][0], flat(build_model()))


# average_()


def test_average_over_all_ranks_in_place() -> None:
    def run() -> list[Tensor]:
        with worker_of(build_model()) as worker:
            ema = [p.detach().double() + worker.rank for p in worker.parameters]
            single = torch.tensor(float(worker.rank))
            masked = torch.tensor([-torch.inf, worker.rank + 1.0])
            worker.average_([*ema, masked])
            worker.average_(single)
            with worker.consensus():
                worker.average_(ema)
            worker.average_([])
        return [single, masked, torch.cat([e.reshape(-1) for e in ema])]

    for single, masked, ema in laconic.spawn(run, 3):
        assert single.item() == 1.0
        assert masked.tolist() == [-torch.inf, 2.0]
        torch.testing.assert_close(ema, flat(build_model()).double() + 1)


def test_average_counts_only_ranks_that_train() -> None:
    def run() -> float:
        model = build_model()
        optimizer = adam(model)
        with laconic.Worker(model, optimizer, laconic.EfficientAdam(server=1, dedicated=True)) as worker:
            if worker.rank == 1:
                worker.serve()
            else:
                train_step(model, optimizer, worker.rank, 0)
            metric = torch.tensor([0.5, 99.0, 0.7])[worker.rank]
            worker.average_(metric)
        return metric.item()

    assert laconic.spawn(run, 3) == [pytest.approx(0.6)] * 3


def test_average_inside_agreed_meets_a_dedicated_server() -> None:
    def run() -> float:
        model = build_model()
        optimizer = adam(model)
        method = laconic.EfficientAdam(server=1, dedicated=True)
        with laconic.Worker(model, optimizer, method, timeout=30) as worker:
            for step in range(2):
                if worker.rank == 1:
                    worker.serve()
                else:
                    train_step(model, optimizer, worker.rank, step)
                with worker.agreed():
                    metric = torch.tensor([0.5, 99.0, 0.7])[worker.rank]
                    worker.average_(metric)
        return metric.item()

    assert laconic.spawn(run, 3) == [pytest.approx(0.6)] * 3


def test_average_refuses_what_has_no_mean() -> None:
    def other_shape(worker: laconic.Worker) -> None:
        worker.average_(torch.zeros(2 + (worker.rank == 2)))

    def integers(worker: laconic.Worker) -> None:
        worker.average_([torch.zeros(2), torch.zeros(1, dtype=torch.int64)])

    for _, texts in on_all_ranks([Silent()], other_shape):
        assert len(set(texts)) == 1
        assert "not ['(2,) torch.float32'] on rank 0 and ['(3,) torch.float32'] on rank 2" in texts[0]
    for _, texts in on_all_ranks([Silent()], integers):
        assert all("takes tensors of a floating dtype, not (1,) torch.int64, on rank 0" in text for text in texts)


# The meter


def test_counts_of_all_steps_add_up_to_the_total() -> None:
    """Also with exchanges in the background, between the steps."""

    def run() -> tuple[int, int]:
        model = build_model()
        optimizer = sgd(model)
        seen = 0
        with laconic.Worker(model, optimizer, laconic.A2CiD2(rate=1.0, slack=2)) as worker:
            for step in range(30):
                train_step(model, optimizer, rank(), step)
                seen += worker.meter.last_step.nbytes()
                with worker.consensus():  # leaves time for exchanges between the steps
                    pass
            return seen + worker.meter.current_step.nbytes(), worker.meter.total.nbytes()

    for seen, total in laconic.spawn(run, 2):
        assert 0 < seen <= total
        assert total - seen <= 2 * 4 * 83 + 64, "an exchange may end between the two readings"
