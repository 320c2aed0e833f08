"""A2CiD2: the algebra, the deterministic mode against the oracle, and what real asynchronous processes must keep."""

from __future__ import annotations

import os
import random
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from laconic import topology
from laconic.comm import Dialogue, Gossip
from laconic.methods import a2cid2 as a2cid2_module
from laconic.methods.a2cid2 import mixing
from tests.helpers import OPTIMIZERS, train
from tests.oracles.a2cid2 import a2cid2

D = 40


class ByHand(Gossip):
    """No thread: the test itself holds the dialogues."""

    def __init__(self, graph: topology.Topology) -> None:
        self.topology, self.exchanges, self.partners = graph, 0, Counter()

    def __enter__(self) -> ByHand:
        return self

    def __exit__(self, *_: object) -> None: ...
    def seek(self, exchanges: int, urgently: int) -> None: ...
    def wait(self, exchanges: int) -> None: ...
    def pause(self) -> None: ...
    def close(self) -> None: ...


class World:
    """Workers in one process, in double precision, whose events happen in any order."""

    def __init__(self, method: laconic.A2CiD2, graph: topology.Topology, apart: bool) -> None:
        torch.manual_seed(0)
        self.graph = graph
        kind, settings = type(method), method.settings()
        self.methods = [kind(**settings) for _ in graph.nodes]
        self.workers = [self._worker(rank, apart) for rank in graph.nodes]
        self.start = self.mean()
        self.moved = torch.zeros_like(self.start)
        for method_, worker in zip(self.methods, self.workers, strict=True):
            method_.setup(worker)

    def _worker(self, rank: int, apart: bool) -> Any:
        comm = SimpleNamespace(
            rank=rank, size=self.graph.size, gossip=lambda graph, talk: ByHand(graph), meet=lambda *_: [self.last_clock]
        )
        x = torch.randn(D, dtype=torch.float64) if apart else torch.zeros(D, dtype=torch.float64)
        return SimpleNamespace(x=x, comm=comm, step=0)

    @property
    def last_clock(self) -> float:
        return max(method.clock for method in self.methods)

    def mean(self) -> Tensor:
        return torch.stack([worker.x for worker in self.workers]).mean(dim=0)

    def distance(self) -> float:
        return (torch.stack([worker.x for worker in self.workers]) - self.mean()).norm().item()

    def step(self, i: int, size: float = 1.0) -> None:
        own = size * torch.randn(D, dtype=torch.float64)
        self.workers[i].x += own
        self.moved += own / self.graph.size
        self.workers[i].step += 1
        self.methods[i].after_step(self.workers[i])

    def exchange(self, i: int, j: int, meanwhile: Any = lambda: None) -> None:
        talks: list[Dialogue] = [self.methods[i].exchange(j), self.methods[j].exchange(i)]
        sent = [next(talk) for talk in talks]
        ended = [False, False]
        while not any(ended):
            meanwhile()
            copies = [tensor.clone() for tensor in sent]
            for k, talk in enumerate(talks):
                try:
                    sent[k] = talk.send(copies[1 - k])
                except StopIteration:
                    ended[k] = True
        assert all(ended)

    def flush(self) -> None:
        for method, worker in zip(self.methods, self.workers, strict=True):
            method.drain(worker)

    def drift(self) -> float:
        return (self.mean() - self.start - self.moved).abs().max().item()


class Released(laconic.A2CiD2):
    """The order of the authors' released code: mix between sending and averaging."""

    def exchange(self, peer: int) -> Dialogue:
        yield torch.zeros(4)
        everything = slice(None)
        received = yield self._current(everything).clone()
        self._mix(self.clock)
        self._rescale()
        gap = self._current(everything) - received
        self._jump(everything, gap, -0.5, 0.5 - self._alpha_tilde())


def rough_life(world: World, seed: int, events: int = 300) -> None:
    """Steps at different paces, exchanges, and steps in the middle of exchanges."""
    chance = random.Random(seed)
    nodes = list(world.graph.nodes)
    pace = [chance.choice([1, 1, 4]) for _ in nodes]

    def some_steps() -> None:
        for i in chance.choices(nodes, pace, k=chance.randrange(4)):
            world.step(i)

    for _ in range(events):
        some_steps()
        world.exchange(*chance.choice(world.graph.edges), meanwhile=some_steps)
    world.flush()


@given(
    seed=st.integers(0, 10**6),
    graph=st.sampled_from([topology.ring(2), topology.ring(5), topology.exponential(6), topology.complete(4)]),
    momentum=st.booleans(),
    rate=st.sampled_from([0.25, 1, 2.0, "auto"]),
    piece_numel=st.sampled_from([D, 12, 1]),
)
def test_the_mean_is_kept_whatever_the_order_of_events(
    seed: int, graph: topology.Topology, momentum: bool, rate: Any, piece_numel: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a2cid2_module, "PIECE_NUMEL", piece_numel)
        world = World(laconic.A2CiD2(graph, rate=rate, momentum=momentum), graph, apart=True)
        # Σx̃ must start as Σx does: δ = 0, while the workers themselves are apart.
        rough_life(world, seed, events=60)
    assert world.drift() < 1e-11


def test_the_released_order_does_not_keep_the_mean() -> None:
    graph = topology.ring(16)
    right = World(laconic.A2CiD2(graph, rate=1.0), graph, apart=True)
    released = World(Released(graph, rate=1.0), graph, apart=True)
    rough_life(right, seed=1)
    rough_life(released, seed=1)
    assert right.drift() < 1e-11
    assert released.drift() > 1e-3


def test_dropping_a_neighbour_in_the_middle_of_an_exchange_leaves_the_worker_as_it_was() -> None:
    graph = topology.ring(2)
    for yields in (1, 2):
        world = World(laconic.A2CiD2(graph, rate=1.0), graph, apart=True)
        world.step(0)
        talk = world.methods[0].exchange(1)
        sent = next(talk)
        if yields == 2:
            talk.send(sent)
        talk.close()
        world.flush()
        assert world.drift() < 1e-12


@given(a=st.floats(0, 5), b=st.floats(0, 5))
def test_mixing_composes_and_shrinks_the_difference(a: float, b: float) -> None:
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


def test_an_exchange_moves_both_ends_by_opposite_gaps() -> None:
    graph = topology.ring(8)
    world = World(laconic.A2CiD2(graph, rate=1.0), graph, apart=True)
    one, other = world.workers[3].x.clone(), world.workers[4].x.clone()
    world.exchange(3, 4)
    gap, alpha_tilde = one - other, graph.constants(1).alpha_tilde
    assert torch.equal(world.methods[3].correction, -world.methods[4].correction)
    assert torch.equal(world.methods[3].delta, -world.methods[4].delta)
    torch.testing.assert_close(world.methods[3].correction, -gap / 2)
    torch.testing.assert_close(world.methods[3].correction + world.methods[3].delta, -alpha_tilde * gap)


def test_without_momentum_both_ends_become_their_mean() -> None:
    graph = topology.ring(8)
    world = World(laconic.A2CiD2(graph, rate=1.0, momentum=False), graph, apart=True)
    mean = (world.workers[3].x + world.workers[4].x) / 2
    world.exchange(3, 4)
    world.flush()
    torch.testing.assert_close(world.workers[3].x, mean)
    torch.testing.assert_close(world.workers[4].x, mean)
    assert not any(method.delta.any() for method in world.methods)


def test_a_model_that_is_lent_is_not_sent() -> None:
    graph = topology.ring(2)
    world = World(laconic.A2CiD2(graph, rate=1.0), graph, apart=True)
    own = world.workers[0].x.clone()
    world.methods[0].pause(world.workers[0])
    world.workers[0].x.zero_()  # as consensus() puts the agreed model there
    talk = world.methods[0].exchange(1)
    assert torch.equal(talk.send(next(talk)), own)
    talk.close()
    world.workers[0].x.copy_(own)
    world.step(0)
    talk = world.methods[0].exchange(1)
    assert torch.equal(talk.send(next(talk)), world.workers[0].x)
    talk.close()


def test_an_exchange_is_cut_into_as_many_pieces_as_it_takes_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2cid2_module, "PIECE_NUMEL", 4)
    graph = topology.ring(2)
    world = World(laconic.A2CiD2(graph, rate=1.0), graph, apart=True)
    rounds = []
    for steps in (0, 3, 1, 0):  # between the parts of the next exchange
        rounds.append(0)

        def meanwhile(steps: int = steps) -> None:
            rounds[-1] += 1
            for _ in range(steps):
                world.step(1)

        world.exchange(0, 1, meanwhile)
    # A guess of 16 steps, cut at 4 entries; what took no step; what took 6 steps; what took 7.
    assert rounds == [1 + 10, 1 + 1, 1 + 6, 1 + 7]


def test_auto_knows_its_rate_from_the_start() -> None:
    """Two exchanges in 20 steps are a rate of 0.1, not what is left of a guess; workers that met think alike."""
    graph = topology.ring(2)
    world = World(laconic.A2CiD2(graph, rate="auto"), graph, apart=True)
    for step in range(20):
        world.step(0)
        world.step(1)
        if step == 0:
            assert world.methods[0].clock < 1e-5, "no exchange yet, so no momentum yet"
        if step in (6, 13):
            world.exchange(0, 1)
    for method in world.methods:
        assert method.metrics()["exchanges_per_step"] == pytest.approx(0.1)


def test_the_momentum_pays_on_a_ring_of_64() -> None:
    """Gossip alone: after 12√(χ1χ2) units of time Σ‖x − x̄‖² is at least 100 times smaller than without momentum."""
    graph = topology.ring(64)
    constants = graph.constants(1)
    duration = 12 * (constants.chi_1 * constants.chi_2) ** 0.5
    distances = {}
    for momentum in (True, False):
        world = World(laconic.A2CiD2(graph, rate=1.0, momentum=momentum), graph, apart=True)
        chance, now = random.Random(0), 0.0
        while now < duration:
            now += chance.expovariate(32)  # one exchange a worker and unit of time
            i, j = chance.choice(graph.edges)
            world.methods[i].clock = now * constants.eta if momentum else 0.0
            world.exchange(i, j)
        world.flush()
        distances[momentum] = world.distance()
        assert world.drift() < 1e-11
    assert distances[True] ** 2 < distances[False] ** 2 / 100


@pytest.mark.parametrize(
    ("workers", "name", "rate", "momentum", "optimizer"),
    [(4, "ring", 1.0, True, "sgd"), (3, "complete", 0.3, True, "adam"), (5, "exponential", 2.0, False, "sgd")],
)
def test_the_deterministic_mode_agrees_with_the_oracle(
    workers: int, name: str, rate: float, momentum: bool, optimizer: str
) -> None:
    steps = 15
    method = laconic.A2CiD2(name, rate=rate, momentum=momentum, background=False)
    paths = laconic.spawn(train, workers, method, OPTIMIZERS[optimizer], steps)
    expected = a2cid2(OPTIMIZERS[optimizer], topology.named(name, workers), steps, rate, momentum)
    for step in range(steps):
        for worker in range(workers):
            torch.testing.assert_close(paths[worker][step], expected[step][worker], rtol=1e-4, atol=1e-5)
    mean = torch.stack(expected[-1]).mean(dim=0)
    for path in paths:
        torch.testing.assert_close(path[-1], mean, rtol=1e-4, atol=1e-5)


def step_alone(model: nn.Linear, optimizer: torch.optim.Optimizer, rank: int, step: int) -> Tensor:
    """A step by a gradient that does not depend on x; what it adds to x."""
    gradient = torch.randn(D, generator=torch.Generator().manual_seed(7919 * step + rank))
    (model.weight * gradient).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return -0.1 * gradient


def live(method: laconic.A2CiD2, steps: int, seconds: float = 0.0, directory: Path | None = None) -> dict[str, Any]:
    """Train on random gradients; what the worker moved by itself, and by how much the agreed model moved."""
    model = nn.Linear(D, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.Worker(model, optimizer, method) as worker:
        start, moved = worker.x.clone(), torch.zeros(D)
        if directory is not None and directory.exists():
            extra = worker.load(directory)
            start, moved = extra["start"], extra["moved"]
            steps *= 2
        while worker.step < steps:
            time.sleep(seconds * (1 + worker.rank % 2))  # computing, at different paces
            moved += step_alone(model, optimizer, worker.rank, worker.step)
        if directory is not None and not directory.exists():
            worker.save(directory, {"start": start, "moved": moved})
            # The first life goes on for a while: what it does after saving must not show in the second.
            for step in range(3):
                step_alone(model, optimizer, worker.rank, step)
    assert isinstance(worker.method, laconic.A2CiD2)
    partners = torch.tensor([worker.method.partners[peer] for peer in range(worker.size)])
    told = {"moved": moved, "agreed": worker.x - start, "partners": partners, "meter": worker.meter.total}
    return told | {"exchanges": worker.method.exchanges}


def check_the_mean(results: list[dict[str, Any]]) -> None:
    mean = torch.stack([result["moved"] for result in results]).mean(dim=0)
    for result in results:
        error = (result["agreed"] - mean).abs().max() / mean.abs().max()
        assert error < 3e-6, "1e-6 relative, and the rounding of the test's own sums"


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_the_mean_is_kept_by_asynchronous_processes(workers: int) -> None:
    # On two cores, many wait long for each other.
    names = topology.TOPOLOGIES if workers < 5 else ("ring", "exponential")
    methods = [laconic.A2CiD2(name, rate=1.0) for name in names]
    if workers < 5:
        methods += [laconic.A2CiD2("ring", rate="auto"), laconic.A2CiD2("ring", rate=2, momentum=False)]

    def run() -> list[dict[str, Any]]:
        return [live(method, steps=16, seconds=0.002) for method in methods]

    for method, results in zip(methods, zip(*laconic.spawn(run, workers), strict=True), strict=True):
        check_the_mean(list(results))
        made = torch.stack([result["partners"] for result in results])
        assert torch.equal(made, made.T)
        edges = topology.named(str(method.topology), workers).edges
        assert all((min(pair), max(pair)) in edges for pair in made.nonzero().tolist())
        for result in results:
            exchanges = int(result["partners"].sum())
            assert exchanges >= 1
            if method.rate != "auto":
                assert exchanges >= method.rate * (16 - method.slack)
            assert result["meter"].nbytes("background") == exchanges * (4 * D + 32)


def test_resumed_from_a_checkpoint_the_mean_is_still_kept(tmp_path: Path) -> None:
    """In new processes: what was moved before and after the checkpoint, on all workers, is in the agreed model."""
    method = laconic.A2CiD2("ring", rate=1.0)
    laconic.spawn(live, 3, method, 12, 0.002, tmp_path / "checkpoint")
    first = [torch.load(path) for path in sorted(tmp_path.rglob("rank-*.pt"))]
    results = laconic.spawn(live, 3, method, 12, 0.002, tmp_path / "checkpoint")
    check_the_mean(results)
    for rank, result in enumerate(results):
        before = first[rank]["worker"]["method"]["exchanges"]
        assert before >= 12 - method.slack
        assert result["exchanges"] == before + result["partners"].sum()
        assert result["exchanges"] >= 24 - method.slack


def test_the_rate_is_realised() -> None:
    def run() -> list[int]:
        planned = {0.25: 1000, 1.0: 1000, 2.0: 500}  # steps
        return [live(laconic.A2CiD2("ring", rate), steps, 0.0002)["exchanges"] for rate, steps in planned.items()]

    for made in laconic.spawn(run, 2):
        assert made == pytest.approx([250, 1000, 1000], rel=0.03)


def test_one_worker_that_is_slower_or_ends_early_still_answers() -> None:
    def run() -> dict[str, Any]:
        slow = int(os.environ["RANK"]) == 0
        return live(
            laconic.A2CiD2("ring", rate=1.0, slack=4), steps=12 if slow else 60, seconds=0.008 if slow else 0.001
        )

    results = laconic.spawn(run, 4)
    check_the_mean(results)
    for result in results[1:]:
        assert result["partners"].sum() >= 56
    assert results[0]["partners"].sum() >= 8


def test_consensus_distance() -> None:
    def run() -> tuple[float | None, Tensor, float | None]:
        model = nn.Linear(D, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.Worker(model, optimizer, laconic.A2CiD2("ring", rate=0.01)) as worker:
            before = worker.consensus_distance
            step_alone(model, optimizer, worker.rank, 0)
            x = worker.x.clone()
            with worker.consensus():
                pass
        assert worker.state_dict()["step"] == 1, "also after the end"
        return before, x, worker.consensus_distance

    results = laconic.spawn(run, 3)
    x = torch.stack([x for _, x, _ in results])
    for before, _, distance in results:
        assert before is None
        assert distance == pytest.approx((x - x.mean(dim=0)).norm().item() / 3**0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"topology": "rign"}, "no topology is called 'rign'; did you mean ring"),
        ({"topology": 4}, "topology must be a name or a laconic.topology.Topology, not 4"),
        ({"rate": 0}, 'rate must be "auto" or more than 0 exchanges a step, not 0'),
        ({"rate": -1.0}, "not -1.0"),
        ({"rate": "often"}, "not 'often'"),
        ({"rate": float("nan")}, "not nan"),
        ({"momentum": 1}, "momentum must be True or False, not 1"),
        ({"background": None}, "background must be True or False, not None"),
        ({"slack": 0}, "slack must be a whole number, at least 1, not 0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        laconic.A2CiD2(**settings)


def test_a_topology_of_another_size() -> None:
    def run() -> None:
        model = nn.Linear(2, 1)
        laconic.Worker(model, torch.optim.SGD(model.parameters(), lr=0.1), laconic.A2CiD2(topology.ring(4)))

    with pytest.raises(laconic.WorkerFailed, match="topology must be of the 2 workers there are, not of 4"):
        laconic.spawn(run, 2)


def test_nan_is_not_passed_on() -> None:
    def run() -> str:
        try:
            return str(torch.isfinite(live_with_nan()).all().item())
        except FloatingPointError as error:
            return str(error)

    def live_with_nan() -> Tensor:
        model = nn.Linear(D, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            warnings.catch_warnings(),
            laconic.Worker(model, optimizer, laconic.A2CiD2(rate=1.0), timeout=20) as worker,
        ):
            warnings.simplefilter("ignore")
            for step in range(30):
                if worker.rank == 1 and step == 5:
                    worker.x[3] = float("nan")
                time.sleep(0.003)
                step_alone(model, optimizer, worker.rank, step)
        return worker.x

    assert laconic.spawn(run, 3) == ["True", NAN, "True"]


NAN = "rank 1: the parameters hold NaN or infinity, so the gossip of this worker has ended"
