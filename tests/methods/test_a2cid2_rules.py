"""A2CiD2's rules (local step, mixing, exchange) on workers in one process: the mean is kept in any order of events."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import laconic
from laconic import topology
from laconic.comm import Dialogue, Gossip
from laconic.methods import a2cid2 as a2cid2_module
from laconic.methods.a2cid2 import mixing
from laconic.methods.gossip_rate import RateWatch, due_exchanges

D = 40


class ManualGossip(Gossip):
    """Has no thread: the test runs the dialogues."""

    def __init__(self, graph: topology.Topology) -> None:
        self.topology, self.exchanges, self.partners = graph, 10**9, Counter()  # training never waits

    def __enter__(self) -> ManualGossip:
        return self

    def __exit__(self, *_: object) -> None: ...
    def seek(self, exchanges: int, urgently: int) -> None: ...
    def wait(self, exchanges: int) -> None: ...
    def pause(self) -> None: ...
    def close(self) -> None: ...


class Cluster:
    """Workers in one process, in fp64, whose steps and exchanges the test orders."""

    def __init__(self, method: laconic.A2CiD2, graph: topology.Topology) -> None:
        torch.manual_seed(0)
        self.graph = graph
        kind, settings = type(method), method.settings()
        self.methods = [kind(**settings) for _ in graph.nodes]
        self.workers = [self._worker(rank) for rank in graph.nodes]
        self.start = self.mean()
        self.mean_of_steps = torch.zeros_like(self.start)
        for replica_method, worker in zip(self.methods, self.workers, strict=True):
            replica_method.setup(worker)

    def _worker(self, rank: int) -> Any:
        comm = SimpleNamespace(
            rank=rank,
            size=self.graph.size,
            gossip=lambda graph, talk: ManualGossip(graph),
            meet=lambda *_: [self.last_clock],
            now=lambda: float(self.workers[rank].step),
        )
        x = torch.randn(D, dtype=torch.float64)
        return SimpleNamespace(x=x, comm=comm, step=0)

    @property
    def last_clock(self) -> float:
        return max(method.clock for method in self.methods)

    def mean(self) -> Tensor:
        return torch.stack([worker.x for worker in self.workers]).mean(dim=0)

    def distance(self) -> float:
        """Returns √Σ‖x − x̄‖²."""
        return float((torch.stack([worker.x for worker in self.workers]) - self.mean()).norm())

    def step(self, i: int) -> None:
        local_step = torch.randn(D, dtype=torch.float64)
        self.workers[i].x += local_step
        self.mean_of_steps += local_step / self.graph.size
        self.workers[i].step += 1
        self.methods[i].after_step(self.workers[i])

    def exchange(self, i: int, j: int, between: Callable[[], None] = lambda: None) -> None:
        talks: list[Dialogue] = [self.methods[i].exchange(j), self.methods[j].exchange(i)]
        sent = [next(talk) for talk in talks]
        ended = [False, False]
        while not any(ended):
            between()
            copies = [tensor.clone() for tensor in sent]
            for k, talk in enumerate(talks):
                try:
                    sent[k] = talk.send(copies[1 - k])
                except StopIteration:
                    ended[k] = True
        assert all(ended)

    def drain(self) -> None:
        for method, worker in zip(self.methods, self.workers, strict=True):
            method.drain(worker)

    def error_of_mean(self) -> float:
        """Returns how far the mean of x is from the mean of x₀ and all local steps."""
        return (self.mean() - self.start - self.mean_of_steps).abs().max().item()


class ReleasedOrder(laconic.A2CiD2):
    """Mixes between sending and averaging, as the authors' released code does."""

    def exchange(self, peer: int) -> Dialogue:
        yield torch.zeros(5)
        everything = slice(None)
        received = yield self._current_x(everything).clone()
        self._mix(self.clock)
        self._rescale()
        difference = self._current_x(everything) - received
        self._move(everything, difference, -0.5, 0.5 - self._alpha_tilde())


def run_random_events(cluster: Cluster, seed: int, events: int = 300) -> None:
    """Makes steps at different speeds, exchanges, and steps in the middle of exchanges."""
    rng = random.Random(seed)
    nodes = list(cluster.graph.nodes)
    speeds = [rng.choice([1, 1, 4]) for _ in nodes]

    def random_steps() -> None:
        for i in rng.choices(nodes, speeds, k=rng.randrange(4)):
            cluster.step(i)

    for _ in range(events):
        random_steps()
        cluster.exchange(*rng.choice(cluster.graph.edges), between=random_steps)
    cluster.drain()


@given(
    seed=st.integers(0, 10**6),
    graph=st.sampled_from([topology.ring(2), topology.ring(5), topology.exponential(6), topology.complete(4)]),
    momentum=st.booleans(),
    rate=st.sampled_from([0.25, 1, 2.0, "auto"]),
    piece_numel=st.sampled_from([D, 12, 1]),
)
def test_the_mean_is_kept_in_any_order_of_events(
    seed: int, graph: topology.Topology, momentum: bool, rate: Any, piece_numel: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a2cid2_module, "MIN_PIECE_NUMEL", piece_numel)
        cluster = Cluster(laconic.A2CiD2(graph, rate=rate, momentum=momentum), graph)
        run_random_events(cluster, seed, events=60)
    assert cluster.error_of_mean() < 1e-11


def test_the_released_order_does_not_keep_the_mean() -> None:
    graph = topology.ring(16)
    right = Cluster(laconic.A2CiD2(graph, rate=1.0), graph)
    released = Cluster(ReleasedOrder(graph, rate=1.0), graph)
    run_random_events(right, seed=1)
    run_random_events(released, seed=1)
    assert right.error_of_mean() < 1e-11
    assert released.error_of_mean() > 1e-3


def test_an_exchange_that_breaks_off_leaves_the_worker_unchanged() -> None:
    graph = topology.ring(2)
    for messages in (1, 2):
        cluster = Cluster(laconic.A2CiD2(graph, rate=1.0), graph)
        cluster.step(0)
        talk = cluster.methods[0].exchange(1)
        sent = next(talk)
        if messages == 2:
            talk.send(sent)
        talk.close()
        cluster.drain()
        assert cluster.error_of_mean() < 1e-12


@given(a=st.floats(0, 5), b=st.floats(0, 5))
def test_mixing_composes_and_shrinks_delta(a: float, b: float) -> None:
    x, delta = torch.randn(2, 9, dtype=torch.float64)
    x_tilde = x + delta

    def mixed(x: Tensor, delta: Tensor, elapsed: float) -> tuple[Tensor, Tensor]:
        c, shrinking = mixing(elapsed)
        return x + c * delta, shrinking * delta

    once, twice = mixed(x, delta, a + b), mixed(*mixed(x, delta, a), b)
    for left, right in zip(once, twice, strict=True):
        torch.testing.assert_close(left, right)
    torch.testing.assert_close(2 * once[0] + once[1], x + x_tilde)  # x + x̃ is kept
    torch.testing.assert_close(once[1], torch.exp(torch.tensor(-2.0 * (a + b), dtype=torch.float64)) * delta)


def test_an_exchange_moves_both_ends_by_opposite_differences() -> None:
    graph = topology.ring(8)
    cluster = Cluster(laconic.A2CiD2(graph, rate=1.0), graph)
    one, other = cluster.workers[3].x.clone(), cluster.workers[4].x.clone()
    cluster.exchange(3, 4)
    difference, alpha_tilde = one - other, graph.constants(1).alpha_tilde
    assert torch.equal(cluster.methods[3].pending, -cluster.methods[4].pending)
    assert torch.equal(cluster.methods[3].delta, -cluster.methods[4].delta)
    torch.testing.assert_close(cluster.methods[3].pending, -difference / 2)
    torch.testing.assert_close(cluster.methods[3].pending + cluster.methods[3].delta, -alpha_tilde * difference)


def test_without_momentum_both_ends_become_their_mean() -> None:
    graph = topology.ring(8)
    cluster = Cluster(laconic.A2CiD2(graph, rate=1.0, momentum=False), graph)
    mean = (cluster.workers[3].x + cluster.workers[4].x) / 2
    cluster.exchange(3, 4)
    cluster.drain()
    torch.testing.assert_close(cluster.workers[3].x, mean)
    torch.testing.assert_close(cluster.workers[4].x, mean)
    assert not any(method.delta.any() for method in cluster.methods)


def test_the_averaged_model_of_consensus_is_not_sent() -> None:
    graph = topology.ring(2)
    cluster = Cluster(laconic.A2CiD2(graph, rate=1.0), graph)
    local_x = cluster.workers[0].x.clone()
    cluster.methods[0].pause(cluster.workers[0])
    cluster.workers[0].x.zero_()  # consensus() puts the averaged model there
    talk = cluster.methods[0].exchange(1)
    assert torch.equal(talk.send(next(talk))[:-1], local_x)
    talk.close()
    cluster.workers[0].x.copy_(local_x)
    cluster.step(0)
    talk = cluster.methods[0].exchange(1)
    assert torch.equal(talk.send(next(talk))[:-1], cluster.workers[0].x)
    talk.close()


def test_an_exchange_is_cut_into_as_many_pieces_as_it_takes_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2cid2_module, "MIN_PIECE_NUMEL", 4)
    graph = topology.ring(2)
    cluster = Cluster(laconic.A2CiD2(graph, rate=1.0), graph)
    messages = []
    for steps in (0, 3, 1, 0):  # local steps between two messages of the exchange
        messages.append(0)

        def between(steps: int = steps) -> None:
            messages[-1] += 1
            for _ in range(steps):
                cluster.step(1)

        cluster.exchange(0, 1, between)
    # One message to agree, then pieces: first 16 are guessed, but they must have 4 entries; then as many as the last
    # exchange took steps: 0 (at least 1 piece), 6 and 7.
    assert messages == [1 + 10, 1 + 1, 1 + 6, 1 + 7]


@pytest.mark.filterwarnings("ignore:rank ., step 100. gossip reaches")
def test_on_a_slow_link_each_exchange_is_of_a_part_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2cid2_module, "MIN_PIECE_NUMEL", 1)
    graph = topology.ring(2)
    cluster = Cluster(laconic.A2CiD2(graph, rate="auto"), graph)

    def slow_link() -> None:
        for _ in range(6):  # steps per message
            cluster.step(0)
            cluster.step(1)

    position, total = 0, 0
    while total < 3 * D:
        steps = cluster.workers[0].step
        cluster.exchange(0, 1, slow_link)
        positions = [cluster.methods[0]._positions[1], cluster.methods[1]._positions[0]]
        assert positions[0] == positions[1] != position
        exchanged = (positions[0] - position) % D
        steps = cluster.workers[0].step - steps
        assert exchanged <= D / 4
        assert steps <= 24, "an exchange ends with the first piece after 16 steps"
        total += exchanged
        position = positions[0]
    assert cluster.methods[0].metrics()["exchanges_per_step"] == pytest.approx(exchanged / D / steps, rel=0.3)
    cluster.drain()
    assert cluster.error_of_mean() < 1e-11


def test_a_worker_whose_gossip_does_not_keep_up_warns_once() -> None:
    def run(rate: float | None, exchanges_per_step: float, wait: float) -> list[str]:
        watch = RateWatch(rank=3, nbytes=8_000_000)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(300):
                watch.add_step(now=step)
                if wait:
                    watch.add_wait(wait)
                watch.check(rate, exchanges_per_step, now=step)
        return [str(warning.message) for warning in caught]

    assert run(None, 0.05, 0.0) == run(2.0, 2.0, 0.0) == []
    (slow,) = run(None, 0.008, 0.0)
    assert slow.startswith(
        'rank 3, step 100: gossip reaches 0.008 exchanges per step, and rate="auto" asks for up to 1'
    )
    (waiting,) = run(2.0, 2.0, 0.5)
    assert "training waited for gossip in 100 of 100 steps: rate=2 asks for 2 exchanges of 8 MB per step" in waiting
    assert "without waiting about 0.99 would be reached" in waiting


@pytest.mark.parametrize("rate", [0.25, 1.0, 3.0])
def test_exchanges_are_due_at_random(rate: float) -> None:
    """As a Poisson process: mean and variance are the rate, and ranks differ."""
    due = torch.tensor([[due_exchanges(rate, rank, step) for step in range(4000)] for rank in range(2)]).double()
    for mean, variance in zip(due.mean(dim=1), due.var(dim=1), strict=True):
        assert mean.item() == pytest.approx(rate, rel=0.1)
        assert variance.item() == pytest.approx(rate, rel=0.15)
    assert abs(torch.corrcoef(due)[0, 1]) < 0.06


def test_auto_measures_its_rate_from_the_start() -> None:
    """Two exchanges in 20 steps are a rate of 0.1 on both workers, without the influence of an initial guess."""
    graph = topology.ring(2)
    cluster = Cluster(laconic.A2CiD2(graph, rate="auto"), graph)
    for step in range(20):
        cluster.step(0)
        cluster.step(1)
        if step == 0:
            assert cluster.methods[0].clock < 1e-5, "no momentum before the first exchange"
        if step in (6, 13):
            cluster.exchange(0, 1)
    for method in cluster.methods:
        assert method.metrics()["exchanges_per_step"] == pytest.approx(0.1)


def test_momentum_accelerates_gossip_on_a_ring_of_64() -> None:
    """Without local steps, at time 12√(χ1χ2), Σ‖x − x̄‖² is at least 100 times smaller than without momentum."""
    graph = topology.ring(64)
    constants = graph.constants(1)
    duration = 12 * (constants.chi_1 * constants.chi_2) ** 0.5
    distances = {}
    for momentum in (True, False):
        cluster = Cluster(laconic.A2CiD2(graph, rate=1.0, momentum=momentum), graph)
        rng, now = random.Random(0), 0.0
        while now < duration:
            now += rng.expovariate(32)  # one exchange per worker and unit of time
            i, j = rng.choice(graph.edges)
            cluster.methods[i].clock = now * constants.eta if momentum else 0.0
            cluster.exchange(i, j)
        cluster.drain()
        distances[momentum] = cluster.distance()
        assert cluster.error_of_mean() < 1e-11
    assert distances[True] ** 2 < distances[False] ** 2 / 100
