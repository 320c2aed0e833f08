"""A saved run goes on bit for bit, whatever was in flight when it was saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laconic
from laconic.compress import Log, Uniform
from laconic.methods.divisible.pace import Times
from tests.helpers import Optimize, adam, build_model, rank, sgd, train_step
from tests.methods.divisible.comms import scripted_times

STEPS = 14
METHODS: list[tuple[laconic.Divisible, Optimize]] = [
    (laconic.Divisible(8, 4), adam),
    (laconic.Divisible(8, 5, delay=3), adam),
    (laconic.Divisible(8, 3, None, delay=2), sgd),
    (laconic.Divisible(8, 3, Uniform(3, stochastic=True)), sgd),
    (laconic.Divisible(8, 3, corrected=True, delay=2), adam),
    (laconic.Divisible(8, 5, Log(3), delay=2, hops=2), adam),
    (laconic.Divisible(8, 3, Uniform(3, stochastic=True), delay=2, hops=2, corrected=True), sgd),
]


def scheduled(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (1 + step % 3)


def go_on(
    method: laconic.Divisible, optimize: Optimize, steps: int, saved: dict[str, Any] | None = None
) -> tuple[list[Tensor], dict[int, Any]]:
    """Trains, from the start or from a saved state. Returns x and x̂ after every step, and the state after some."""
    model = build_model(seed=0 if saved is None else 5)
    optimizer = optimize(model)
    path, states = [], {}
    with laconic.Worker(model, optimizer, method) as worker:
        own = worker.method
        assert isinstance(own, laconic.Divisible)
        if saved is not None:
            train_step(model, optimizer, worker.rank, 99)  # what this leaves in flight must be forgotten
            optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            worker.load_state_dict(copy.deepcopy(saved["worker"]))
        for step in range(worker.step, steps):
            scheduled(optimizer, step)
            train_step(model, optimizer, worker.rank, step)
            path.append(torch.cat([worker.x, own.x_hat]))
            # The first step after loading is not measured, so "auto" may be saved only where the next one is not.
            if saved is None and step < steps - 1 and not (own._pace and own._pace.is_measuring(worker.step + 1)):
                state = {"optimizer": optimizer.state_dict(), "worker": worker.state_dict()}
                states[step + 1] = copy.deepcopy(state)
    path.append(torch.cat([worker.x, own.x_hat]))
    return path, states


def resumed_paths(
    method: laconic.Divisible, optimize: Optimize, steps: int, every: int = 1
) -> tuple[list[Tensor], list[list[Tensor]], set[int]]:
    """Returns the whole path, those resumed from a few saved steps, and how much was in flight there."""
    whole, states = go_on(method, optimize, steps)
    chosen = {step: state for step, state in states.items() if step >= 3 and step % every == 0}
    in_flight = {len(state["worker"]["method"]["flights"]) for state in chosen.values()}
    return whole, [go_on(method, optimize, steps, state)[0] for state in chosen.values()], in_flight


def test_resumes_bit_for_bit_with_messages_in_flight() -> None:
    def run() -> list[Any]:
        return [resumed_paths(method, optimize, STEPS, every=2) for method, optimize in METHODS]

    for results in laconic.spawn(run, 3):
        for (method, _), (whole, resumed, in_flight) in zip(METHODS, results, strict=True):
            assert len(resumed) == 5
            assert min(in_flight) >= 1, method
            for path in resumed:
                assert all(torch.equal(x, y) for x, y in zip(path, whole[-len(path) :], strict=True)), method


def changing_times(step: int, finest_share: float) -> Times:
    """The link is fast, then too slow for the first quantizer, slower still, then fast. Its latency grows and falls."""
    finest = 0.3 if step < 10 or step > 28 else 3.0 if step < 16 else 30.0
    latency = 0.1 if step < 7 else 1.2 if step < 22 else 2.5 if step < 33 else 0.0
    return Times(1.0, latency / 4, latency, latency + finest * finest_share, 0.3 if step < 28 else 0.0, step % 2 * 0.2)


AUTO = [laconic.Divisible(8), laconic.Divisible(8, hops=2), laconic.Divisible(8, corrected=True)]


def test_a_checkpoint_of_a_version_with_one_delay_goes_on() -> None:
    """Until times are measured anew, with a delay of 1, one hop, no owners and a foreground, as then."""

    def run() -> tuple[list[Tensor], list[Tensor]]:
        method = laconic.Divisible(8)
        with scripted_times(lambda step, share: Times(1.0, 0.0, 0.0, 0.03 * share, 0.3), interval=100):
            whole, states = go_on(method, adam, 20)
            saved = states[14]
            state = saved["worker"]["method"]
            assert not state["owner_residual"].any()
            state["owner_residual"] = None
            for name in ("delay", "has_foreground", "hops", "stretches_every_step"):
                del state["pace"][name]
            return whole, go_on(method, adam, 20, saved)[0]

    for whole, resumed in laconic.spawn(run, 3):
        assert len(resumed) == 7
        assert all(torch.equal(x, y) for x, y in zip(resumed, whole[-7:], strict=True))


def test_auto_resumes_bit_for_bit_and_changes_in_the_same_step_on_all_ranks() -> None:
    def run() -> list[tuple[list[Tensor], list[list[Tensor]], list[dict[str, Any]]]]:
        found = []
        with scripted_times(changing_times):
            for method in AUTO:
                whole, states = go_on(method, adam, 40)
                chosen = list(states.values())[::3]
                paces = [state["worker"]["method"]["pace"] for state in chosen]
                resumed = [go_on(method, adam, 40, state)[0] for state in chosen]
                found.append((whole, resumed, paces))
        return found

    by_rank = laconic.spawn(run, 3)
    for i, method in enumerate(AUTO):
        d = by_rank[0][i][0][0].numel() // 2
        for whole, resumed, paces in (found[i] for found in by_rank):
            assert paces == by_rank[0][i][2]
            assert {pace["choice"] for pace in paces} == {0, 1}, method
            assert {pace["has_foreground"] for pace in paces} == {True, False}, method
            assert {pace["delay"] for pace in paces} >= {1, 2}, method
            assert {pace["hops"] for pace in paces} == ({2} if method.hops == 2 else {1, 2}), method
            assert len({pace["period"] for pace in paces}) >= 2, method
            assert paces[-1]["choice"] == 0
            assert all(torch.equal(x[d:], y[d:]) for x, y in zip(whole, by_rank[0][i][0], strict=True)), "x̂"
            for path in resumed:
                assert all(torch.equal(x, y) for x, y in zip(path, whole[-len(path) :], strict=True)), method


def train_and_save(directory: Path, resume: bool, steps: int = 16) -> list[Tensor]:
    model = build_model(seed=rank())
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(model.parameters())], weight_decay=0.1
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    path = []
    with laconic.Worker(model, optimizer, laconic.Divisible(8, 3, delay=2)) as worker:
        if resume:
            schedule.load_state_dict(worker.load(directory))
        while worker.step < steps:
            train_step(model, optimizer, worker.rank, worker.step)
            schedule.step()
            path.append(worker.x.clone())
            if worker.step == 7 and not resume:
                worker.save(directory, schedule.state_dict())
    return [*path, worker.x.clone()]


def test_a_schedule_and_groups_go_on_in_new_processes(tmp_path: Path) -> None:
    """The optimizer's groups are other objects after loading."""
    whole = laconic.spawn(train_and_save, 2, tmp_path, False)
    resumed = laconic.spawn(train_and_save, 2, tmp_path, True)
    for path, expected in zip(resumed, whole, strict=True):
        assert len(path) == 10
        assert all(torch.equal(x, y) for x, y in zip(path, expected[7:], strict=True))


def test_a_worker_alone_has_no_state_but_its_model() -> None:
    model = nn.Linear(3, 1)
    with laconic.Worker(model, adam(model), laconic.Divisible()) as worker:
        saved = worker.state_dict()["method"]
    assert torch.equal(saved.pop("x_hat"), worker.x)
    assert not any(saved.values())
