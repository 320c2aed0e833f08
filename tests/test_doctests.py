"""Runs the `>>>` examples in the docstrings of the package."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import laconic

PACKAGE = Path(laconic.__file__).parent
MODULES = sorted(
    ".".join(("laconic", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert tried, "the module has >>> in its source, but no example that doctest finds"
    assert not failed, "see the output above for what was expected"


def test_the_package_has_examples() -> None:
    assert {"laconic", "laconic.worker", "laconic.method"} <= set(MODULES)
