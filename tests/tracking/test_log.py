"""The logger `laconic`, and the ranges that profilers show."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings

from torch.profiler import profile

import laconic
from laconic.log import warn
from tests.helpers import batch, build_model, rank, sgd, train_step


def test_records_have_the_rank() -> None:
    def run() -> str:
        written = io.StringIO()
        handler = logging.StreamHandler(written)
        handler.setFormatter(logging.Formatter("%(rank)s %(levelname)s %(message)s"))
        logging.getLogger("laconic").addHandler(handler)
        model = build_model()
        optimizer = sgd(model)
        with warnings.catch_warnings(record=True) as issued, laconic.Worker(model, optimizer, laconic.AllReduce()):
            warnings.simplefilter("always")
            for step in range(4):
                train_step(model, optimizer, 0, step)  # the same data on both ranks
        assert [str(warning.message)[:30] for warning in issued] == ["the local gradients of all 2 r"] * (rank() == 0)
        return written.getvalue()

    first, second = laconic.spawn(run, 2)
    assert first.startswith("0 WARNING the local gradients of all 2 ranks were equal")
    assert first.count("\n") == 1
    assert second == ""

    def log() -> str:
        written = io.StringIO()
        handler = logging.StreamHandler(written)
        handler.setFormatter(logging.Formatter("%(rank)s %(message)s"))
        logger = logging.getLogger("laconic")
        logger.addHandler(handler)
        logger.warning("here")
        return written.getvalue()

    assert laconic.spawn(log, 2) == ["0 here\n", "1 here\n"]


def test_a_process_without_handlers_sees_each_text_once() -> None:
    def run() -> str:
        warnings.simplefilter("always")
        logger = logging.getLogger("laconic")
        assert not logger.hasHandlers()
        with contextlib.redirect_stderr(io.StringIO()) as written:
            warn("something is odd")
            logger.warning("tracking is off")
        return written.getvalue()

    (written,) = laconic.spawn(run, 1)
    assert written.count("UserWarning: something is odd\n") == 1
    assert written.endswith("\ntracking is off\n")


def test_a_profiler_shows_the_verbs_and_the_waits() -> None:
    def run() -> set[str]:
        model = build_model()
        optimizer = sgd(model)
        with profile() as trace, laconic.Worker(model, optimizer, laconic.Divisible(period=2)) as worker:
            for step in range(4):
                train_step(model, optimizer, worker.rank, step)
            with worker.consensus():
                model(batch(0, 0)[0])
        return {event.key for event in trace.key_averages() if event.key.startswith("laconic::")}

    for found in laconic.spawn(run, 2):
        assert found >= {
            "laconic::before_step",
            "laconic::after_step",
            "laconic::consensus",
            "laconic::drain",
            "laconic::end",
            "laconic::meet",
            "laconic::wait all_gather",
            "laconic::wait mean",
        }
