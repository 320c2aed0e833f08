"""Frameworks that are missing or too old."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

import pytest


@pytest.mark.parametrize("name", ["transformers", "lightning", "accelerate"])
def test_a_framework_that_is_missing_or_too_old(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.delitem(sys.modules, f"laconic.integrations.{name}", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    expected = (
        rf"laconic\.integrations\.{name} needs {name} \d+\.\d+ or newer, which is not installed: .*laconic\[{name}\]"
    )
    with pytest.raises(ImportError, match=expected):
        importlib.import_module(f"laconic.integrations.{name}")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.9.1")
    with pytest.raises(ImportError, match=rf"needs {name} \d+\.\d+ or newer, and 0\.9\.1 is installed"):
        importlib.import_module(f"laconic.integrations.{name}")
