"""What the tests of integrations share: hosts whose network interfaces count, and comparisons of runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from laconic.emulate import EmulationError, Host, Network, parse_links

STEPS = 24  # of the runs whose traffic is counted


@contextmanager
def two_hosts() -> Iterator[Sequence[Host]]:
    """Opens an emulated network of two hosts, for the argument `hosts` of `laconic.spawn`."""
    try:
        network = Network(parse_links("1gbit", workers=2))
        network.__enter__()
    except EmulationError as error:
        pytest.skip(str(error))
    try:
        yield network.hosts
    finally:
        network.close()


def sent_nbytes() -> int:
    """Returns the bytes that have left this host's network interface, as whole Ethernet frames."""
    (line,) = re.findall(r"eth0:(.*)", Path("/proc/thread-self/net/dev").read_text())
    return int(line.split()[8])


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def require_close(one: Sequence[float], other: Sequence[float]) -> None:
    assert len(one) == len(other) > 0
    assert one == pytest.approx(other, rel=1e-4)
    assert one[-1] < one[0], "nothing was learnt, so equal losses would show nothing"
