"""Means of simulated workers have the bits of those between processes, whatever the length, dtype and way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import laconic
from laconic.comm import connect
from laconic.simulate import arithmetic

NUMELS = [1, 3, 4, 7, 100, 16_384, 16_385, 40_001, 100_007]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def means() -> list[Tensor]:
    comm = connect(torch.device("cpu"), 30.0)
    background, found = comm.channel(), []
    for numel in NUMELS:
        for dtype in DTYPES:
            x = torch.randn(numel, generator=torch.Generator().manual_seed(100 * numel + comm.rank)).to(dtype)
            found += [comm.mean(x), comm.mean_async(x).wait(), background.mean(x)]
    comm.meet("the end")
    return found


@pytest.mark.parametrize("workers", [2, 5])
def test_means_have_the_bits_of_real_processes(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = laconic.spawn(means, workers)[0]
    simulated = laconic.simulate(means, workers)
    assert all(torch.equal(a, b) for found in simulated for a, b in zip(found, real, strict=True))
    monkeypatch.setattr(arithmetic, "BLOCK_NBYTES", 1 << 12)  # as with many workers, which are summed in blocks
    assert all(torch.equal(a, b) for a, b in zip(laconic.simulate(means, workers)[0], real, strict=True))
