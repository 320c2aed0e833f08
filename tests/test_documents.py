"""The code in README, docs and examples runs and does what the text says; links, figures and quoted messages exist."""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
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
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http:", "https:", "mailto:")):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_table_of_methods_is_complete() -> None:
    text = (ROOT / "README.md").read_text()
    for name in laconic.METHODS:
        assert f"`{name}`" in text, f"{name} is not in the README"


LAUNCHES_ITSELF = "own_task.py"


@pytest.mark.parametrize(
    "example", sorted({path.name for path in (ROOT / "examples").glob("*.py")} - {LAUNCHES_ITSELF})
)
def test_examples_are_short_and_run(example: str, tmp_path: Path) -> None:
    """Runs each example as torchrun does (test_machines.py uses torchrun itself), `resume` twice."""
    path = ROOT / "examples" / example
    assert len(path.read_text().splitlines()) < 60
    expected = {
        "quickstart.py": "step 200: loss",
        "resume.py": "continues after step 60",
        "own_method.py": "averaged ",
        "digits.py": "epoch 9: accuracy 9",
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


def test_the_example_that_launches_its_own_workers_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / LAUNCHES_ITSELF)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\S+): ok, loss 0\.\d+$", done.stdout, re.MULTILINE) == ["local_sgd+period=4", "allreduce"]


PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES if "\n>>> " in page.read_text()])
def test_examples_of_pages(page: Path) -> None:
    blocks = re.findall(r"```python\n(>>> .*?)```", page.read_text(), re.DOTALL)
    example = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, page.name, str(page), 0)
    assert example.examples
    assert not doctest.DocTestRunner().run(example).failed, "see the output above for what was expected"


def test_every_method_has_a_page() -> None:
    for name in laconic.METHODS:
        page = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
        figure = rf"\]\(\.\./figures/{name}\.svg\)"
        for part in (figure, "^## When to use it", "^## Settings", r"^(## |\*\*)Bytes", "^## (Differences|Theirs)"):
            assert re.search(part, page, re.MULTILINE), f"{name}.md has no {part}"


def test_figures_are_those_of_the_script() -> None:
    folder = ROOT / "docs" / "figures"
    figures = runpy.run_path(str(folder / "draw.py"))["FIGURES"]
    assert sorted(figures) == sorted(path.stem for path in folder.glob("*.svg"))
    for name, draw in figures.items():
        assert (folder / f"{name}.svg").read_text() == draw(), f"run docs/figures/draw.py: {name}.svg is old"


def templates() -> Iterator[str]:
    """Yields the strings in the sources of the package, with … in place of what f-strings insert."""
    for path in Path(laconic.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_quoted_messages_are_in_the_sources() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.*)`$", text, re.MULTILINE)
    assert len(quoted) > 40
    known = [re.sub(r"\s+", " ", template) for template in templates()]
    for message in quoted:
        assert len(message.replace("…", "").strip()) > 8, f"{message} says too little to be found"
        pattern = re.compile(".*?".join(map(re.escape, message.split("…"))))
        assert any(pattern.search(template) for template in known), f"no source has the message {message!r}"
