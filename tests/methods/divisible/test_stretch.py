"""The stretch: its bounds, what it estimates, the kernels' bits, and which optimizers and parameters it is for."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from laconic.methods.divisible import stretch as stretch_module
from laconic.methods.divisible import stretch_numba
from laconic.methods.divisible.stretch import Factors, Settings, is_adam, refresh, stretch
from tests.methods.divisible.comms import Mirror

# A `Mirror` stands for workers with equal data, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:the local gradients of all")
SETTINGS = Settings(lr=1.0, beta1=0.9, beta2=0.999, eps=0.0)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def vector(kind: str, numel: int, seed: int) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    scales = {"normal": 1.0, "zeros": 0.0, "tiny": 1e-21, "subnormal": 1e-40, "large": 1e15}
    if kind == "mixed":
        powers = torch.linspace(-40, 18, numel)
        return x * 10**powers * (torch.arange(numel) % 3 > 0)
    return x * scales[kind]


KINDS = st.sampled_from(["normal", "zeros", "tiny", "subnormal", "large", "mixed"])


@given(
    numel=st.integers(1, 200),
    kinds=st.tuples(KINDS, KINDS, KINDS),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999)),
    count=st.integers(1, 3000),
    steps=st.integers(1, 128),
    workers=st.integers(2, 64),
    lr=st.floats(1e-6, 1.0),
    eps=st.sampled_from([0.0, 1e-8, 1e-3]),
)
def test_kernels_give_the_same_bits(
    numel: int,
    kinds: tuple[str, str, str],
    betas: tuple[float, float],
    count: int,
    steps: int,
    workers: int,
    lr: float,
    eps: float,
) -> None:
    factors = Factors.of(Settings(lr, *betas, eps), count, seen=max(1, count // 2), steps=steps, workers=workers)
    m, v, q = (vector(kind, numel, seed) for seed, kind in enumerate(kinds))
    v, q, x = v.square(), q.square(), vector("normal", numel, 3)
    x_numba, q_numba = x.clone(), q.clone()
    refresh(q, m, factors)
    stretch_numba.refresh(q_numba.numpy(), m.numpy(), *factors)
    assert same_bits(q, q_numba)
    stretch(x, m, v, q, factors)
    stretch_numba.stretch(x_numba.numpy(), m.numpy(), v.numpy(), q_numba.numpy(), *factors)
    assert same_bits(x.nan_to_num(), x_numba.nan_to_num())


def rho(v: Tensor, q: Tensor, count: int, workers: int, beta1: float = 0.9) -> Tensor:
    """Returns ρ from how far `stretch` moves x, where Adam's step is −1."""
    x, factors = torch.zeros_like(v), Factors.of(SETTINGS._replace(beta1=beta1), count, count, 1, workers)
    stretch(x, (v * factors.unbias_v).sqrt() / factors.rate, v, q, factors)
    return 1 - x


@given(
    v=st.floats(1e-30, 1e10),
    ratio=st.floats(0, 100),
    count=st.integers(1, 2000),
    workers=st.integers(2, 100),
    beta1=st.floats(0, 0.99),
)
def test_a_step_becomes_at_most_root_n_times_as_long(
    v: float, ratio: float, count: int, workers: int, beta1: float
) -> None:
    vs = torch.tensor([v], dtype=torch.float64)
    found = rho(vs, ratio * vs, count, workers, beta1).item()
    assert 1 - 1e-9 <= found <= workers**0.5 * (1 + 1e-9)


class Moments:
    """Adam's moments and Q of `d` coordinates on one worker; Q is refreshed every `period` steps."""

    def __init__(self, d: int, workers: int, period: int = 4, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.m, self.v, self.q = (torch.zeros(d, dtype=torch.float64) for _ in range(3))
        self.betas, self.workers, self.period, self.count = betas, workers, period, 0

    def add(self, g: Tensor) -> None:
        beta1, beta2 = self.betas
        self.count += 1
        self.m.mul_(beta1).add_(g, alpha=1 - beta1)
        self.v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        if self.count <= self.period or self.count % self.period == 0:
            settings = SETTINGS._replace(beta1=beta1, beta2=beta2)
            refresh(self.q, self.m, Factors.of(settings, self.count, self.count, self.period, self.workers))

    def rho(self) -> Tensor:
        assert self.betas[1] == 0.999
        return rho(self.v, self.q, self.count, self.workers, self.betas[0])


@pytest.mark.parametrize("period", [1, 4, 32])
def test_gradients_that_are_always_the_same_are_not_stretched(period: int) -> None:
    """At any step, also in the first ones."""
    moments = Moments(10, workers=8, period=period)
    g = torch.logspace(-8, 3, 10, dtype=torch.float64)
    for _ in range(100):
        moments.add(g)
        torch.testing.assert_close(moments.rho(), torch.ones_like(g), rtol=0, atol=1e-9)


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_pure_noise_is_stretched_by_root_n(workers: int) -> None:
    moments = Moments(4000, workers)
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        moments.add(torch.randn(4000, generator=generator, dtype=torch.float64))
    assert moments.rho().mean().item() == pytest.approx(workers**0.5, rel=0.08)


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0, 10.0])
def test_the_second_moment_of_the_mean_gradient_is_estimated_within_15_percent(workers: int, noise: float) -> None:
    """Gradients are a signal that changes slowly and is common to all workers, and independent noise."""
    d, generator = 500, torch.Generator().manual_seed(1)

    def normal() -> Tensor:
        return torch.randn(d, generator=generator, dtype=torch.float64)

    own = [Moments(d, workers) for _ in range(workers)]
    of_mean = Moments(d, workers)
    signal = normal()
    for _ in range(600):
        signal = 0.995 * signal + (1 - 0.995**2) ** 0.5 * normal()
        gradients = [signal + noise * normal() for _ in range(workers)]
        for moments, g in zip(own, gradients, strict=True):
            moments.add(g)
        of_mean.add(sum(gradients[1:], gradients[0]) / workers)
    estimated = torch.stack([moments.v / moments.rho() ** 2 for moments in own]).mean()
    plain = torch.stack([moments.v for moments in own]).mean()
    assert (estimated / of_mean.v.mean()).item() == pytest.approx(1, abs=0.15)
    assert abs(estimated - of_mean.v.mean()) < abs(plain - of_mean.v.mean())


class SteppingAnother(torch.optim.AdamW):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (torch.optim.Adam, {}, True),
        (torch.optim.AdamW, {"weight_decay": 0.1}, True),
        (torch.optim.AdamW, {"amsgrad": True}, False),
        (SteppingAnother, {}, False),
        (torch.optim.NAdam, {}, False),
        (torch.optim.SGD, {}, False),
    ],
)
def test_which_optimizers_are_stretched(kind: type[torch.optim.Optimizer], settings: dict, expected: bool) -> None:  # type: ignore[type-arg]
    model = nn.Linear(3, 1)
    optimizer = kind(model.parameters(), lr=0.1, **settings)  # type: ignore[call-arg]
    assert is_adam(optimizer) == expected
    with laconic.Worker(model, optimizer, laconic.Divisible(period=2), comm=Mirror()) as worker:
        assert ("stretch" in worker.method.metrics()) == expected


def moves(
    optimizer_kind: type[torch.optim.Adam], steps: int, *, before: int = 0, betas: tuple[float, float] = (0.9, 0.999)
) -> tuple[Tensor, Tensor]:
    """Returns x after steps with noisy gradients, as one of four equal workers and as plain Adam.

    `before`: steps made before the worker exists, with constant gradients.
    """
    model = nn.Linear(5000, 1, bias=False)
    plain = copy.deepcopy(model)
    optimizers = [optimizer_kind(one.parameters(), lr=1e-3, betas=betas) for one in (model, plain)]

    def step(noise: float) -> None:
        gradient = 1.0 + noise * torch.randn(1, 5000)
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            one.weight.grad = gradient.clone()
            optimizer.step()

    for _ in range(before):
        step(0.0)
    with laconic.Worker(model, optimizers[0], laconic.Divisible(period=2, background=None), comm=Mirror(4)):
        for _ in range(steps):
            step(0.0 if before else 3.0)
    return model.weight.detach(), plain.weight.detach()


def test_an_optimizer_that_has_made_steps_already_is_not_taken_for_noise() -> None:
    x, plain = moves(torch.optim.AdamW, 20, before=50)
    torch.testing.assert_close(x, plain, rtol=0, atol=1e-6)


def test_without_momentum_there_is_no_stretch() -> None:
    torch.manual_seed(0)
    x, plain = moves(torch.optim.Adam, 20, betas=(0.0, 0.99))
    torch.testing.assert_close(x, plain, rtol=0, atol=1e-6)
    x, plain = moves(torch.optim.Adam, 20)
    assert (x - plain).abs().max() > 1e-4, "with momentum there is"


def test_learning_rates_are_those_of_now_also_after_the_optimizer_was_loaded() -> None:
    """`load_state_dict` of an optimizer replaces its groups."""
    model = nn.Linear(50, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with laconic.Worker(model, optimizer, laconic.Divisible(period=2), comm=Mirror()) as worker:
        for step in range(20):
            if step == 10:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                optimizer.param_groups[0]["lr"] = 0.0
                held = worker.x.clone()
            model.weight.grad = torch.randn(1, 50)
            optimizer.step()
        # What is in flight is still averaged: with equal workers that changes nothing but rounding.
        torch.testing.assert_close(worker.x, held, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("lr", "parts"), [(0.1, 1), (0.2, 4)])
def test_groups_that_differ_in_weight_decay_alone_are_stretched_together(
    lr: float, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights with decay and biases without take turns in x: one call of a kernel each would take most of the time."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": lr}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    sizes = []
    monkeypatch.setattr(stretch_module, "stretch", lambda x, *_: sizes.append(x.numel()))
    with laconic.Worker(model, optimizer, laconic.Divisible(period=2), comm=Mirror()) as worker:
        for p in worker.parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert (len(sizes), sum(sizes)) == (parts, 81)
