"""Dependencies inside the package point one way: no module imports or names one of a higher layer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import laconic

PACKAGE = Path(laconic.__file__).parent
DESIGN = Path(__file__).parent.parent / "docs" / "design.md"
# From the lowest to the highest: a module may use its own package and everything in the layers before its own. Modules
# of one layer do not use each other. "laconic" is the package's __init__.py, what users import.
LAYERS: list[list[str]] = [
    ["names", "rules", "version", "forms", "extras", "log", "ranges"],
    ["topology", "compress", "link"],
    ["comm"],
    ["method"],
    ["methods"],
    ["flat", "join"],
    ["agreement", "consensus", "replica", "watch", "wrappers", "stepping"],
    ["changes", "kernels", "nodes", "tracking"],
    ["slices"],
    ["running"],
    ["checkpoint"],
    ["saving"],
    ["worker", "launch"],
    ["simulate"],
    ["laconic", "preload"],
    ["emulate", "tasks", "integrations"],
    ["bench"],
    ["cli"],
    ["__main__"],
]
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
# A module's dotted name, or a path of the package, in a string.
NAMED = re.compile(r"\blaconic[./](\w+)|\b(bench|tasks|emulate|simulate|methods)/\w+")


def part_of(module: str) -> str:
    """Returns the part of the package in which a module is: "comm" for "laconic.comm.meter"."""
    return module.split(".")[1] if "." in module else module


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("laconic", *path.relative_to(PACKAGE).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), ast.parse(path.read_text())


def used_by(tree: ast.Module) -> Iterator[str]:
    """Yields the parts of the package that a source imports, anywhere in it, or names in a string that is no doc."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (part_of(alias.name) for alias in node.names if alias.name.split(".")[0] == "laconic")
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError("imports are absolute")
        elif isinstance(node, ast.ImportFrom) and node.module == "laconic":
            yield from (alias.name if alias.name in LEVELS else "laconic" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laconic."):
            yield part_of(node.module or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            for dotted, path in NAMED.findall(node.value):
                if (dotted or path) in LEVELS:
                    yield dotted or path


@pytest.mark.parametrize(("module", "tree"), [pytest.param(*pair, id=pair[0]) for pair in sources()])
def test_no_module_uses_a_higher_layer(module: str, tree: ast.Module) -> None:
    own = part_of(module)
    assert own in LEVELS, f"{module} is new: add {own!r} to LAYERS"
    wrong = sorted({used for used in used_by(tree) if used != own and LEVELS[used] >= LEVELS[own]})
    assert not wrong, f"{module} must not use {', '.join(wrong)}"


@pytest.mark.skipif(not DESIGN.exists(), reason="needs the repository")
def test_the_architecture_page_has_the_same_layers() -> None:
    found = re.search(r"^## Layers\n.*?```\n(.*?)```", DESIGN.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    lines = re.sub(r" \([^)]*\)", "", found[1]).splitlines()
    assert [line.split() for line in reversed(lines)] == LAYERS


def test_a_use_is_found_wherever_it_is() -> None:
    text = '''
"""Names laconic.bench in its documentation, which is fine."""
import laconic.comm.meter
from laconic import methods, spawn
def lazily():
    from laconic.emulate import Network
    return ["laconic.tasks", "compress/x.py", "methods/windows*.py"]
'''
    assert sorted(used_by(ast.parse(text))) == ["comm", "emulate", "laconic", "methods", "methods", "tasks"]
