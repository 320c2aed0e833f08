"""The code in README and examples runs and does what the text says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from tests.helpers import build_model

ROOT = Path(__file__).parent.parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def user() -> dict[str, Any]:
    """Returns what a reader of the README already has: a model, data, a loss."""
    torch.manual_seed(0)
    return {
        "torch": torch,
        "model": build_model(),
        "DistributedSampler": torch.utils.data.DistributedSampler,
        "dataset": range(96),
        "world_size": 2,
        "rank": 0,
        "loader": [(torch.randn(8, 6), torch.randn(8, 2)) for _ in range(12)],
        "loss": nn.functional.mse_loss,
        "evaluate": lambda model: model(torch.ones(1, 6)).sum().item(),
    }


def run(code: str) -> torch.Tensor:
    names = user()
    exec(code, names)
    worker = names["worker"]
    assert worker.step == 12
    return worker.x


def test_the_diff_is_a_loop_that_runs() -> None:
    (diff,) = blocks("diff")
    assert not any(line.startswith("-") for line in diff.splitlines()), "nothing of the user's loop goes away"
    code = "\n".join(line[2:] for line in diff.splitlines())
    first, second = laconic.spawn(run, 2, code)
    assert torch.equal(first, second)


def test_the_own_method_runs() -> None:
    own, *_ = blocks("python")
    loop = "\n".join(line[2:] for line in blocks("diff")[0].splitlines())
    name = re.search(r"class (\w+)\(laconic.Method\)", own)
    assert name is not None
    code = (
        own
        + "\n"
        + re.sub(
            r"laconic\.Worker\(model, optimizer, .*\) as", f"laconic.Worker(model, optimizer, {name[1]}()) as", loop
        )
    )
    first, second = laconic.spawn(run, 2, code)
    assert torch.equal(first, second)


def test_links_lead_somewhere() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http:", "https:", "mailto:")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_table_of_methods_is_complete() -> None:
    text = (ROOT / "README.md").read_text()
    for name in laconic.METHODS:
        assert f"`{name}`" in text, f"{name} is not in the README"


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_examples_are_short_and_run(example: str, tmp_path: Path) -> None:
    """Runs each example as torchrun does (test_machines.py uses torchrun itself), `resume` twice."""
    path = ROOT / "examples" / example
    assert len(path.read_text().splitlines()) < 60
    expected = {
        "quickstart.py": "step 200: loss",
        "resume.py": "continues after step 60",
        "own_method.py": "averaged ",
    }

    def run_it() -> str:
        os.chdir(tmp_path)
        sys.argv = [str(path), str(tmp_path / "checkpoint")]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(path), run_name="__main__")
        return printed.getvalue()

    for _ in range(2 if example == "resume.py" else 1):
        printed = laconic.spawn(run_it, 2)
    assert expected[example] in printed[0]
