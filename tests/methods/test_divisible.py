from __future__ import annotations

import copy
import itertools
import tempfile
import time
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from laconic.comm import Pending, Solo
from laconic.compress import Compressor, Log, Uniform
from laconic.methods import choice as choice_module
from laconic.methods import pace as pace_module
from laconic.methods import steering as steering_module
from laconic.methods.correction import Correction
from laconic.methods.means import OwnersMean
from laconic.methods.pace import FIRST, INTERVAL, ROUNDS, WINDOW, Pace
from laconic.methods.pieces import Layout, Piece, foreground_block, in_grains
from tests.helpers import OPTIMIZERS, adam, build_model, rank, train, train_step
from tests.oracles.divisible import divisible, foreground_blocks

METHODS = {
    "plain": laconic.Divisible(ratio=8, period=3, background=None),
    "late": laconic.Divisible(ratio=16, period=5, background=None, delay=3),
    "corrected": laconic.Divisible(
        ratio=16, period=5, moments="corrected", background=None, delay=2
    ),  # corrections add up to nothing
    "slower than a sweep": laconic.Divisible(ratio=16, period=2, background=None, delay=5),
    "coded": laconic.Divisible(ratio=8, period=3, background=Log(3)),
    "two hops": laconic.Divisible(ratio=8, period=3, background=Log(3), hops=2),
    "two hops, late": laconic.Divisible(ratio=8, period=2, delay=2, background=Log(3), hops=2),
    "auto": laconic.Divisible(ratio=8, background=None),
    "auto, coded": laconic.Divisible(ratio=8, background=Log(3)),
    "auto, two hops": laconic.Divisible(ratio=8, background=Log(3), hops=2),
}


def look(worker: laconic.Worker, d: int) -> dict[str, Any]:
    """What a worker and its method hold, as vectors (d)."""
    own: Any = worker.method
    lost, late = torch.zeros(d), torch.zeros(d)
    if isinstance(own._mean, OwnersMean):
        row = own._mean.layout.row
        mine = slice(worker.rank * row, min((worker.rank + 1) * row, d))
        lost[mine] = sum(r[: lost[mine].numel()] for r in own._mean.residuals[:1])
        for piece in own._flying:
            if piece.messages == 2:  # the owners' residuals know of this one already, x does not
                for owner, (part, message) in enumerate(zip(piece.parts, piece.wait(), strict=True)):
                    length = part.stop - part.start
                    coder, code = next(own._mean.coders.find(message, length))
                    late[part] += own._mean.said(piece, owner, 0, length) - coder.decode(code, length)
    return {
        "x": worker.x.clone(),
        "x_hat": own.x_hat.clone(),
        "e": own.moves(worker).residual(slice(0, d)),
        "lost": lost,
        "late": late,
        "in flight": len(own._flying),
        "period": own.metrics()["period"],
    }


def push(method: laconic.Method, steps: int, d: int = 83) -> list[dict[str, Any]]:
    """Every step has a random own move, known beforehand. The state before, after each step, and after the end."""
    model = nn.Linear(d, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moved = torch.zeros(d)
    with laconic.Worker(model, optimizer, method) as worker:
        seen = [{**look(worker, d), "moved": moved.clone()}]
        for step in range(steps):
            gradient = torch.randn(d, generator=torch.Generator().manual_seed(50 * step + worker.rank))
            moved -= 0.1 * gradient
            model.weight.grad = gradient.view_as(model.weight)
            optimizer.step()
            seen.append({**look(worker, d), "moved": moved.clone()})
    return [*seen, {**look(worker, d), "moved": moved.clone()}]


def check_invariants(by_step: list[tuple[dict[str, Any], ...]]) -> None:
    x_0 = by_step[0][0]["x"]
    for step, ranks in enumerate(by_step):
        assert all(torch.equal(rank["x_hat"], ranks[0]["x_hat"]) for rank in ranks), f"x̂ differs at step {step}"
        assert len({rank["period"] for rank in ranks}) == 1, f"periods differ at step {step}"
        lost = len(ranks) * mean(ranks, "lost") - mean(ranks, "late")
        torch.testing.assert_close(mean(ranks, "x") + lost, x_0 + mean(ranks, "moved"), rtol=1e-6, atol=2e-6)


def mean(ranks: Sequence[dict[str, Any]], name: str) -> Tensor:
    return torch.stack([rank[name] for rank in ranks]).double().mean(0)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_invariants_also_while_messages_are_in_flight(workers: int) -> None:
    # Only after 18 steps has "auto" measured; it need not do so in every world.
    methods = {name: method for name, method in METHODS.items() if workers == 3 or "auto" not in name}
    steps = 24 if workers == 3 else 12
    results = laconic.spawn(lambda: {name: push(method, steps) for name, method in methods.items()}, workers)
    for name in methods:
        by_step = list(zip(*(result[name] for result in results), strict=True))
        check_invariants(by_step)
        in_flight = {ranks[0]["in flight"] for ranks in by_step[1:-1]}
        assert max(in_flight) >= METHODS[name].delay
        assert by_step[-1][0]["in flight"] == 0
        assert all(torch.equal(rank["x"], by_step[-1][0]["x"]) for rank in by_step[-1]), "the agreed model"
        if "auto" not in name:
            assert bool(mean(by_step[-1], "lost").any()) == ("two hops" in name), "coarse codes leave something"


def test_sends_nothing_twice_and_forgets_nothing() -> None:
    """After a sweep without own moves, every worker is the mean, and what is sent from then on is zero."""

    def run() -> tuple[Tensor, Tensor, Tensor]:
        model = nn.Linear(40, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with laconic.Worker(
            model, optimizer, laconic.Divisible(ratio=40, period=4, background=None, delay=2)
        ) as worker:
            own: Any = worker.method
            own_move = torch.randn(40, generator=torch.Generator().manual_seed(worker.rank))
            expected = worker.x - torch.stack(worker.comm.all_gather(own_move)).mean(0)
            for step in range(8):
                model.weight.grad = (own_move if step == 0 else torch.zeros(40)).view_as(model.weight)
                optimizer.step()
            return expected, worker.x.clone(), own._flying[-1].sent[0].clone()

    for expected, x, sent in laconic.spawn(run, 3):
        torch.testing.assert_close(x, expected)
        torch.testing.assert_close(sent, torch.zeros(10))


ORACLE: dict[int, list[tuple[str, int, int | None, int, str, Compressor | None]]] = {
    # workers: optimizer, ratio, period, delay, moments, background
    2: [
        ("adam", 8, 3, 1, "local", None),
        ("adam", 83, 100, 1, "local", None),
        ("sgd", 8, 4, 1, "local", Log(4)),
        ("adam", 1024, 5, 3, "averaged", None),
    ],
    3: [
        ("sgd", 7, 2, 2, "averaged", None),
        ("adam", 8, 3, 2, "corrected", None),
    ],
    4: [
        ("sgd", 1, None, 1, "local", None),
        ("sgd", 16, 3, 2, "corrected", Uniform(4)),
    ],
}


@pytest.mark.parametrize("workers", ORACLE)
def test_agrees_with_the_oracle_for_200_steps(workers: int) -> None:
    steps = 200

    def run() -> list[list[Tensor]]:
        return [
            train(laconic.Divisible(ratio, period, moments, background, delay=delay), OPTIMIZERS[optimizer], steps)  # type: ignore[arg-type]
            for optimizer, ratio, period, delay, moments, background in ORACLE[workers]
        ]

    results = laconic.spawn(run, workers)
    for case, (optimizer, ratio, period, delay, moments, background) in enumerate(ORACLE[workers]):
        expected = divisible(OPTIMIZERS[optimizer], workers, steps, ratio, period, delay, moments, background)
        for worker in range(workers):
            torch.testing.assert_close(
                torch.stack(results[worker][case][:steps]),
                torch.stack([x[worker] for x in expected]),
                rtol=1e-3,
                atol=1e-4,
                msg=lambda text, case=case: f"case {case}, (step, coordinate): {text}",  # type: ignore[misc]
            )
        if period:
            assert not torch.equal(results[0][case][-2], results[1][case][-2]), "workers differ between messages"


def test_everything_in_the_foreground_is_the_mean_of_the_own_steps() -> None:
    def run() -> tuple[list[Tensor], list[Tensor]]:
        return train(laconic.Divisible(ratio=1, period=None), adam, 20), train(laconic.LocalSGD(period=1), adam, 20)

    for divisible_path, averaged in laconic.spawn(run, 2):
        for x, y in zip(divisible_path, averaged, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@given(d=st.integers(1, 300), ratio=st.integers(1, 400), first=st.integers(1, 10**6))
def test_foreground_blocks_cover_everything_once(d: int, ratio: int, first: int) -> None:
    turns = len(foreground_blocks(d, ratio))
    assert turns <= ratio
    blocks = [foreground_block(step, d, ratio) for step in range(first, first + turns)]
    assert sorted(i for block in blocks for i in range(d)[block]) == list(range(d))
    assert all(len(range(d)[block]) <= -(-d // ratio) for block in blocks)


@given(d=st.integers(1, 100), owners=st.integers(1, 9), cuts=st.lists(st.integers(0, 100)))
def test_pieces_cover_everything_once_and_owners_keep_their_rows(d: int, owners: int, cuts: list[int]) -> None:
    layout = Layout(d, owners)
    columns = [0, *sorted(min(cut, layout.row) for cut in cuts), layout.row]
    pieces = [layout.parts(start, stop) for start, stop in itertools.pairwise(columns)]
    assert sorted(i for parts in pieces for part in parts for i in range(d)[part]) == list(range(d))
    for parts in pieces:
        assert all(i // layout.row == owner for owner, part in enumerate(parts) for i in range(d)[part])


@pytest.mark.parametrize("owners", [1, 4])
@pytest.mark.parametrize("period", [1, 3, 4, 5, 7])
def test_large_pieces_begin_where_blocks_do_and_a_sweep_is_no_longer(period: int, owners: int) -> None:
    layout = Layout(1_863_690, owners)
    starts = list(range(0, layout.row, in_grains(-(-layout.row // period))))
    assert len(starts) == period
    for start, stop in itertools.pairwise([*starts, layout.row]):
        assert all(part.start % 2048 == 0 for part in layout.parts(start, stop))


@pytest.mark.parametrize(("d", "period"), [(33_000, 32), (32_769, 128)])
def test_no_piece_is_empty(d: int, period: int) -> None:
    layout = Layout(d, 1)
    assert layout.row == d
    for start in range(0, layout.row, in_grains(-(-layout.row // period))):
        assert layout.parts(start, start + 1)[0] == slice(start, start + 1)


class Mirror(Solo):
    """Others that are always exactly like this worker."""

    size = 3

    def channel(self, name: str = "background") -> Mirror:
        return self


@given(
    d=st.integers(1, 40),
    ratio=st.integers(1, 60),
    period=st.integers(1, 60),
    delay=st.integers(1, 5),
)
def test_workers_that_are_alike_are_as_one(d: int, ratio: int, period: int, delay: int) -> None:
    model = nn.Linear(d, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method = laconic.Divisible(ratio, period, background=None, delay=delay)
    sent: list[int] = []
    with laconic.Worker(model, optimizer, method, comm=Mirror()) as worker:
        own: Any = worker.method
        expected = worker.x.clone()
        sweep = -(-d // -(-d // period))
        for step in range(sweep + 7):
            gradient = torch.randn(d, generator=torch.Generator().manual_seed(step))
            expected -= gradient
            model.weight.grad = gradient.view_as(model.weight)
            optimizer.step()
            sent += [i for part in own._flying[-1].parts for i in range(d)[part]]
            assert len(own._flying) == min(step + 1, delay)
            if step == sweep - 1:
                assert sorted(sent) == list(range(d)), "a sweep sends each coordinate once"
        torch.testing.assert_close(worker.x, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("moments", "background", "hops"),
    [
        ("corrected", Log(3), 1),
        ("corrected", Log(3), 2),
        ("common", Log(3), 1),
        ("common", Log(3), 2),
        ("common", None, None),
        ("averaged", None, None),
    ],
)
def test_resumes_bit_for_bit_with_messages_in_flight(moments: Any, background: Any, hops: Any) -> None:
    method = laconic.Divisible(8, 3 if moments != "common" else 5, moments, background, delay=2, hops=hops)

    def run() -> tuple[list[Tensor], list[list[Tensor]]]:
        saved = []
        model = build_model()
        optimizer = adam(model)
        whole = []
        with laconic.Worker(model, optimizer, method) as worker:
            for step in range(14):
                train_step(model, optimizer, worker.rank, step)
                whole.append(worker.x.clone())
                if 3 <= step < 7:
                    state = {"optimizer": optimizer.state_dict(), "worker": worker.state_dict()}
                    torch.save(state, path := f"{folder}/{worker.rank}-{step}")
                    saved.append((step, path))
        whole.append(worker.x.clone())
        resumed = []
        for step, path in saved:
            state = torch.load(path, weights_only=True)
            assert state["worker"]["method"]["flying"], "the test is about this"
            model = build_model(seed=5)
            optimizer = adam(model)
            rest = whole[: step + 1]
            with laconic.Worker(model, optimizer, method) as worker:
                optimizer.load_state_dict(state["optimizer"])
                worker.load_state_dict(state["worker"])
                for later in range(step + 1, 14):
                    train_step(model, optimizer, worker.rank, later)
                    rest.append(worker.x.clone())
            resumed.append([*rest, worker.x.clone()])
        return whole, resumed

    with tempfile.TemporaryDirectory() as folder:
        for whole, resumed in laconic.spawn(run, 2):
            assert len(resumed) == 4
            for path in resumed:
                assert all(torch.equal(x, y) for x, y in zip(path, whole, strict=True))


@pytest.mark.parametrize("name", ["late", "coded", "two hops"])
def test_a_straggler_changes_nothing_but_time(name: str) -> None:
    def run() -> tuple[list[Tensor], list[Tensor]]:
        def slowly(model: nn.Module) -> torch.optim.Optimizer:
            optimizer = adam(model)
            if rank() == 1:
                optimizer.register_step_pre_hook(lambda *_: time.sleep(0.03))  # some 5 times the computing
            return optimizer

        return train(METHODS[name], adam, 20), train(METHODS[name], slowly, 20)

    for even, uneven in laconic.spawn(run, 3):
        assert all(torch.equal(x, y) for x, y in zip(even, uneven, strict=True))


def test_extreme_settings_and_fewer_coordinates_than_pieces() -> None:
    """5 coordinates, 4 workers: a row of 2, of which the third owner has 1 and the last none."""
    methods = [
        laconic.Divisible(ratio=10**6, period=7, background=None),
        laconic.Divisible(ratio=1, period=2, background=None),
        laconic.Divisible(ratio=3, period=1000, background=None),
        laconic.Divisible(ratio=3, period=1000, background=Log(3)),
        laconic.Divisible(ratio=3, period=1000, background=Log(3), hops=2),
        laconic.Divisible(ratio=3, period=1, background=Log(3)),
        laconic.Divisible(ratio=3, period=1, background=Log(3), hops=2),
        laconic.Divisible(ratio=3, max_period=1),
    ]
    results = laconic.spawn(lambda: [push(method, 12, d=5) for method in methods], 4)
    for runs in zip(*results, strict=True):
        check_invariants(list(zip(*runs, strict=True)))


def test_v_stays_positive_and_averaged_moments_agree_more() -> None:
    def spread(moments: Any) -> float:
        model = build_model()
        optimizer = adam(model)
        with laconic.Worker(model, optimizer, laconic.Divisible(8, 2, moments, None)) as worker:
            for step in range(60):
                train_step(model, optimizer, 4 * worker.rank, step)
                assert (worker.moments()["exp_avg_sq"] > 0).all()
            m = worker.moments()["exp_avg"]
            return (m - worker.comm.mean(m)).norm().item() / m.norm().item()

    for averaged, local in laconic.spawn(lambda: (spread("averaged"), spread("local")), 2):
        assert averaged < 0.7 * local


def test_corrected_gradients_become_the_mean_gradient() -> None:
    """With gradients that stay the same, stale news of them is no worse than fresh, whatever the pieces."""

    def run() -> tuple[Tensor, Tensor]:
        model = nn.Linear(30, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with laconic.Worker(model, optimizer, laconic.Divisible(30, 7, "corrected", None, delay=2)) as worker:
            own = torch.randn(30, generator=torch.Generator().manual_seed(worker.rank))
            for step in range(9):
                model.weight.grad = own.clone().view_as(model.weight)
                optimizer.step()
                if step == 0:
                    torch.testing.assert_close(model.weight.grad.view(-1), own)
            return model.weight.grad.view(-1), worker.comm.mean(own)

    for seen, expected in laconic.spawn(run, 3):
        torch.testing.assert_close(seen, expected)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 20))
def test_corrections_count_the_steps_also_when_pieces_change(widths: list[int], row: int) -> None:
    worker: Any = SimpleNamespace(x=torch.zeros(row), views=lambda vector: [vector])
    last, correction, column = [0] * row, Correction(worker), 0
    for step, width in enumerate(widths, start=1):
        part = slice(column, min(column + width, row))
        correction.total += 1
        piece = Piece([part], step, step + 1)
        assert correction.take(piece, part).tolist() == [1.0] * len(last[part])
        last[part] = [step] * len(last[part])
        assert correction.total.tolist() == [step - since for since in last]
        column = part.stop % row


def test_payload_is_the_formula() -> None:
    d, n, steps = 1000, 4, 10

    def run() -> list[tuple[int, int]]:
        counts = []
        for method in (
            laconic.Divisible(ratio=100, period=5, moments="local", background=None),
            laconic.Divisible(ratio=100, period=5, moments="local", background=Log(3)),
            laconic.Divisible(ratio=100, period=5, moments="local", background=Log(3), hops=2),
            laconic.Divisible(ratio=100, period=5, moments="averaged", background=None),
            laconic.Divisible(ratio=100, period=5, moments="corrected", background=None),
            laconic.Divisible(ratio=100, period=5, moments="corrected", background=Log(3)),
            laconic.Divisible(ratio=100, period=5, moments="common", background=Log(3)),
        ):
            model = nn.Linear(d, 1, bias=False)
            optimizer = torch.optim.Adam(model.parameters())
            with laconic.Worker(model, optimizer, method) as worker:
                for _ in range(steps):
                    model(torch.randn(4, d)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                total = worker.meter.total
                counts.append((total.nbytes("foreground"), total.nbytes("background")))
        return counts

    foreground = steps * round(2 * (n - 1) / n * 4 * 10)
    plain = steps * round(2 * (n - 1) / n * 4 * d / 5)
    coded = steps * (n - 1) * (4 + 3 * 200 // 8)  # a scale and 3 bits an entry
    # In two hops, a message starts in each step from the second on, of 2/5, 2/5 and 1/5 of each row; 250 are a row.
    messages = [(n - 1) * (4 + -(-3 * columns // 8)) for columns in (100, 100, 50)]
    two_hops = sum(2 * messages[piece] for piece in (0, 1, 2, 0)) + messages[1]
    gradient = steps * (n - 1) * (4 + 4 * 200 // 8)  # in 4 bits
    background = [plain, coded, two_hops, 3 * plain, 2 * plain, coded + gradient]
    short = steps * (n - 1) * (4 + 10 + 48)  # a scale, a byte an entry, a step's settings and the share
    expected = [*((foreground, nbytes) for nbytes in background), (short, coded)]
    assert laconic.spawn(run, n) == [expected] * n


class Clock(Solo):
    """Two workers, of which the other is twice as slow in computing and half as slow in sending."""

    size = 2

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x, x * torch.tensor([2.0, 0.5])]


def measure(pace: Pace, step: int, computing: float, transfer: float) -> int:
    """Feed windows until one is full; the step after it."""
    for _ in range(WINDOW):
        step = max(step, pace.next_window)
        assert pace.is_measuring(step)
        pace.add(step, computing, transfer)
        step += 1
    return step


def test_pace_takes_the_shortest_period_that_hides_the_transfer() -> None:
    pace = Pace(Clock(), 2, 64)
    assert not pace.is_measuring(FIRST - 1)
    step = measure(pace, 1, computing=0.5, transfer=9.0)
    assert pace.period == 10  # ⌈1.1 · 9 s / (2 · 0.5 s)⌉: the slowest of each
    for _ in range(ROUNDS - 1):
        step = measure(pace, step, computing=0.5, transfer=8.0)
    assert pace.period == 9
    assert not pace.is_measuring(step)
    assert pace.next_window == step - 1 + INTERVAL
    step = measure(pace, step, computing=0.5, transfer=7.2)
    assert pace.period == 9, "8 would do, but is not worth the change"
    measure(pace, step, computing=0.5, transfer=1e-4)
    assert pace.period == 2, "the least"


def test_pace_warns_once_where_the_link_is_too_slow() -> None:
    pace = Pace(Clock(), 2, 64)
    step = 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(ROUNDS + 3):
            step = measure(pace, step, computing=0.5, transfer=100.5)
            assert pace.period == 64
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "max_period=64: sending everything takes 100 s and computing a step 1 s" in text
    assert "would need a period of 111" in text


def test_pace_does_not_warn_while_a_smaller_code_may_be_allowed_yet() -> None:
    def warnings_of(hope: bool) -> list[str]:
        pace = Pace(Clock(), 2, 64, sizes=[100.0, 50.0, 25.0], allowed=2)
        if not hope:
            pace.hoped = 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = measure(pace, 1, computing=0.5, transfer=80.0)
            measure(pace, step, computing=0.5, transfer=80.0)
        assert (pace.code, pace.period) == (1, 64)
        return [str(warning.message) for warning in caught]

    assert warnings_of(hope=True) == [], "with a quarter of the largest it would be 45"
    (text,) = warnings_of(hope=False)
    assert "would need a period of 88" in text


def test_pace_does_not_warn_when_a_smaller_code_is_allowed_after_all() -> None:
    pace = Pace(Clock(), 2, 64, sizes=[100.0, 50.0, 25.0], allowed=2)
    step = measure(pace, 1, computing=0.5, transfer=49.0)
    measure(pace, step, computing=0.5, transfer=49.0)
    pace.hoped = 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pace.allow(3)
        measure(pace, pace.next_window, computing=0.5, transfer=49.0)
    assert (pace.code, pace.period) == (2, 54)


def test_pace_takes_a_smaller_code_before_a_longer_period() -> None:
    pace = Pace(Clock(), 4, 64, sizes=[100.0, 75.0, 50.0, 25.0], allowed=3)

    def measured(step: int, with_the_largest: float) -> int:
        return measure(pace, step, computing=0.5, transfer=with_the_largest * [1.0, 0.75, 0.5, 0.25][pace.code])

    assert (pace.code, pace.period) == (2, 4), "until something is known, the smallest that is allowed"
    step = measured(1, 2.0)
    assert (pace.code, pace.period) == (0, 4)
    step = measured(step, 2.5)  # twice 2.5 s are too much for 4 steps of 1 s, and twice ¾ of them are not
    assert (pace.code, pace.period) == (1, 4)
    step = measured(step, 40.0)
    assert (pace.code, pace.period) == (2, 22), "the smallest that is allowed, and ⌈1.1 · 20 s / 1 s⌉"
    assert pace.is_settled
    pace.allow(4)
    assert (pace.code, pace.period) == (3, 11), "the smallest, and ⌈1.1 · 10 s / 1 s⌉"
    step = measured(step, 1.3)  # with all allowed, a quarter of 4 steps of 1 s
    assert (pace.code, pace.period) == (2, 4), "the second would just do, but that is not worth the change"
    step = measured(step, 1.05)
    assert (pace.code, pace.period) == (1, 4)
    pace.lower(3)
    assert (pace.code, pace.period) == (1, 3)
    step = measured(step, 8.0)
    assert (pace.code, pace.period) == (3, 3)
    pace.allow(2)
    assert (pace.code, pace.period) == (1, 7), "⌈1.1 · 6 s / 1 s⌉"
    pace.allow(1)
    assert (pace.code, pace.period) == (0, 9)


def test_what_is_not_allowed_is_not_chosen_before_there_are_measurements_either() -> None:
    pace = Pace(Clock(), 4, 64, sizes=[100.0, 75.0, 50.0], allowed=3)
    pace.allow(2)
    assert (pace.code, pace.period) == (1, 4)
    step = measure(pace, 1, computing=0.5, transfer=30.0)
    assert (pace.code, pace.period) == (1, 33)
    pace.add(step, 0.5, 30.0)
    pace.allow(1)
    measure(pace, step + 1, computing=0.5, transfer=40.0)
    assert (pace.code, pace.period) == (0, 44), "what was measured with the code before does not count"


@pytest.mark.parametrize(
    ("unlike", "transfer", "period", "is_common"),
    [(False, 7.0, 8, True), (False, 9.0, 10, False), (True, 9.0, 30, True), (True, 10.0, 33, False)],
)
def test_common_is_kept_for_longer_periods_on_unlike_data(
    unlike: bool, transfer: float, period: int, is_common: bool
) -> None:
    """`transfer` is that of one bit, with which it begins; on unlike data there are three at least."""
    x = torch.zeros(1 << 20)
    choice = choice_module.Choice(Clock(), x, "auto", 1, 128, is_common=True)
    steering: Any = SimpleNamespace(data_is_unlike=unlike, quiet=0)
    step = measure(choice, 1, computing=0.5, transfer=transfer)
    measure(choice, step, computing=0.5, transfer=transfer)
    choice.follow_data(choice_module.LOOKED, steering)
    resumed = choice_module.Choice(Clock(), x, "auto", 1, 128, is_common=True)
    resumed.load_state_dict(choice.state_dict())
    for one in (choice, resumed):
        assert one.period == period
        assert one.is_too_long_for_common(choice_module.LOOKED) == (not is_common)


@pytest.mark.parametrize(
    ("hops", "quiet", "looked", "sure", "slow", "expected"),
    [
        (1, 2, 2, 99, 20.0, [1.0, 4.0, 0.6, 4.0]),
        (2, 2, 2, 99, 20.0, [1.0, 4.0, 0.6, 4.0]),
        (1, 99, 19, 99, 40.0, [1.0, 4.0, 1.0, 0.6, 4.0]),  # the period becomes too long for "common"
        (1, 99, 99, 4, 3.0, [1.0, 4.0, 1.0, 3.0, 4.0]),  # workers are seen to hold unlike data
    ],
)
def test_where_the_link_is_slow_codes_become_coarser_on_all_ranks_and_that_resumes_bit_for_bit(
    hops: Any, quiet: int, looked: int, sure: int, slow: float, expected: list[float]
) -> None:
    steps, method = 40, laconic.Divisible(ratio=8, hops=hops)

    def run() -> tuple[list[float], list[Tensor], list[list[Tensor]]]:
        pace_module.INTERVAL, steering_module.SURE = 5, sure
        choice_module.QUIET, choice_module.LOOKED = quiet, looked
        add = Pace.add

        def add_told(self: Pace, step: int, computing: float, transfer: float) -> None:
            with_the_largest = 0.5 if step < 10 or step > 28 else slow
            add(self, step, 1.0, with_the_largest * self._sizes[self.code] / self._sizes[0])

        Pace.add = add_told  # type: ignore[method-assign]

        def train(start: int, saved: dict[str, Any] | None) -> tuple[list[Tensor], list[float], dict[int, Any]]:
            model = build_model()
            optimizer = adam(model)
            path, bits, states = [], [], {}
            with laconic.Worker(model, optimizer, method) as worker:
                own: Any = worker.method
                if saved is not None:
                    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
                    worker.load_state_dict(copy.deepcopy(saved["worker"]))
                for step in range(start, steps):
                    train_step(model, optimizer, worker.rank, step)
                    path.append(torch.cat([own.x_hat, worker.x]))
                    bits.append(worker.method.metrics()["bits"])
                    if not own._choice.is_measuring(worker.step + 1):  # the first step after a break is not measured
                        state = {"optimizer": optimizer.state_dict(), "worker": worker.state_dict()}
                        states[step] = copy.deepcopy(state)
            return path, bits, states

        whole, bits, states = train(0, None)
        chosen = [step for step in states if step < steps - 1][::2]
        assert {bits[step] for step in chosen} == set(expected)
        return bits, whole, [train(step + 1, states[step])[0] for step in chosen]

    by_rank = laconic.spawn(run, 3)
    for bits, whole, resumed in by_rank:
        assert bits == by_rank[0][0]
        assert [number for number, _ in itertools.groupby(bits)] == expected
        d = whole[0].numel() // 2
        for x, other in zip(whole, by_rank[0][1], strict=True):
            assert torch.equal(x[:d], other[:d]), "the common vector"
        for rest in resumed:
            assert all(torch.equal(x, y) for x, y in zip(rest, whole[-len(rest) :], strict=True))


class Virtual(Mirror):
    """A link of `bandwidth` bytes a second in virtual time, on which messages go one after another."""

    def __init__(self, bandwidth: float, latency: float) -> None:
        super().__init__()
        self.seconds, self._free = 0.0, 0.0
        self._bandwidth, self._latency = bandwidth, latency

    def now(self) -> float:
        return self.seconds

    def mean_async(self, x: Tensor, *, out: Tensor | None = None) -> Pending[Tensor]:
        return OnItsWay(self, self._send(x), super().mean_async(x, out=out).wait())

    def _send(self, x: Tensor) -> float:
        self._free = max(self._free, self.seconds) + 4 * x.numel() / self._bandwidth
        return self._free + self._latency

    def _wait(self, arrival: float) -> None:
        self.meter.add("any", "mean", seconds=max(0.0, arrival - self.seconds))
        self.seconds = max(self.seconds, arrival)


class OnItsWay(Pending[Tensor]):
    def __init__(self, comm: Virtual, arrival: float, result: Tensor) -> None:
        self._comm, self._arrival, self._result = comm, arrival, result

    def wait(self) -> Tensor:
        self._comm._wait(self._arrival)
        return self._result


@pytest.mark.parametrize(("latency", "computing"), [(0.0, 1.0), (0.3, 1.0), (3.0, 1.0)])
def test_auto_hides_the_background_and_follows_the_link(latency: float, computing: float) -> None:
    d = 1000
    model = nn.Linear(d, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    comm = Virtual(bandwidth=4 * d / 6.0, latency=latency)  # 6 s for everything
    with laconic.Worker(model, optimizer, laconic.Divisible(ratio=1000, background=None), comm=comm) as worker:

        def steps(number: int) -> list[float]:
            """The seconds waited in each step."""
            waited = []
            for _ in range(number):
                comm.seconds += computing
                model.weight.grad = torch.zeros_like(model.weight)
                optimizer.step()
                waited.append(worker.meter.last_step.seconds())
            return waited

        steps(FIRST + ROUNDS * WINDOW)
        assert worker.method.metrics()["period"] == 7  # ⌈1.1 · 6 s / 1 s⌉
        # One wait a step is the foreground's, of 6 ms and the latency.
        assert max(steps(50)) < latency + 0.01
        assert worker.method.metrics()["waiting"] == pytest.approx(latency / (latency + computing), abs=0.02)
        comm._bandwidth *= 3
        steps(INTERVAL)
        assert worker.method.metrics()["period"] == 3
        comm._bandwidth /= 9
        steps(2 * INTERVAL)
        assert worker.method.metrics()["period"] == 20


def test_auto_goes_on_where_the_link_is_too_slow() -> None:
    model = nn.Linear(1000, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    comm = Virtual(bandwidth=4.0, latency=0.0)
    with laconic.Worker(model, optimizer, laconic.Divisible(background=None, max_period=50), comm=comm) as worker:
        expected = worker.x.clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2 * INTERVAL):
                comm.seconds += 1.0
                gradient = torch.randn(1000, generator=torch.Generator().manual_seed(step))
                expected -= gradient
                model.weight.grad = gradient.view_as(model.weight)
                optimizer.step()
        assert len(caught) == 1
        assert "takes 950 s and computing a step 1 s" in str(caught[0].message)
        assert worker.method.metrics()["period"] == 50
        assert worker.method.metrics()["waiting"] == pytest.approx(20 / 21, abs=0.02)
        torch.testing.assert_close(worker.x, expected, rtol=1e-4, atol=1e-4)


def test_metrics() -> None:
    def run() -> list[dict[str, float]]:
        model = build_model()
        optimizer = adam(model)
        seen = []
        with laconic.Worker(model, optimizer, METHODS["late"]) as worker:
            for step in range(8):
                train_step(model, optimizer, worker.rank, step)
                seen.append(worker.method.metrics())
        return seen

    for seen in laconic.spawn(run, 2):
        assert [m["period"] for m in seen] == [5.0] * 8
        assert [m["backlog"] for m in seen] == [1, 2, 3, 3, 3, 3, 3, 3]
        assert all(0 <= m["waiting"] <= 1 for m in seen)
        assert seen[-1]["waiting"] > 0
    assert laconic.Divisible().metrics() == {"period": 0.0, "bits": 4.0, "backlog": 0.0, "waiting": 0.0}
    assert laconic.Divisible(background=None).metrics()["bits"] == 32.0
    assert laconic.Divisible(period=None).metrics()["bits"] == 0.0


def test_a_nan_is_found_wherever_it_travels() -> None:
    def run(background: Any) -> str:
        model = nn.Linear(50, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        method = laconic.Divisible(ratio=50, period=5, background=background)
        try:
            with laconic.Worker(model, optimizer, method) as worker:
                for step in range(7):
                    model.weight.grad = torch.zeros(1, 50)
                    if worker.rank == 1 and step == 1:
                        model.weight.grad[0, 3] = torch.nan
                    optimizer.step()
        except (FloatingPointError, laconic.PeerError) as error:
            return str(error)
        return "nothing was noticed"

    assert all("NaN or infinity on rank 1" in text for text in laconic.spawn(run, 2, None))
    assert all("NaN or infinity on rank 1" in text for text in laconic.spawn(run, 2, Log(3)))


def test_averaged_moments_of_an_optimizer_without_any() -> None:
    def run() -> str:
        model = nn.Linear(5, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            pytest.raises(ValueError) as error,
            laconic.Worker(model, optimizer, laconic.Divisible(moments="averaged", background=None)),
        ):
            model(torch.ones(5)).sum().backward()
            optimizer.step()
        return str(error.value)

    expected = "moments='averaged' is for an optimizer that has some, and this one has none"
    assert laconic.spawn(run, 2) == [expected] * 2


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("ratio", 0.5, "ratio must be a whole number, at least 1, not 0.5"),
        ("period", 0, "period must be a whole number, at least 1, not 0"),
        ("period", "often", "period must be a whole number, at least 1, not 'often'"),
        ("moments", "global", "moments must be one of common, local, corrected, averaged, None, not 'global'"),
        ("max_period", 0, "max_period must be a whole number, at least 1, not 0"),
        ("delay", 0, "delay must be a whole number, at least 1, not 0"),
        ("hops", 3, "hops must be one of 1, 2, None, not 3"),
        ("hops", True, "hops must be one of 1, 2, None, not True"),
        ("background", "4bit", "background must be a compressor, 'auto' or None, not '4bit'"),
    ],
)
def test_bad_settings(setting: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        laconic.Divisible(**{setting: value})  # type: ignore[arg-type]


def test_moments_without_a_background_to_travel_in() -> None:
    with pytest.raises(ValueError, match="moments='corrected' travel in the background, so period must not be None"):
        laconic.Divisible(period=None, moments="corrected")


def test_all_bits_have_no_second_hop() -> None:
    with pytest.raises(ValueError, match="hops=2 is for codes, and background=None has none"):
        laconic.Divisible(background=None, hops=2)


def test_averaged_moments_take_no_compressor() -> None:
    with pytest.raises(ValueError, match="moments='averaged' needs background=None, not Log"):
        laconic.Divisible(moments="averaged", background=Log(4))
