"""A worker compiles what its method may call before it trains, once on a machine, and says so."""

import logging
import os
import subprocess
import sys
import warnings

import pytest
import torch

import laconic
from laconic import kernels
from laconic.compress import Half, Log, Pick, Sign, TopK, Uniform
from laconic.methods.averaging import anchor
from laconic.methods.divisible import stretch

LARGE = max(anchor.LARGE, stretch.LARGE)


@pytest.mark.parametrize(
    ("method", "numel", "workers", "expected"),
    [
        (laconic.AllReduce(), LARGE, 4, set()),
        (laconic.A2CiD2(), LARGE, 4, set()),
        (laconic.LocalSGD(8), LARGE, 4, {"anchor"}),
        (laconic.LocalSGD(8), 1000, 4, set()),
        (laconic.LocalSGD(8, compressor=Uniform(4)), LARGE, 4, {"uniform"}),
        (laconic.LocalSGD(8, compressor=Uniform(4)), LARGE, 1, set()),
        (laconic.DiLoCo(8), LARGE, 4, set()),
        (laconic.DiLoCo(8, compressor=Uniform(4)), LARGE, 4, {"uniform"}),
        (laconic.DiLoCo(8, compressor=Uniform(4)), LARGE, 1, set()),
        (laconic.ADPSGD(compressor=TopK()), LARGE, 4, {"topk", "uniform"}),
        (laconic.QSGD(), LARGE, 4, {"stochastic"}),
        (laconic.EfficientAdam(), LARGE, 4, {"log", "identity"}),
        (laconic.EfficientAdam(up=Sign(), down=Half()), LARGE, 4, {"sign", "half", "identity"}),
        (laconic.Divisible(), LARGE, 4, {"uniform", "pick", "stretch"}),
        (laconic.Divisible(), LARGE, 1, set()),
        (laconic.Divisible(), 1000, 4, {"uniform", "pick"}),
        (laconic.Divisible(corrected=True), 1000, 4, {"uniform", "pick", "log"}),
        (laconic.Divisible(period=4), 1000, 4, {"uniform"}),
        (laconic.Divisible(background=Log(4)), 1000, 4, {"uniform", "log"}),
        (laconic.Divisible(background=Pick(4), period=None), 1000, 4, {"uniform"}),
        (laconic.Divisible(background=None), 1000, 4, set()),
    ],
    ids=lambda value: repr(sorted(value) if isinstance(value, set) else value),
)
def test_a_method_names_the_kernels_that_it_may_call(method, numel, workers, expected):
    assert method.kernels(numel, workers) == expected


def test_every_compressor_has_a_set_of_its_own_or_none():
    from laconic.compress.spec import NAMES

    assert {kind().kernels for kind in NAMES.values()} | {"stochastic", "topk signs", "anchor", "stretch"} == set(
        kernels.SETS
    )


def compiled() -> list[str]:
    """Returns one name for each type that each kernel is compiled for in this process."""
    from numba.core.dispatcher import Dispatcher

    from laconic.compress.kernels import blockwise, dense, topk
    from laconic.methods.averaging import anchor_numba
    from laconic.methods.divisible import stretch_numba

    found = [blockwise.kernels_of(kind) for kind in blockwise.KINDS.values()]
    functions = [one for kernels in found for one in kernels]
    for module in (dense, topk, anchor_numba, stretch_numba):
        functions += [one for one in vars(module).values() if isinstance(one, Dispatcher)]
    return [f"{one.py_func.__name__}{signature}" for one in functions for signature in one.signatures]


def train(methods: list[laconic.Method]) -> None:
    for method in methods:
        model = torch.nn.Linear(LARGE, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        with laconic.Worker(model, optimizer, method) as worker:
            before = compiled()
            for _ in range(3):
                model(torch.randn(2, LARGE)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            with worker.consensus():
                pass
        assert compiled() == before, f"{method} compiles while it trains"


METHODS = [
    laconic.LocalSGD(1),
    laconic.LocalSGD(1, compressor=Half()),
    laconic.ADPSGD(compressor=TopK()),
    laconic.QSGD(),
    laconic.EfficientAdam(up=Sign()),
    laconic.Divisible(),
    laconic.Divisible(period=1, corrected=True, hops=2),
    laconic.Divisible(period=1, background=Pick(4)),
]
IN_A_NEW_PROCESS = """
import laconic
from tests.test_kernels import METHODS, train
if __name__ == "__main__":
    laconic.spawn(train, 2, METHODS)
"""


def test_nothing_is_compiled_while_methods_train():
    # In a new process: the fork server of this one has loaded all kernels.
    subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], check=True, timeout=100)


COMPILES = """
import logging, sys
logging.basicConfig(format="%(name)s: %(message)s")
from laconic import kernels
kernels.prepare(["identity"])
"""


def prepare_in_processes(folder, number: int) -> list[str]:
    """Returns what each of several processes logs that need the same kernels at the same time."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", COMPILES]
    running = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(number)]
    logs = [process.communicate(timeout=100)[1] for process in running]
    assert not any(process.returncode for process in running), logs
    return logs


def test_one_of_several_processes_compiles_and_says_so(tmp_path):
    logs = prepare_in_processes(tmp_path, 2)
    assert sorted(logs) == ["", "laconic: compiling kernels (identity), once, about 1 s\n"]
    assert len({path.parent for path in tmp_path.rglob("*.*") if path.suffix in (".compiled", ".nbc")}) == 1
    assert prepare_in_processes(tmp_path, 1) == [""], "compiled again"


def test_a_process_that_waits_too_long_compiles_by_itself(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(kernels, "_folder", lambda: tmp_path)
    monkeypatch.setattr(kernels, "_prepared", set())
    monkeypatch.setattr(kernels, "WAIT_SECONDS", 0.2)
    with kernels._alone(), caplog.at_level(logging.WARNING, "laconic"):
        kernels.prepare(["identity"])  # a second open file: the lock is not this process's but that file's
    assert "another process has compiled kernels for 0.2 s" in caplog.text
    assert kernels._is_cached("identity")


WITHOUT_NUMBA = """
import sys, warnings

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numba", "llvmlite", "rich", "sklearn", "pyroute2", "sacrebleu", "PIL"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
warnings.simplefilter("error")
import torch
import laconic

def work():
    model = torch.nn.Linear(1 << 16, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for method in (laconic.LocalSGD(2), laconic.Divisible(period=2)):
            with laconic.Worker(model, optimizer, method):
                for _ in range(4):
                    model(torch.randn(2, 1 << 16)).sum().backward()
                    optimizer.step()
    return [str(one.message) for one in caught if "numba" in str(one.message)]

if __name__ == "__main__":
    found = laconic.spawn(work, 2)
    assert all(len(one) == 1 and "pip install 'laconic[fast]'" in one[0] for one in found), found
"""


def test_training_without_numba_works_and_warns_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_NUMBA)  # a file: spawn imports it again in the workers, where it blocks numba too
    subprocess.run([sys.executable, str(script)], check=True, timeout=100)


def test_preload_does_not_warn_without_numba(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernels.load_cached()
    assert caught == []
