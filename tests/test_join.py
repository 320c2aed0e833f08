"""Ranks that run out of data at different steps: `worker.join()` and `worker.shard()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.compress import Identity, Uniform
from laconic.methods.divisible.pieces import foreground_block, next_piece, overlap
from tests.helpers import Optimize, Silent, adam, batch, build_model, flat, loss, sgd, train_step

BATCHES = (100, 90, 37)
METHODS: list[laconic.Method] = [
    laconic.AllReduce(),
    laconic.QSGD(),
    laconic.EfficientAdam(moments="averaged", moments_every=7),
    laconic.LocalSGD(8),
    laconic.LocalSGD(4),  # a divisor of 100
    laconic.LocalSGD(3, compressor=Uniform(4), moments="averaged"),
    laconic.DiLoCo(4),
    laconic.DiLoCo(7, fragments=3, delay=2, compressor=Uniform(4), moments="averaged"),
    laconic.ADPSGD(initial_period=2, warmup=3, calibration=10),
    laconic.ADPSGD(initial_period=2, calibration=4, low=100.0, high=200.0),
    laconic.Divisible(),
    laconic.Divisible(4, 3, background=None),
    laconic.Divisible(4, 3, hops=2, delay=2),
    laconic.Divisible(4, 3, corrected=True),
    laconic.Divisible(8, None),
    laconic.A2CiD2(),
]


def train_unevenly(method: laconic.Method, optimize: Optimize) -> tuple[Tensor, int, Tensor]:
    """Returns x after the join() block, `worker.step` there, and the model at the end."""
    model = build_model()
    optimizer = optimize(model)
    with laconic.Worker(model, optimizer, method, timeout=60) as worker:
        with worker.join():
            for step in range(BATCHES[worker.rank]):
                train_step(model, optimizer, worker.rank, step)
        x, step = worker.x.clone(), worker.step
    return x, step, flat(model)


def test_ranks_run_out_of_data_with_every_method() -> None:
    def run() -> list[tuple[Tensor, int, Tensor]]:
        return [train_unevenly(method, adam) for method in METHODS]

    start = flat(build_model())
    before, _ = losses(start)
    for method, *ranks in zip(METHODS, *laconic.spawn(run, 3), strict=True):
        ends = [end for _, _, end in ranks]
        assert all(torch.equal(ends[0], end) for end in ends), method
        if isinstance(method, laconic.A2CiD2):
            continue
        assert len({step for _, step, _ in ranks}) == 1, (method, "all ranks are at the same step")
        assert ranks[0][1] >= 100, method
        if not (isinstance(method, laconic.Divisible) or (isinstance(method, laconic.DiLoCo) and method.delay)):
            assert all(torch.equal(ranks[0][0], x) for x, _, _ in ranks), (method, "x is the same after the block")
        after, _ = losses(ends[0])
        assert after < 0.6 * before, (method, "the workers have learned")


def losses(x: Tensor) -> tuple[float, nn.Module]:
    model = build_model()
    nn.utils.vector_to_parameters(x, model.parameters())
    with torch.no_grad():
        return sum(float(loss(model, worker, 5000 + step)) for worker in range(3) for step in range(5)), model


def replicas(optimize: Optimize) -> tuple[list[nn.Sequential], list[torch.optim.Optimizer]]:
    models = [build_model() for _ in BATCHES]
    return models, [optimize(model) for model in models]


def gradients_of(model: nn.Module, worker: int, step: int) -> list[Tensor]:
    return list(torch.autograd.grad(loss(model, worker, step), list(model.parameters())))


def allreduce_oracle(optimize: Optimize) -> Tensor:
    """Trains one model on the mean gradient of the workers that still have batches."""
    model = build_model()
    optimizer = optimize(model)
    for step in range(max(BATCHES)):
        active = [worker for worker, n in enumerate(BATCHES) if step < n]
        found = [gradients_of(model, worker, step) for worker in active]
        for parameter, *gradients in zip(model.parameters(), *found, strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
        optimizer.step()
    return flat(model)


def local_sgd_oracle(optimize: Optimize, period: int) -> Tensor:
    """Trains one model for each worker; a round averages those that were trained since the last one."""
    models, optimizers = replicas(optimize)
    trained: set[int] = set()
    for step in range(-(-max(BATCHES) // period) * period):
        for worker, n in enumerate(BATCHES):
            if step < n:
                train_step(models[worker], optimizers[worker], worker, step)
                trained.add(worker)
        if (step + 1) % period == 0:
            mean = torch.stack([flat(models[worker]) for worker in trained]).mean(0)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
            trained = set()
    return flat(models[0])


def efficient_adam_oracle(optimize: Optimize) -> Tensor:
    """As above with a round in each step: without quantization, EfficientAdam averages the models after each step."""
    return local_sgd_oracle(optimize, period=1)


EXACT: list[tuple[laconic.Method, Optimize, Callable[[], Tensor]]] = [
    (laconic.AllReduce(), sgd, lambda: allreduce_oracle(sgd)),
    (laconic.AllReduce(), adam, lambda: allreduce_oracle(adam)),
    (laconic.LocalSGD(8), sgd, lambda: local_sgd_oracle(sgd, 8)),
    (laconic.LocalSGD(7), adam, lambda: local_sgd_oracle(adam, 7)),
    (laconic.DiLoCo(7, outer_lr=1.0, outer_momentum=0.0), adam, lambda: local_sgd_oracle(adam, 7)),
    (laconic.EfficientAdam(Identity(), Identity()), adam, lambda: efficient_adam_oracle(adam)),
]


def test_means_count_only_the_ranks_that_trained() -> None:
    def run() -> list[Tensor]:
        return [train_unevenly(method, optimize)[0] for method, optimize, _ in EXACT]

    for (method, _, oracle), *ranks in zip(EXACT, *laconic.spawn(run, 3), strict=True):
        expected = oracle()
        for x in ranks:
            torch.testing.assert_close(x, expected, rtol=2e-4, atol=2e-5, msg=str(method))


# Divisible, where a rank's moves take a sweep to be sent

SHORT = (12, 9, 3)
NUMEL, RATE, DIVISIBLE = 48, 0.125, laconic.Divisible(8, 4, background=None)


def slope(worker: int) -> Tensor:
    """Returns the gradient of a worker, which is the same in every step."""
    return torch.arange(NUMEL).float() / NUMEL + worker


def move_constantly() -> tuple[Tensor, int]:
    model = nn.ParameterList([torch.zeros(NUMEL)])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with laconic.Worker(model, optimizer, DIVISIBLE, timeout=60) as worker:
        with worker.join():
            for _ in range(SHORT[worker.rank]):
                model[0].grad = slope(worker.rank)
                optimizer.step()
        return worker.x.clone(), worker.step


def test_divisible_averages_the_last_moves_of_a_rank_once() -> None:
    """Gradients do not depend on x here, so the sum of all averages does not depend on when they are applied."""
    period, steps = 4, max(SHORT) + 4 - 1
    x, unsent, flight = torch.zeros(NUMEL), torch.zeros(3, NUMEL), slice(0, 0)
    start = 0
    for step in range(1, steps + 1):
        for worker, n in enumerate(SHORT):
            if step <= n:
                unsent[worker] -= RATE * slope(worker)
        counted = [worker for worker, n in enumerate(SHORT) if min(step, n) > step - period]
        piece = next_piece(start, NUMEL, period)
        block = foreground_block(step, NUMEL, ratio=8)
        for part in [piece] if overlap(block, flight) else [block, piece]:
            average = unsent[counted, part].mean(0)
            x[part] += average
            unsent[counted, part] = 0
        flight, start = piece, piece.stop % NUMEL
    assert not unsent.any()
    for found, step in laconic.spawn(move_constantly, 3):
        assert step == steps
        torch.testing.assert_close(found, x)


# Around the block


def test_ranks_without_any_batch_and_gradients_of_the_user() -> None:
    def run() -> tuple[Tensor, Tensor]:
        model = build_model()
        optimizer = adam(model)
        with laconic.Worker(model, optimizer, laconic.AllReduce(), timeout=60) as worker:
            with worker.join():
                for step in range(5 if worker.rank == 1 else 0):
                    train_step(model, optimizer, worker.rank, step)
            assert all(p.grad is None for p in model.parameters())
            with worker.join():
                for step in range(4):
                    loss(model, worker.rank, step).backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
                for step in range(4, 4 + worker.rank):
                    loss(model, worker.rank, step).backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
            assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
            with worker.consensus():  # compares settings and x of all ranks
                pass
            for step in range(20):  # the watch compares x: Adam's state is the same on all ranks
                train_step(model, optimizer, worker.rank, step)
        return flat(model), optimizer.state[next(model.parameters())]["exp_avg_sq"].clone()

    ranks = laconic.spawn(run, 3)
    for x, v in ranks[1:]:
        assert torch.equal(x, ranks[0][0])
        assert torch.equal(v, ranks[0][1])


def test_a_rank_without_any_batch_has_metrics() -> None:
    def run() -> float:
        model = build_model()
        optimizer = adam(model)
        with laconic.Worker(model, optimizer, laconic.Divisible(4, 3), timeout=60) as worker:
            with worker.join():
                for step in range(5 if worker.rank else 0):
                    train_step(model, optimizer, worker.rank, step)
            found = worker.method.metrics()["stretch"]
            worker.metrics(over="ranks")
        return found

    without, trained, _ = laconic.spawn(run, 3)
    assert without == 1
    assert trained > 1


def test_a_scheduler_catches_up_after_the_block() -> None:
    def run() -> tuple[list[float], Tensor]:
        model = build_model()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        rates = []
        with laconic.Worker(model, optimizer, laconic.ADPSGD(initial_period=2, calibration=2), timeout=60) as worker:
            for _ in range(2):
                with worker.join():
                    for step in range(12 + 9 * worker.rank):
                        train_step(model, optimizer, worker.rank, step)
                        scheduler.step()
                while scheduler.last_epoch < worker.step:
                    scheduler.step()
                rates.append(worker.lr)
        return rates, flat(model)

    ranks = laconic.spawn(run, 3)
    assert all(rates == ranks[0][0] for rates, _ in ranks)
    assert all(torch.equal(x, ranks[0][1]) for _, x in ranks)


def test_what_all_ranks_must_call_is_refused_inside() -> None:
    def run() -> list[str]:
        texts = []
        for call in ("consensus", "save", "average_", "reset", "export"):
            model = build_model()
            try:
                with laconic.Worker(model, sgd(model), laconic.AllReduce(), timeout=60) as worker, worker.join():
                    for step in range(3 + 4 * worker.rank):
                        train_step(model, worker.optimizer, worker.rank, step)
                        if step == 5:
                            use(worker, call)
            except (RuntimeError, laconic.PeerError) as error:
                texts.append(f"{type(error).__name__}: {error}")
        return texts

    for number, texts in enumerate(laconic.spawn(run, 2)):
        assert len(texts) == 5
        for text in texts:
            assert "at step 6 needs all ranks, and inside join() those that have run out of data would not come" in text
            assert text.startswith("PeerError" if number == 0 else "RuntimeError"), text


def use(worker: laconic.Worker, call: str) -> None:
    if call == "consensus":
        with worker.consensus():
            pass
    else:
        arguments: dict[str, list[Any]] = {"save": ["/tmp/never-written"], "average_": [torch.ones(1)], "reset": []}
        getattr(worker, call)(*arguments.get(call, ["/tmp/never-written.pt"]))


def test_methods_that_cannot_are_refused() -> None:
    def run() -> list[str]:
        texts = []
        for method in (Silent(), laconic.A2CiD2(background=False), laconic.EfficientAdam(server=0, dedicated=True)):
            model = build_model()
            try:
                with laconic.Worker(model, sgd(model), method, timeout=60) as worker, worker.join():
                    pass
            except (NotImplementedError, ValueError, laconic.PeerError) as error:
                texts.append(str(error))
        model = build_model()
        try:
            with laconic.Worker(model, sgd(model), laconic.LocalSGD(8), timeout=60) as worker:
                for step in range(worker.rank):
                    train_step(model, worker.optimizer, worker.rank, step)
                with worker.join():
                    pass
        except ValueError as error:
            texts.append(str(error))
        return texts

    for texts in laconic.spawn(run, 2):
        assert "Silent does not support join(): give all ranks the same number of steps" in texts[0]
        assert "A2CiD2 does not support join()" in texts[1]
        assert "join() needs data on every rank" in texts[2]
        assert "all ranks must enter join() after the same number of steps, not [0, 1]" in texts[3]


def test_a_rank_that_does_not_enter_is_named() -> None:
    def run() -> str:
        model = build_model()
        try:
            with laconic.Worker(model, sgd(model), laconic.AllReduce(), timeout=60) as worker:
                if worker.rank == 0:
                    with worker.join():
                        pass
                train_step(model, worker.optimizer, worker.rank, 0)
        except laconic.PeerError as error:
            return str(error)
        return ""

    for text in laconic.spawn(run, 2):
        assert "rank 0 has been at join() since its step 0" in text


def test_an_error_inside_the_block_is_not_hidden() -> None:
    model = build_model()
    with laconic.Worker(model, sgd(model), laconic.AllReduce()) as worker:
        with pytest.raises(KeyError), worker.join():
            raise KeyError
        with worker.join():
            train_step(model, worker.optimizer, 0, 0)


# Parts of a dataset


def test_each_rank_has_its_part_of_a_dataset() -> None:
    def run() -> list[list[int]]:
        model, data = build_model(), torch.utils.data.TensorDataset(batch(0, 0)[0])
        with laconic.Worker(model, sgd(model), laconic.AllReduce()) as worker:
            parts = [list(worker.shard(data, shuffle=False)), list(worker.shard(data, seed=5, drop_last=True))]
        method = laconic.EfficientAdam(server=0, dedicated=True)
        with laconic.Worker(model, sgd(model), method) as worker:
            if worker.rank == 0:
                with pytest.raises(RuntimeError, match="rank 0 is a server without data"):
                    worker.shard(data)
            else:
                parts.append(list(worker.shard(data, shuffle=False)))
        return parts

    first, second = laconic.spawn(run, 2)
    assert first[0] == [0, 2, 4, 6]
    assert second[0] == [1, 3, 5, 7]
    assert sorted(first[1] + second[1]) == list(range(8))
    assert first[1] != first[0]
    assert second[2] == list(range(8))
