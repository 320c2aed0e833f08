"""Imports packages that only some parts of laconic need, or says which extra installs them."""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtra(ModuleNotFoundError, RuntimeError):
    """A package of an extra is not installed. The message has the command that installs it."""


def need(module: str, extra: str) -> Any:
    """Returns an imported module.

    Args:
        module: its dotted name.
        extra: the extra in pyproject.toml that has its package.

    Raises:
        MissingExtra: the package is not installed.

    >>> need("no_such_package.inside", "tasks")
    Traceback (most recent call last):
    laconic.extras.MissingExtra: no_such_package is not installed: pip install 'laconic[tasks]'
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtra(f"{package} is not installed: pip install 'laconic[{extra}]'", name=package) from None
