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


# The modules with the longest tests, one for each process of `make test`.
LONG = ("test_conformance.py", "test_other_sizes.py", "test_devices.py", "test_nodes.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets each process of `make test` begin with a module of long tests.

    pytest-xdist gives each process a contiguous part, and moves only what has not begun: a long test that begins last
    would run alone.
    """
    short = [item for item in items if item.path.name not in LONG]
    parts = len(LONG)
    items[:] = [
        item
        for i, name in enumerate(LONG)
        for item in (
            *(item for item in items if item.path.name == name),
            *short[len(short) * i // parts : len(short) * (i + 1) // parts],
        )
    ]
