"""Settings for all tests."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from laconic import launch
from tests.bench import chromium

# Workers are forked from a process that has loaded the kernels, which saves each of them half a second.
launch.PRELOAD.append("laconic.preload")

# No deadlines: the time of an example depends on what else the machine does.
settings.register_profile("laconic", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)
settings.load_profile("laconic")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Chromium]:
    executable = chromium.find()
    if executable is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with chromium.Chromium(executable, tmp_path_factory.mktemp("profile")) as running:
        yield running
