"""Efficient-Adam over real processes: the oracle, the invariants, and both arrangements of the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.comm import coder
from laconic.compress import (
    Compressor,
    Half,
    Identity,
    Log,
    Sign,
    TopK,
    Uniform,
    encode_with_feedback,
)
from tests.helpers import adam, train_step
from tests.oracles.efficient_adam import efficient_adam as oracle
from tests.oracles.efficient_adam import efficient_adam_ahead

BLOCK = 64
LOG = Log(3, block=BLOCK)
QUANTIZED = laconic.EfficientAdam(up=LOG, down=LOG, chunk=300)
COMPRESSORS: list[Compressor] = [
    Identity(),
    Half(),
    LOG,
    Sign(block=BLOCK),
    Uniform(4, block=BLOCK),
    Uniform(4, stochastic=True, block=BLOCK),
    TopK(0.2),
]


def build_model() -> nn.Module:
    """542 parameters: 9 blocks, the last one short, in two chunks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 2))


def d() -> int:
    return sum(p.numel() for p in build_model().parameters())


def arrangements(method: laconic.EfficientAdam, size: int) -> list[laconic.EfficientAdam]:
    return [method, replace(method, server=0), replace(method, server=size - 1)]


@contextmanager
def working(method: laconic.EfficientAdam) -> Iterator[laconic.Worker]:
    model = build_model()
    with laconic.Worker(model, adam(model), method) as worker:
        yield worker


def train(worker: laconic.Worker, steps: int, data: int | None = None) -> list[Tensor]:
    """Returns x after every step; nothing on a dedicated server."""
    if not worker.method.trains(worker.rank):
        worker.serve()
        return []
    path = []
    for _ in range(steps):
        train_step(worker.model, worker.optimizer, worker.rank if data is None else data, worker.step)
        path.append(worker.x.clone())
    return path


def run_all(methods: list[laconic.EfficientAdam], steps: int, data: int | None = None) -> list[list[Tensor]]:
    """Returns the path of each method, trained one after another in the same processes."""
    paths = []
    for method in methods:
        with working(method) as worker:
            paths.append(train(worker, steps, data))
    return paths


def round_trip(compressor: Compressor) -> Any:
    return lambda x: compressor.decode(compressor.encode(x), x.numel())


def assert_same_paths(paths: list[list[Tensor]]) -> None:
    for path in paths:
        assert len(path) == len(paths[0])
        assert all(torch.equal(x, y) for x, y in zip(path, paths[0], strict=True))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_both_arrangements_are_the_oracle_for_200_steps(size: int) -> None:
    ranks = laconic.spawn(run_all, size, arrangements(QUANTIZED, size)[:2], 200)
    assert_same_paths([path for paths in ranks for path in paths])
    expected = oracle(build_model, adam, list(range(size)), 200, round_trip(LOG), round_trip(LOG))
    for x, y in zip(ranks[0][0], expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_with_a_delay_it_is_the_oracle_and_all_end_equal(delay: int) -> None:
    size, steps = 3, 60

    def run() -> list[tuple[list[Tensor], Tensor]]:
        results = []
        for method in arrangements(replace(QUANTIZED, delay=delay), size)[:2]:
            with working(method) as worker:
                path = train(worker, steps)
                assert worker.meter.total.calls("background", "all_to_all")
            results.append((path, worker.x.clone()))
        return results

    ranks = laconic.spawn(run, size)
    expected, end = efficient_adam_ahead(
        build_model, adam, list(range(size)), steps, round_trip(LOG), round_trip(LOG), delay
    )
    for rank, results in enumerate(ranks):
        for path, x in results:
            assert torch.equal(x, ranks[0][0][1]), "the same bits on all ranks, after everything in flight"
            torch.testing.assert_close(x, end, rtol=1e-5, atol=1e-6)
            for mine, xs in zip(path, expected, strict=True):
                torch.testing.assert_close(mine, xs[rank], rtol=1e-5, atol=1e-6)
    assert not torch.equal(ranks[0][0][0][-1], ranks[1][0][0][-1]), "each is ahead by its local steps"


def test_neither_the_server_s_rank_nor_the_chunks_change_the_result() -> None:
    methods = [*arrangements(QUANTIZED, 3), *(replace(QUANTIZED, chunk=chunk) for chunk in (64, 100, 10**6))]
    ranks = laconic.spawn(run_all, 3, methods, 10)
    assert_same_paths([path for paths in ranks for path in paths])


def test_a_dedicated_server_is_the_same_as_none() -> None:
    """Compares two workers and a dedicated server, on any rank, with two workers and no server."""
    dedicated = [replace(QUANTIZED, server=rank, dedicated=True, exact_below=61) for rank in range(3)]

    def serve_and_train() -> list[list[Tensor]]:
        paths = []
        for method in dedicated:
            assert isinstance(method.server, int)
            with working(method) as worker:
                paths.append(train(worker, 20, data=worker.rank - (worker.rank > method.server)))
        return paths

    alone = laconic.spawn(run_all, 2, [replace(QUANTIZED, exact_below=61)], 20)[0]
    with_server = laconic.spawn(serve_and_train, 3)
    assert_same_paths([*alone, *(path for paths in with_server for path in paths if path)])


class Recorded(torch.optim.Adam):
    """Sums the local steps. (A hook would see x after the method has replaced them by their mean.)"""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=1e-2)
        self.total = torch.zeros(d(), dtype=torch.float64)

    def step(self, closure: Any = None) -> Any:
        before = self.x()
        loss = super().step(closure)
        self.total += self.x() - before
        return loss

    def x(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.param_groups[0]["params"]]).double()


def conservation(method: laconic.EfficientAdam, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns x₀ + Σ u_i, x, e_i and e_server of this rank after some steps, all in fp64 and in the order of x."""
    model = build_model()
    optimizer = Recorded(model)
    with laconic.Worker(model, optimizer, method) as worker:
        start = worker.x.double()
        train(worker, steps)
        total = start + optimizer.total
        method = worker.method  # type: ignore[assignment]
        method.drain(worker)
        e, e_server = torch.zeros(d()), torch.zeros(d())
        in_order = torch.cat([torch.arange(d())[segment] for segment in method._segments])
        e[in_order] = method.e
        parts = [part for chunk in method._chunks for part in chunk.mean.parts if part.owner == worker.rank]
        served = [in_order[part.start : part.stop] for part in parts]
        e_server[torch.cat([in_order[:0], *served])] = method.e_server
        return total, worker.x.double(), e.double(), e_server.double()


def lost(results: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> float:
    """Returns the largest entry of x + e_server + mean(e_i) − (x₀ + Σ mean(u_i)): steps lost or applied twice."""
    total = torch.stack([r[0] for r in results]).mean(0)
    e = torch.stack([r[2] for r in results]).mean(0)
    e_server = torch.stack([r[3] for r in results]).sum(0)
    return float((results[0][1] + e_server + e - total).abs().max())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_nothing_is_lost_and_all_are_equal_with_every_compressor(size: int) -> None:
    methods = [
        method
        for compressor in COMPRESSORS
        for method in arrangements(replace(QUANTIZED, up=compressor, down=compressor, exact_below=61), size)[:2]
    ]
    methods += arrangements(replace(QUANTIZED, exact_below=61, delay=2), size)[:2]
    ranks = laconic.spawn(lambda: [conservation(method, 25) for method in methods], size)
    for i, method in enumerate(methods):
        results = [rank[i] for rank in ranks]
        assert all(torch.equal(x, results[0][1]) for _, x, _, _ in results), method
        assert lost(results) < 2e-6, method
        assert all(torch.isfinite(e).all() and e.abs().max() < 1.0 for _, _, e, _ in results), method
    for i in range(0, len(methods), 2):  # sharded, and with a parameter server
        assert torch.equal(ranks[0][i][1], ranks[0][i + 1][1]), methods[i]


@pytest.mark.parametrize("at", ["worker", "server"])
def test_feedback_that_counts_the_residual_twice_is_caught(at: str) -> None:
    def mutant(compressor: Compressor, x: Tensor, residual: Tensor, **rest: Any) -> Tensor:
        p, before = x + residual, residual.clone()
        code = encode_with_feedback(compressor, x, residual, **rest)
        if (compressor == LOG) == (at == "worker"):
            residual.copy_(before + (p - compressor.decode(code, x.numel())))
        return code

    def run() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pytest.MonkeyPatch().setattr(coder, "encode_with_feedback", mutant)
        return conservation(replace(QUANTIZED, down=Log(4, block=BLOCK)), 5)

    assert lost(laconic.spawn(run, 2)) > 1e-4


@pytest.mark.parametrize("size", [2, 4])  # of three, the mean of equals may be off by a rounding
def test_identical_workers_are_one(size: int) -> None:
    path = laconic.spawn(run_all, size, [QUANTIZED], 30, 0)[0][0]
    expected = oracle(build_model, adam, [0], 30, round_trip(LOG), round_trip(LOG))
    for x, y in zip(path, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_without_quantization_it_is_the_mean_of_the_local_steps() -> None:
    exactly = [
        laconic.EfficientAdam(up=Identity(), down=Identity()),
        laconic.EfficientAdam(up=LOG, down=LOG, exact_below=10**6),
    ]
    ranks = laconic.spawn(run_all, 2, exactly, 20)
    assert_same_paths([path for paths in ranks for path in paths])
    for x, y in zip(ranks[0][0], oracle(build_model, adam, [0, 1], 20, lambda x: x, lambda x: x), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_residuals_stay_bounded() -> None:
    def run() -> tuple[float, float]:
        with working(QUANTIZED) as worker:
            largest = []
            for _ in range(10):
                train(worker, 20)
                method: Any = worker.method
                largest.append(max(method.e.abs().max().item(), method.e_server.abs().max().item()))
            return largest[0], max(largest)

    for early, ever in laconic.spawn(run, 2):
        assert ever < 10 * early


@pytest.mark.parametrize("size", [2, 3])
def test_resume_goes_on_bit_for_bit(size: int, tmp_path: Path) -> None:
    methods = [
        *arrangements(replace(QUANTIZED, exact_below=61), size),
        replace(QUANTIZED, server=1, dedicated=True, moments="averaged", moments_every=4),
        replace(QUANTIZED, exact_below=61, delay=1),
        replace(QUANTIZED, server=0, delay=3),
    ]

    def first(folder: Path) -> list[Tensor]:
        ends = []
        for i, method in enumerate(methods):
            with working(method) as worker:
                train(worker, 5)
                worker.save(folder / str(i))
                train(worker, 5)
                ends.append(worker.x.clone())
        return ends

    def second(folder: Path) -> list[Tensor]:
        ends = []
        for i, method in enumerate(methods):
            with working(method) as worker:
                worker.load(folder / str(i))
                saved: Any = worker.method
                assert saved.e.abs().sum() > 0 or not method.trains(worker.rank)
                train(worker, 5)
                ends.append(worker.x.clone())
        return ends

    for ends, resumed in zip(laconic.spawn(first, size, tmp_path), laconic.spawn(second, size, tmp_path), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ends, resumed, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_are_those_of_the_formula(size: int) -> None:
    def run() -> list[int]:
        sent = []
        for method in [*arrangements(QUANTIZED, size)[:2], replace(QUANTIZED, exact_below=61)]:
            with working(method) as worker:
                train(worker, 3)
                sent.append(worker.meter.last_step.nbytes("foreground"))
        return sent

    ranks = laconic.spawn(run, size)
    one_way = -(-d() * 3 // 8) + 4 * -(-d() // BLOCK)
    sharded, with_server, partly_exact = zip(*ranks, strict=True)
    assert sum(sharded) == 2 * (size - 1) * one_way
    assert with_server == ((size - 1) * one_way, *[one_way] * (size - 1))
    small = 60 + 2  # the biases
    large = d() - small
    assert sum(partly_exact) == 2 * (size - 1) * (4 * small + -(-large * 3 // 8) + 4 * -(-large // BLOCK))


def test_no_rank_carries_more_than_another() -> None:
    def run() -> int:
        model = nn.Linear(300, 100)
        optimizer = torch.optim.Adam(model.parameters())
        with laconic.Worker(model, optimizer, laconic.EfficientAdam(up=LOG, down=LOG, chunk=4096)) as worker:
            model(torch.ones(300)).sum().backward()
            optimizer.step()
            return worker.meter.last_step.nbytes("foreground")

    sent = laconic.spawn(run, 3)
    assert max(sent) < 1.02 * min(sent)


@pytest.mark.parametrize("dedicated", [False, True])
def test_averaged_moments_are_the_mean_of_the_workers(dedicated: bool) -> None:
    NAMES = ("exp_avg", "exp_avg_sq")
    server: Any = 0 if dedicated else "sharded"
    method = replace(QUANTIZED, server=server, dedicated=dedicated, moments="averaged", moments_every=3)

    def run() -> list[dict[str, Tensor]]:
        seen = []
        for steps, chosen in [(2, method), (3, method), (3, replace(method, moments="local"))]:
            with working(chosen) as worker:
                train(worker, steps)
                states = list(worker.optimizer.state.values())  # none on the server
                seen.append({name: torch.cat([s[name].flatten() for s in states]) for name in NAMES if states})
        return seen

    ranks = laconic.spawn(run, 3)[1 if dedicated else 0 :]
    for name in NAMES:
        before, averaged, local = ([rank[i][name] for rank in ranks] for i in range(3))
        assert not torch.equal(before[0], before[1])
        assert all(torch.equal(m, averaged[0]) for m in averaged)
        torch.testing.assert_close(averaged[0], torch.stack(local).mean(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("delay", [0, 1])
def test_other_dtypes(dtype: torch.dtype, delay: int) -> None:
    def run() -> Tensor:
        model = build_model().to(dtype)
        with laconic.Worker(model, adam(model), replace(QUANTIZED, exact_below=61, delay=delay)) as worker:
            start = worker.x.clone()
            for _ in range(5):
                x = torch.randn(8, 6, dtype=dtype, generator=torch.Generator().manual_seed(worker.rank))
                model(x).square().sum().backward()
                worker.optimizer.step()
                worker.optimizer.zero_grad()
            assert not torch.equal(worker.x, start)
        return worker.x.clone()

    first, second = laconic.spawn(run, 2)
    assert first.dtype == dtype
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "method",
    [
        QUANTIZED,
        replace(QUANTIZED, server=0),
        replace(QUANTIZED, server=0, dedicated=True),
        laconic.EfficientAdam(up=Identity(), down=Half()),
        replace(QUANTIZED, delay=1),
        replace(QUANTIZED, server=0, dedicated=True, delay=2),
    ],
)
def test_a_gradient_that_is_not_finite_raises_on_all_ranks_and_names_the_rank(method: laconic.EfficientAdam) -> None:
    def run() -> str:
        try:
            with working(method) as worker:
                train(worker, 2)
                if not method.trains(worker.rank):
                    return "the others end the block"  # with a delay, it is there that the error is raised
                for p in worker.model.parameters():
                    p.grad = torch.ones_like(p)
                if worker.rank == 2:
                    next(worker.model.parameters()).grad.view(-1)[-1] = torch.nan  # type: ignore[union-attr]
                worker.optimizer.step()
        except FloatingPointError as error:
            return str(error)
        return "no error"

    for message in laconic.spawn(run, 3):
        assert message.startswith("NaN or infinity in the optimizer step of rank 2 at step 3: ")


@pytest.mark.parametrize("mistake", ["does not serve", "serves twice"])
def test_a_dedicated_server_that_does_not_serve_raises(mistake: str) -> None:
    def run() -> None:
        with working(replace(QUANTIZED, server=0, dedicated=True)) as worker:
            if worker.rank:
                train(worker, 2)
            if not worker.rank and mistake == "serves twice":
                worker.serve()
                worker.serve()

    message = r"call worker.serve\(\) there" if mistake == "does not serve" else r"before the next serve\(\)"
    with pytest.raises(laconic.WorkerFailed, match=message):
        laconic.spawn(run, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"up": "log"}, "up must be a compressor such as Log.* not 'log'"),
        ({"down": None}, "down must be a compressor"),
        ({"server": "shared"}, "'shared'"),
        ({"server": -1}, "-1"),
        ({"server": True}, "True"),
        ({"dedicated": True}, "server must be a rank"),
        ({"dedicated": 1, "server": 0}, "dedicated must be True or False, not 1"),
        ({"exact_below": -1}, "exact_below .* -1"),
        ({"moments": "mean"}, "moments must be one of local, averaged, not 'mean'"),
        ({"moments_every": 0}, "moments_every .* 0"),
        ({"chunk": 0}, "chunk .* 0"),
        ({"delay": -1}, "delay must be a whole number, at least 0, not -1"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        laconic.EfficientAdam(**settings)


@pytest.mark.parametrize(("settings", "message"), [({"server": 1}, "from 0 to 0, not 1"), ({"server": 0}, "only one")])
def test_a_server_must_be_in_the_world(settings: dict[str, Any], message: str) -> None:
    method = laconic.EfficientAdam(**settings, dedicated=True)
    with pytest.raises(ValueError, match=message), working(method):
        pass
