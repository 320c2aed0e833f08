"""DiLoCo against a plain loop, its bytes, its residuals, and its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.compress import Compressor, Identity, Sign, TopK, Uniform
from tests.helpers import OPTIMIZERS, build_model, sgd, train, train_step
from tests.oracles.diloco import diloco

WORKERS, STEPS = 3, 23
# A method, the steps of a period in which its fragments are sent, and the α it mixes with.
MODES: list[tuple[laconic.DiLoCo, list[int], float | Literal["steps"]]] = [
    (laconic.DiLoCo(period=4), [4], 0.0),
    (laconic.DiLoCo(period=5, outer_lr=0.5, outer_momentum=0.0, mixing=0.25), [5], 0.25),
    (laconic.DiLoCo(period=4, outer_lr=0.4, fragments=3), [2, 3, 4], 0.0),
    (laconic.DiLoCo(period=6, outer_lr=0.4, fragments=2, delay=5), [4, 1], 0.5),
    (laconic.DiLoCo(period=3, outer_lr=0.4, fragments=3, delay=2, mixing=0.0), [2, 3, 1], 0.0),
    (laconic.DiLoCo(period=6, outer_lr=0.4, fragments=2, delay=5, mixing="steps"), [4, 1], "steps"),
    (laconic.DiLoCo(4, 1.5, 0.0, 2, 1, "steps", compressor=TopK(0.2), decay=0.8), [1, 3], "steps"),
    (laconic.DiLoCo(3, 0.7, 0.5, 1, 0, "steps", compressor=Uniform(3), hops=1), [3], 0.0),
]


def test_agrees_with_the_oracle() -> None:
    runs = [(method, name) for method, *_ in MODES for name in OPTIMIZERS]

    def run() -> list[list[Tensor]]:
        return [train(method, OPTIMIZERS[name], STEPS) for method, name in runs]

    by_rank = laconic.spawn(run, WORKERS)
    for number, (method, name) in enumerate(runs):
        _, sent_at, mixing = MODES[number // len(OPTIMIZERS)]
        settings = method.period, method.outer_lr, method.outer_momentum, sent_at, method.delay, mixing
        expected = diloco(OPTIMIZERS[name], WORKERS, STEPS, *settings, method.compressor, method.decay)
        for step in range(STEPS):
            for worker in range(WORKERS):
                torch.testing.assert_close(by_rank[worker][number][step], expected[step][worker], rtol=1e-4, atol=1e-5)


def test_without_momentum_and_with_a_rate_of_1_it_is_local_sgd() -> None:
    plain = laconic.spawn(train, WORKERS, laconic.DiLoCo(4, outer_lr=1.0, outer_momentum=0.0), sgd, STEPS)
    local = laconic.spawn(train, WORKERS, laconic.LocalSGD(4), sgd, STEPS)
    for mine, other in zip(plain, local, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_identity_is_the_uncompressed_method() -> None:
    settings: dict[str, Any] = {"period": 4, "fragments": 2, "delay": 3}
    coded = laconic.spawn(train, WORKERS, laconic.DiLoCo(**settings, compressor=Identity()), sgd, STEPS)
    plain = laconic.spawn(train, WORKERS, laconic.DiLoCo(**settings), sgd, STEPS)
    for mine, other in zip(coded, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def residuals_of(compressor: Compressor, hops: Literal[1, 2]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Trains with constant gradients; returns θ, the sum of the local steps, and both residuals."""
    d = 301
    torch.manual_seed(0)
    model = nn.Linear(d, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = laconic.DiLoCo(2, outer_lr=1.0, outer_momentum=0.0, fragments=2, compressor=compressor, hops=hops)
    with laconic.Worker(model, optimizer, method) as worker:
        moved = torch.zeros(d, dtype=torch.float64)
        for step in range(6):
            generator = torch.Generator().manual_seed(50 * step + worker.rank)
            gradient = torch.randn(d, generator=generator) + torch.linspace(-1, 1, d)
            # The first fragment is sent in odd steps, so its last local step is not in θ.
            counts = torch.arange(d) >= d // 2 if step == 5 else torch.ones(d)
            moved -= 0.1 * gradient.double() * counts
            model.weight.grad = gradient.view(1, d)
            optimizer.step()
        found = worker.method
        assert isinstance(found, laconic.DiLoCo)
        assert found.residual is not None
        whole = torch.zeros(d)
        if hops == 1:
            assert found.owner_residual is None
            return found.theta.clone(), moved, found.residual.clone(), whole
        assert found.owner_residual is not None
        start = 0
        for part in found._owned(worker.rank, WORKERS):
            whole[part.start : part.stop] = found.owner_residual[start : start + part.numel]
            start += part.numel
        assert start == found.owner_residual.numel()
        return found.theta.clone(), moved, found.residual.clone(), whole


def test_only_the_residuals_are_missing_and_theta_is_the_same_everywhere() -> None:
    """θ − mean(residuals) − residuals of the mean = θ₀ + Σ mean(local steps), with a plain outer step."""
    compressors = [Uniform(4), Sign(block=64), TopK(0.1), Uniform(2, stochastic=True)]
    modes: list[tuple[Compressor, Literal[1, 2]]] = [*((one, 2) for one in compressors), (TopK(0.1, bits=1), 1)]
    by_rank = laconic.spawn(lambda: [residuals_of(*mode) for mode in modes], WORKERS)
    torch.manual_seed(0)
    start = nn.Linear(301, 1, bias=False).weight.detach().flatten().double()
    for compressor, *ranks in zip(modes, *by_rank, strict=True):
        theta = ranks[0][0]
        assert all(torch.equal(theta, one[0]) for one in ranks), compressor
        expected = start + torch.stack([moved for _, moved, *_ in ranks]).mean(0)
        missing = torch.stack([residual for _, _, residual, _ in ranks]).double().mean(0)
        missing += torch.stack([owner for *_, owner in ranks]).double().sum(0)
        torch.testing.assert_close(theta.double() - missing, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(theta.double(), expected, rtol=1e-5, atol=1e-5), "it does compress"


def test_payload_is_the_formula() -> None:
    methods = [
        laconic.DiLoCo(4),
        laconic.DiLoCo(4, moments="averaged"),
        laconic.DiLoCo(4, fragments=2, delay=1),  # sends in the odd steps
        laconic.DiLoCo(4, compressor=Uniform(4)),
        laconic.DiLoCo(4, fragments=2, delay=3, compressor=Uniform(4)),
        laconic.DiLoCo(4, compressor=TopK(0.1, bits=1)),
    ]

    def run() -> list[int]:
        found = []
        for method in methods:
            model = build_model()
            optimizer = sgd(model)
            with laconic.Worker(model, optimizer, method) as worker:
                for step in range(15):
                    train_step(model, optimizer, worker.rank, step)
                found.append(sum(worker.meter.total.nbytes(name) for name in ("foreground", "background")))
        return found

    n, rounds = 3, 3
    d = sum(p.numel() for p in build_model().parameters())
    ring = 2 * (n - 1) / n
    plain, averaged, streaming, coded, coded_streaming, sparse = zip(*laconic.spawn(run, n), strict=True)
    assert plain == (pytest.approx(rounds * ring * 4 * d, abs=rounds * n),) * n
    assert averaged == (pytest.approx(rounds * ring * 8 * d, abs=2 * rounds * n),) * n
    assert streaming == (pytest.approx(4 * ring * 4 * d, abs=8 * n),) * n
    parts = [Uniform(4).nbytes(part) for part in (0, 0, d)]  # one block: the last rank owns all of it
    assert coded == tuple(rounds * (sum(parts) - own + (n - 1) * own) for own in parts)
    halves = [Uniform(4).nbytes(half) for half in (d // 2, d - d // 2)]
    # Sent in steps 3, 7, 11, 15 and in 1, 5, 9, 13; answered two steps later.
    sent, answered = [4, 4], [3, 4]  # how often each fragment was sent, and answered by its owner, rank 2
    up = sum(times * half for times, half in zip(sent, halves, strict=True))
    down = (n - 1) * sum(times * half for times, half in zip(answered, halves, strict=True))
    assert coded_streaming == (up, up, down)
    assert sparse == (rounds * (n - 1) * TopK(0.1, bits=1).nbytes(d),) * n, "one hop"


def test_a_fragment_in_flight_is_applied_for_another_number_of_workers(tmp_path: Path) -> None:
    """Saved before its owners have answered (step 3), after that (8), both at once (5), and in fp32."""
    methods = [
        laconic.DiLoCo(6, fragments=2, delay=4, compressor=Uniform(3)),
        laconic.DiLoCo(6, fragments=2, delay=4),
        laconic.DiLoCo(6, fragments=2, delay=4, mixing="steps", compressor=TopK(0.2), decay=0.9),
        laconic.DiLoCo(6, fragments=2, delay=4, mixing="steps", compressor=Uniform(4), decay=0.9),
    ]

    def save() -> list[tuple[Tensor, Tensor]]:
        ends = []
        for number, method in enumerate(methods):
            for step in (3, 5, 8):
                model = build_model()
                optimizer = sgd(model)
                with laconic.Worker(model, optimizer, method) as worker:
                    for i in range(step):
                        train_step(model, optimizer, worker.rank, i)
                    worker.save(tmp_path / f"{number}-{step}")
                assert isinstance(worker.method, laconic.DiLoCo)
                ends.append((worker.x.clone(), worker.method.theta.clone()))
        return ends

    def load() -> list[tuple[Tensor, Tensor]]:
        starts = []
        for number, method in enumerate(methods):
            for step in (3, 5, 8):
                model = build_model()
                with laconic.Worker(model, sgd(model), method) as worker:
                    worker.load(tmp_path / f"{number}-{step}")
                    assert isinstance(worker.method, laconic.DiLoCo)
                    starts.append((worker.x.clone(), worker.method.theta.clone()))
        return starts

    saved, loaded = laconic.spawn(save, 3), laconic.spawn(load, 2)
    for ends, starts in zip(saved[0], loaded[1], strict=True):
        torch.testing.assert_close(starts[0], ends[0])
        assert torch.equal(starts[1], ends[1])


def test_to_one_worker_and_back(tmp_path: Path) -> None:
    """One worker alone makes no outer steps, so those that follow begin where it has arrived."""
    method = laconic.DiLoCo(4, fragments=2, delay=2, compressor=Uniform(4))

    def go_on(steps: int, folder: str) -> tuple[Tensor, Tensor, Tensor]:
        model = build_model()
        optimizer = sgd(model)
        with laconic.Worker(model, optimizer, method) as worker:
            if steps > 6:
                worker.load(tmp_path / folder)
            start = worker.x.clone()
            while worker.step < steps:
                train_step(model, optimizer, worker.rank, worker.step)
            worker.save(tmp_path / folder)
        assert isinstance(worker.method, laconic.DiLoCo)
        return start, worker.x.clone(), worker.method.theta.clone()

    _, end, _ = laconic.spawn(go_on, 2, 6, "saved")[0]
    start, alone, _ = go_on(12, "saved")
    torch.testing.assert_close(start, end)
    start, end, theta = laconic.spawn(go_on, 2, 18, "saved")[0]
    torch.testing.assert_close(start, alone)
    assert (theta - alone).norm() < 3 * (end - alone).norm() + 1e-3


def test_nan_on_one_rank_raises_on_all_and_names_it() -> None:
    def run() -> str:
        model = build_model()
        optimizer = sgd(model)
        try:
            with laconic.Worker(model, optimizer, laconic.DiLoCo(4, delay=1, compressor=Uniform(4))) as worker:
                for step in range(6):
                    if worker.rank == 1:
                        worker.x[3] = float("nan")
                    train_step(model, optimizer, worker.rank, step)
        except FloatingPointError as error:
            return str(error)
        return "no error"

    for message in laconic.spawn(run, 3):
        assert message.startswith("NaN or infinity in the pseudo-gradient of rank 1 at step 3: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"period": 0}, "period must be a whole number, at least 1, not 0"),
        ({"outer_lr": 0.0}, "outer_lr must be a finite number above 0, not 0.0"),
        ({"outer_momentum": 1.5}, "outer_momentum must be a finite number at least 0 and at most 1, not 1.5"),
        ({"period": 4, "fragments": 5}, "fragments must be at most period=4, one in a step, not 5"),
        ({"period": 4, "delay": 4}, "delay must be less than period=4, not 4"),
        ({"delay": -1}, "delay must be a whole number, at least 0, not -1"),
        ({"mixing": 2.0}, r'mixing \(or "steps"\) must be a finite number at least 0 and at most 1, not 2.0'),
        ({"mixing": "step"}, r'mixing \(or "steps"\) must be a finite number'),
        ({"hops": 3, "compressor": Sign()}, "hops must be one of 1, 2, None, not 3"),
        ({"hops": 1}, "hops=1 is for quantized messages, and compressor=None sends fp32: leave it out"),
        ({"decay": 0.5}, "decay=0.5 is for quantized messages, and compressor=None sends fp32: leave it out"),
        ({"decay": 1.5, "compressor": Sign()}, "decay must be a finite number at least 0 and at most 1, not 1.5"),
        ({"moments": "global"}, "moments must be one of local, averaged, not 'global'"),
        ({"compressor": 4}, r"compressor must be None or a compressor such as Uniform\(4\), not 4"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        laconic.DiLoCo(**settings)


def test_more_fragments_than_entries() -> None:
    model = nn.Linear(2, 1, bias=False)
    with pytest.raises(ValueError, match="fragments must be at most the number of trained entries, 2, not 3"):
        laconic.Worker(model, sgd(model), laconic.DiLoCo(fragments=3))
