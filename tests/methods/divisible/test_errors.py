"""What goes wrong is reported on every rank, with the rank, the step and the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.compress import Log, Uniform
from tests.helpers import adam, build_model, train_step

D = 50


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": 0.5}, "ratio must be a whole number, at least 1, not 0.5"),
        ({"period": 0}, "period must be a whole number, at least 1, not 0"),
        ({"period": "often"}, "period must be a whole number, at least 1, not 'often'"),
        ({"background": "4bit"}, "background must be a compressor, 'auto' or None, not '4bit'"),
        ({"corrected": 1}, "corrected must be True or False, not 1"),
        ({"period": None, "corrected": True}, "corrected=True sends gradients in the background"),
        ({"max_period": 0}, "max_period must be a whole number, at least 1, not 0"),
        ({"delay": 0}, "delay must be a whole number, at least 1, not 0"),
        ({"delay": "often"}, "delay must be a whole number, at least 1, not 'often'"),
        ({"hops": 3}, "hops must be one of 1, 2, None, not 3"),
        ({"hops": True}, "hops must be one of 1, 2, None, not True"),
        ({"background": None, "hops": 2}, "hops=2 is for quantized messages, and background=None sends fp32"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        laconic.Divisible(**settings)


def report(method: laconic.Divisible, optimizer_kind: str, entries: slice) -> str:
    """Returns the error of this rank, where rank 1 has a NaN in `entries` of its gradient in step 2."""
    model = nn.Linear(D, 1, bias=False)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = kinds[optimizer_kind](model.parameters(), lr=1e-3)
    try:
        with laconic.Worker(model, optimizer, method) as worker:
            for step in range(1, 16):
                model.weight.grad = torch.ones(1, D)
                if worker.rank == 1 and step == 2:
                    model.weight.grad[0, entries] = torch.nan
                optimizer.step()
    except FloatingPointError as error:
        return str(error)
    except laconic.PeerError as error:
        return f"not the cause: {error}"
    return "nothing was noticed"


# The whole gradient is found at once; an entry when it is sent, which is within a sweep.
NAN = [
    (laconic.Divisible(5, 5), "adam", slice(0, D), (2,)),
    (laconic.Divisible(5, None), "sgd", slice(0, D), (2,)),
    (laconic.Divisible(5, 5, None), "sgd", slice(0, D), (2,)),
    (laconic.Divisible(50, 5), "adam", slice(3, 4), range(2, 8)),
    (laconic.Divisible(50, 5, None), "sgd", slice(3, 4), range(2, 8)),
    (laconic.Divisible(50, 5, Log(3), delay=2), "sgd", slice(3, 4), range(2, 8)),
    (laconic.Divisible(50, 5, corrected=True), "adam", slice(3, 4), range(2, 8)),
    (laconic.Divisible(50, 5, Uniform(4), hops=2), "adam", slice(3, 4), range(2, 8)),
    (laconic.Divisible(50, 10, Uniform(4), hops=2, delay=3), "sgd", slice(20, 21), range(2, 13)),
]


@pytest.mark.parametrize(("method", "optimizer", "entries", "steps"), NAN)
def test_a_nan_is_reported_on_every_rank_with_its_rank_and_step(
    method: laconic.Divisible, optimizer: str, entries: slice, steps: Any
) -> None:
    texts = laconic.spawn(report, 3, method, optimizer, entries)
    assert len(set(texts)) == 1, texts
    assert re.search(r"NaN or infinity .*rank 1\b", texts[0])
    found = re.search(r"at step (\d+)", texts[0])
    assert found, texts[0]
    assert int(found[1]) in steps


def test_a_learning_rate_that_differs_is_reported_on_every_rank_within_17_steps() -> None:
    def run(changed_at: int, steps: int) -> tuple[int, str]:
        model = build_model()
        optimizer = adam(model)
        try:
            with laconic.Worker(model, optimizer, laconic.Divisible(8, 3), timeout=60) as worker:
                for step in range(1, steps + 1):
                    if step == changed_at and worker.rank == 1:
                        optimizer.param_groups[0]["lr"] = 0.5
                    train_step(model, optimizer, worker.rank, step)
        except ValueError as error:
            return worker.step, str(error)
        return worker.step, "no error"

    # Compared in the steps 1, 2, 17, 33, …. In the last case, the end of the block comes before the next step.
    for changed_at, steps, found_at in ((1, 40, 2), (2, 40, 3), (10, 40, 18), (18, 40, 34), (17, 17, 17)):
        for step, text in laconic.spawn(run, 2, changed_at, steps):
            assert step == found_at
            assert f"at step {2 if step == 3 else step - step % 16 + 1} they differ" in text
            assert "rank 0: lr=0.01 betas=(0.9, 0.999)" in text
            assert "rank 1: lr=0.5 betas=(0.9, 0.999)" in text


def test_schedules_that_are_the_same_on_all_ranks_are_fine() -> None:
    def run() -> int:
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
        with laconic.Worker(model, optimizer, laconic.Divisible(8, 3)) as worker:
            for step in range(40):
                optimizer.param_groups[0]["lr"] = torch.tensor(0.01 / (1 + step))
                train_step(model, optimizer, worker.rank, step)
        return worker.step

    assert laconic.spawn(run, 2) == [40, 40]


@pytest.mark.parametrize(
    ("method", "tolerance"),
    [
        (laconic.Divisible(8, 3, delay=2), 1e-6),
        (laconic.Divisible(8, 3, None, delay=2), 1e-6),
        (laconic.Divisible(8, 3, hops=2), 0.02),  # in later steps, what owners had not passed on before is added
    ],
)
def test_weights_that_all_ranks_load_inside_the_block_are_the_result(
    method: laconic.Divisible, tolerance: float
) -> None:
    def run(idle: int) -> tuple[torch.Tensor, torch.Tensor]:
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        best = build_model(seed=9)
        with laconic.Worker(model, optimizer, method) as worker:
            for step in range(10):
                train_step(model, optimizer, worker.rank, step)
            model.load_state_dict(best.state_dict())
            for _ in range(idle):
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
                optimizer.step()
        return worker.x, torch.cat([p.detach().flatten() for p in best.parameters()])

    for runs in laconic.spawn(lambda: [run(0), run(7)], 3):
        for x, expected in runs:
            torch.testing.assert_close(x, expected, rtol=0, atol=tolerance)
