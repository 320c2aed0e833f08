"""Several machines: an example launched by torchrun on two emulated hosts, with the commands of docs/machines.md."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import laconic
from laconic.emulate import EmulationError, Network, parse_links

ROOT = Path(__file__).parent.parent


def launch(address: str, endpoint: str, folder: Path) -> str:
    """Runs on one host the command that a user types there."""
    # Emulated hosts have no names, so torchrun cannot find out by itself whether the endpoint is its own address; the
    # script tells it.
    example = ROOT / "examples"
    command = [str(example / "two_machines.sh"), address, endpoint, str(example / "quickstart.py")]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "LOCAL_", "MASTER", "TORCHEL"))}
    done = subprocess.run(
        command,
        cwd=folder,
        env=clean | {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        opened = Network(parse_links("1gbit", 2)).__enter__()
    except EmulationError as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


def test_two_machines(network: Network, tmp_path: Path) -> None:
    addresses = [host.address for host in network.hosts]
    before = network.counters()

    def on_host() -> str:
        return launch(addresses[int(os.environ["RANK"])], addresses[0], tmp_path)

    outputs = laconic.spawn(on_host, 2, hosts=network.hosts)
    after = network.counters()
    assert "step 200: loss" in outputs[0] + outputs[1]
    assert (tmp_path / "quickstart.pt").exists()
    # 25 rounds of averaging 1409 parameters; each of two workers sends all of them
    assert all(late[0] - early[0] > 25 * 4 * 1409 for early, late in zip(before, after, strict=True))
