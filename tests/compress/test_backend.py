"""numba is imported at first use only, its absence is announced once, and it uses no kernel of other sources."""

import subprocess
import sys
import warnings
from pathlib import Path

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


def package(root):
    """Writes a package with two kernel files, a module they take a constant from, one they do not use, and a cache."""
    for folder in ("compress/kernels", "methods"):
        (root / folder / "__pycache__").mkdir(parents=True)
    kernels = [root / "compress/kernels/bits.py", root / "methods/average_numba.py"]
    kernels[0].write_text("from numba import njit\n")
    kernels[1].write_text("import numba\nfrom laconic.methods.average import BLOCK\n")
    others = [root / "methods/average.py", root / "methods/other.py"]
    for source in others:
        source.write_text("BLOCK = 1\n")
    compiled = {}
    for source in [*kernels, *others]:
        compiled[source.stem] = source.parent / "__pycache__" / f"{source.stem}.run-7.py311.nbi"
        compiled[source.stem].write_bytes(b"")
    return compiled


def test_a_change_anywhere_makes_all_kernels_compile_again(tmp_path):
    compiled = package(tmp_path)
    backend.forget_stale_kernels(tmp_path)
    assert not compiled["bits"].exists()
    assert not compiled["average_numba"].exists()
    assert compiled["other"].exists()

    compiled["bits"].write_bytes(b"")
    compiled["average_numba"].write_bytes(b"")
    (tmp_path / "methods/other.py").write_text("BLOCK = 2\n")
    backend.forget_stale_kernels(tmp_path)
    assert compiled["bits"].exists(), "no kernel uses anything of methods/other.py"

    for changed in ("compress/kernels/bits.py", "methods/average.py"):
        compiled["average_numba"].write_bytes(b"")
        (tmp_path / changed).write_text("import numba\nBLOCK = 2\n")
        backend.forget_stale_kernels(tmp_path)
        assert not compiled["average_numba"].exists()


def test_the_sources_of_all_kernels_are_found():
    """A module without `import numba` that a kernel imports from, and kernels outside of laconic/compress."""
    package = Path(backend.__file__).parents[1]
    names = {str(source.relative_to(package)) for source in backend.kernel_sources(package)}
    assert {"compress/kernels/bits.py", "compress/quantizers.py", "methods/averaging/anchor_numba.py"} <= names
    assert "worker.py" not in names


WITHOUT_A_CACHE = """
import logging, torch
from numba.core import caching
caching.CacheImpl._locator_classes = []  # as where no folder can be written
logging.basicConfig()
from laconic.compress.jit import kernel
double, triple = kernel(lambda x: 2 * x), kernel(error_model="numpy")(lambda x: 3 * x)
assert double(4) == 8 and triple(4) == 12
"""


def test_without_a_writable_folder_kernels_are_not_cached_and_the_log_says_so_once():
    done = subprocess.run([sys.executable, "-c", WITHOUT_A_CACHE], check=True, capture_output=True, text=True)
    assert done.stderr.count("numba finds no folder that it can write its cache to") == 1
