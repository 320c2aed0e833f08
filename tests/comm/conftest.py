"""Runs the tests of the verbs between real processes, and between simulated workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import laconic

Launch = Callable[..., list[Any]]


@pytest.fixture(params=["processes", "simulated"])
def launch(request: pytest.FixtureRequest) -> Launch:
    return laconic.spawn if request.param == "processes" else laconic.simulate
