"""numba is imported at first use only, and its absence is announced once."""

import subprocess
import sys
import warnings

import pytest
import torch

from laconic.compress import Log, backend


def test_importing_the_package_does_not_import_numba():
    subprocess.run([sys.executable, "-c", "import sys, laconic.compress; sys.exit('numba' in sys.modules)"], check=True)


def test_without_numba_torch_runs_and_says_so_once(monkeypatch):
    x = torch.randn(100)
    expected = Log(3).encode(x)
    monkeypatch.setitem(sys.modules, "laconic.compress.kernels", None)
    backend._numba_kernels.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="plain torch"):
            code = Log(3).encode(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(Log(3).encode(x), code)
        assert torch.equal(code, expected)
    finally:
        backend._numba_kernels.cache_clear()


def test_kernels_are_for_main_memory_and_fp32():
    assert backend.kernels_for(torch.zeros(1), torch.zeros(1, dtype=torch.uint8)) is not None
    assert backend.kernels_for(torch.zeros(1, device="meta")) is None
    assert backend.kernels_for(torch.zeros(1, dtype=torch.float64)) is None
