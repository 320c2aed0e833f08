"""`worker.metrics()`: the same keys for every method, counters since the last call, mean and maximum over ranks."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import laconic
from laconic.tracking.metrics import COUNTED, KEYS
from tests.helpers import Silent, build_model, rank, sgd, train_step, worker_of

ROOT = Path(__file__).parent.parent.parent
STEPS = 12
METHODS: dict[str, laconic.Method] = {
    "silent": Silent(),
    **{name: method() for name, method in laconic.METHODS.items() if name != "a2cid2"},
    "a2cid2": laconic.A2CiD2(rate=1.0, slack=2),
    "efficient_adam, dedicated": laconic.EfficientAdam(server=0, dedicated=True),
}
# What only one method has.
OWN = {
    "local_sgd": ["rounds", "variance", "mean_variance"],
    "adpsgd": ["rounds", "variance", "mean_variance"],
    "diloco": ["rounds", "backlog", "pseudo_gradient"],
    "divisible": ["delay", "hops", "foreground", "backlog", "waiting"],
    "a2cid2": ["exchanges_per_step", "smallest_edge_share"],
}
Parts = list[dict[str, float]]


def read_in_parts(method: laconic.Method) -> tuple[Parts, dict[str, float], dict[str, float]]:
    """Trains, and returns readings in the middle, at the end and after it; totals; and those over ranks."""
    model = build_model(seed=rank())
    optimizer = sgd(model)
    parts = []
    with laconic.Worker(model, optimizer, method) as worker:
        if not method.trains(worker.rank):
            worker.serve()
        else:
            for step in range(STEPS):
                train_step(model, optimizer, worker.rank, step)
                if step == 4:
                    parts.append(worker.metrics())
        with worker.consensus():
            pass
        parts.append(worker.metrics())
        together = worker.metrics(over="ranks")
    parts.append(worker.metrics())
    total = worker.meter.total
    totals = {f"bytes_{channel}": float(total.nbytes(channel)) for channel in ("foreground", "background", "control")}
    return parts, totals | {"bytes": float(total.nbytes()), "waited_seconds": total.waited}, together


@pytest.fixture(scope="module")
def results() -> dict[str, list[tuple[Parts, dict[str, float], dict[str, float]]]]:
    """Trains all methods one after another in the same processes, since starting processes takes longest."""

    def run() -> dict[str, tuple[Parts, dict[str, float], dict[str, float]]]:
        torch.manual_seed(rank())
        return {name: read_in_parts(method) for name, method in METHODS.items()}

    by_rank = laconic.spawn(run, 2)
    return {name: [found[name] for found in by_rank] for name in METHODS}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_same_keys(name: str, results) -> None:
    expected = [*KEYS, "exchanges_with_0", "exchanges_with_1", *(f"method_{key}" for key in OWN.get(name, []))]
    for parts, _, together in results[name]:
        for part in parts:
            assert list(part) == expected
            assert all(type(value) is float for value in part.values())
        assert list(together) == [f"{key}_{kind}" for key in expected for kind in ("mean", "max")]


@pytest.mark.parametrize("name", METHODS)
def test_counters_add_up_to_the_totals(name: str, results) -> None:
    """Over both ranks, since one of the readings is the mean over ranks."""
    together = results[name][0][2]
    for key in ("bytes", "bytes_foreground", "bytes_background", "bytes_control", "waited_seconds"):
        read = sum(part[key] for parts, _, _ in results[name] for part in parts) + 2 * together[f"{key}_mean"]
        assert read == pytest.approx(sum(totals[key] for _, totals, _ in results[name]), rel=1e-9)
    for parts, _, _ in results[name]:
        assert sum(part["steps"] for part in parts) == STEPS
        assert parts[-1]["step"] == STEPS
    for parts, totals, _ in results[name]:
        assert parts[0]["bytes_total"] == parts[0]["bytes"]
        assert parts[1]["bytes_total"] == parts[0]["bytes"] + parts[1]["bytes"]
        assert parts[-1]["bytes_total"] == totals["bytes"]
        assert parts[-2]["consensus_distance"] >= 0


def test_counters_are_not_shared() -> None:
    """Whoever else reads does not take anything away from `worker.metrics()`."""
    model = build_model()
    optimizer = sgd(model)
    seen = []
    with laconic.Worker(model, optimizer, Silent()) as worker:
        laconic.track(worker, lambda step, metrics: seen.append(metrics["steps"]), every=2)
        for step in range(5):
            train_step(model, optimizer, 0, step)
        assert worker.metrics()["steps"] == 5
    assert seen == [2.0, 2.0, 1.0]


def test_values_that_methods_have(results) -> None:
    values = {name: by_rank[1][0][1] for name, by_rank in results.items()}  # rank 1, at the end
    known = {name: (part["period"], part["bits"]) for name, part in values.items()}
    assert known["allreduce"] == (1.0, 32.0)
    assert known["local_sgd"] == (8.0, 32.0)
    assert known["adpsgd"] == (8.0, 32.0)
    assert known["qsgd"] == (1.0, 8.0)
    assert known["efficient_adam"][0] == 1.0
    assert known["efficient_adam"][1] == 3.0
    assert known["divisible"][0] >= 1
    assert known["a2cid2"][1] == 32.0
    assert all(map(math.isnan, known["silent"]))
    for name, part in values.items():
        assert part["members"] == 2
        assert 0 <= part["waited_share"] <= 1
        assert 0 <= part["overhead_share"] <= 1
        assert part["step_seconds"] > 0
        exchanges = part["exchanges_with_0"]
        assert part["exchanges_with_1"] == 0, "a rank has no exchanges with itself"
        assert part["exchanges"] == exchanges
        assert (exchanges > 0) == (name == "a2cid2")
    assert all(found[0][2]["members_max"] == 2 for found in results.values())


def test_over_ranks_is_the_mean_and_the_maximum() -> None:
    def run() -> tuple[dict[str, float], float]:
        model = build_model()
        optimizer = sgd(model)
        with laconic.Worker(model, optimizer, laconic.LocalSGD(period=3)) as worker:
            for step in range(6):
                train_step(model, optimizer, worker.rank, step)
            own = float(worker.meter.total.nbytes())
            return worker.metrics(over="ranks"), own

    (first, one), (second, other) = laconic.spawn(run, 2)
    assert {key: value for key, value in first.items() if not math.isnan(value)} == {
        key: value for key, value in second.items() if not math.isnan(value)
    }
    assert one != other, "rank 0 sends the model at the start"
    assert (first["bytes_mean"], first["bytes_max"]) == ((one + other) / 2, max(one, other))
    assert math.isnan(first["consensus_distance_mean"])


def test_a_rank_that_does_not_come_is_named() -> None:
    def run() -> str:
        model = build_model()
        with worker_of(model, timeout=20.0) as worker, pytest.raises(laconic.PeerError) as info:
            if worker.rank == 0:
                worker.metrics(over="ranks")
            else:
                worker.comm.meet("something else")
        return str(info.value)

    for text in laconic.spawn(run, 2):
        assert "rank 0: metrics(over='ranks') (step 0)" in text


def test_the_step_time_leaves_out_what_is_between_steps() -> None:
    model = build_model()
    optimizer = sgd(model)
    now = 0.0
    with laconic.Worker(model, optimizer, Silent()) as worker:
        worker.comm.now = lambda: now  # type: ignore[method-assign]
        worker.metrics()
        for step in range(6):
            if step == 3:
                with worker.consensus():
                    now += 100.0
            now += 2.0
            train_step(model, optimizer, 0, step)
        metrics = worker.metrics()
    assert metrics["step_seconds"] == 2.0
    assert metrics["steps"] == 6
    assert metrics["seconds"] == 112.0


def test_bad_input() -> None:
    with (
        worker_of(build_model()) as worker,
        pytest.raises(ValueError, match="over must be one of None, ranks, not 'all'"),
    ):
        worker.metrics(over="all")  # type: ignore[arg-type]


def test_the_table_in_the_documentation_has_the_keys() -> None:
    text = (ROOT / "docs" / "tracking.md").read_text()
    names = {name for row in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert set(KEYS) <= names
    counted = {
        name
        for row, kind in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", text, re.MULTILINE)
        if kind.strip() == "since the last call"
        for name in re.findall(r"`(\w+)`", row)
    }
    assert counted == {*COUNTED, "exchanges_with_RANK"}
