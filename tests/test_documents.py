"""The code in README, docs and examples runs and does what the text says; links, figures and quoted messages exist."""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import json
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
        "DataLoader": torch.utils.data.DataLoader,
        "dataset": torch.utils.data.TensorDataset(torch.randn(2 * 12 * 64, 6), torch.randn(2 * 12 * 64, 2)),
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


@pytest.mark.skipif(not (ROOT / "laconic").exists(), reason="the wheel is tested outside of the repository")
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


LAUNCHES_ITSELF = {"own_task.py", "own_group.py", "lightning_trainer.py"}
NEEDS = {"hf_trainer.py": "transformers", "accelerate_loop.py": "accelerate"}
# The runs of each example, one after the other: its arguments, and what rank 0 prints. TMP is a folder for all of them.
RUNS: dict[str, list[tuple[list[str], str]]] = {
    "quickstart.py": [([], "step 200: loss")],
    "resume.py": [(["TMP"], "lowest loss"), (["TMP"], "continues after step 60")],
    "own_method.py": [([], "averaged ")],
    "digits.py": [([], "epoch 9: accuracy 9")],
    "nanogpt.py": [
        (["TMP", "--steps=20"], "step 20: held-out loss"),
        (["TMP", "--steps=40"], "step 40: held-out loss"),
    ],
    "resnet_ema.py": [(["--epochs=2"], "epoch 1: accuracy of the averaged EMA ")],
    "hf_trainer.py": [(["TMP", "--steps=8"], "step 8: best held-out loss ")],
    "accelerate_loop.py": [(["TMP", "--epochs=1"], "epoch 1: accuracy"), (["TMP", "--epochs=2"], "epoch 2: accuracy")],
}


def test_examples_are_short_and_all_run_below() -> None:
    found = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    assert found.keys() == RUNS.keys() | LAUNCHES_ITSELF
    assert {name for name, text in found.items() if len(text.splitlines()) >= 60} == set()


@pytest.mark.parametrize("example", sorted(RUNS))
def test_examples_run(example: str, tmp_path: Path) -> None:
    """Runs each example as torchrun does; test_machines.py uses torchrun itself."""
    if example in NEEDS:
        pytest.importorskip(NEEDS[example], reason=f"{NEEDS[example]} is not installed")
    path = ROOT / "examples" / example

    def run_it(arguments: list[str]) -> str:
        os.chdir(tmp_path)
        sys.argv = [str(path), *(str(tmp_path / "out") if one == "TMP" else one for one in arguments)]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(path), run_name="__main__")
        return printed.getvalue()

    for arguments, expected in RUNS[example]:
        printed = laconic.spawn(run_it, 2, arguments)
        assert expected in printed[0]
    if len(RUNS[example]) > 1 and example != "resume.py":
        assert RUNS[example][0][1] not in printed[0], "the second run must continue after the first"


def launch(example: str, folder: Path, *arguments: str) -> str:
    """Runs an example that starts its own workers, and returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_own_task_runs(tmp_path: Path) -> None:
    printed = launch("own_task.py", tmp_path)
    assert re.findall(r"^(\S+): ok, loss 0\.\d+$", printed, re.MULTILINE) == ["local_sgd+period=4", "allreduce"]


def test_a_group_of_another_engine(tmp_path: Path) -> None:
    assert "step 200 of 2 workers: loss 0." in launch("own_group.py", tmp_path)


def test_lightning_launches_two_devices(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: pip install 'laconic[lightning]'")
    assert "epoch 1: accuracy " in launch("lightning_trainer.py", tmp_path, "--epochs=1")
    (folder,) = tmp_path.rglob("last.ckpt.laconic")
    assert len(list(folder.rglob("rank-*.pt"))) == 2


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert all(curve[-1][0] > 0.8 for curve in names["curves"].values())
    assert "Divisible" in capsys.readouterr().out


PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES if "\n>>> " in page.read_text()])
def test_examples_of_pages(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples may write files
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
