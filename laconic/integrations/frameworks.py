"""Checks that a framework is installed in a version with which its integration works."""

from __future__ import annotations

import importlib.metadata
import re


def require(package: str, least: str) -> None:
    """Raises if a framework is missing or too old. Each module of `laconic.integrations` calls it first.

    Args:
        package: the framework's name, which is also that of the extra and of the module.
        least: the oldest version that works, MAJOR.MINOR.

    Raises:
        ImportError: the message names the version and the command that installs it.

    >>> require("torch", "2.0")
    >>> require("torch", "99.0")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ImportError: laconic.integrations.torch needs torch 99.0 or newer, and ... is installed: pip install ...
    """
    remedy = f"pip install --upgrade 'laconic[{package}]'"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"laconic.integrations.{package} needs {package} {least} or newer, which is not installed: {remedy}"
        ) from None
    if _release(found) < _release(least):
        raise ImportError(
            f"laconic.integrations.{package} needs {package} {least} or newer, and {found} is installed: {remedy}"
        )


def _release(version: str) -> tuple[int, ...]:
    """Returns (MAJOR, MINOR)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
