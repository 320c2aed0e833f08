"""Converts the values that users type on the command line, and says which values are possible."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

from laconic.compress import Compressor, parse
from laconic.names import suggestion

_PLACEHOLDERS = {int: "INT", float: "NUMBER", bool: "{true,false}", str: "TEXT", Path: "PATH", Compressor: "COMPRESSOR"}
_DESCRIPTIONS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Compressor: "a compressor such as Uniform(4)",
    type(None): "none",
}


def parse_value(name: str, text: str, hint: Any) -> Any:
    """Converts text from the command line to a value of the type `hint`.

    Args:
        name: The name of the setting, for error messages.
        text: A number, `true` or `false`, `none`, a word, a path, a compressor such as `Uniform(4)` or `uniform:4`, or,
            for a tuple, several values separated by commas.
        hint: The type of the dataclass field.

    Raises:
        ValueError: `text` is no value of this type.

    Example:
        >>> parse_value("period", "4", int), parse_value("clip", "none", float | None)
        (4, None)
        >>> parse_value("betas", "0.9,0.95", tuple[float, float])
        (0.9, 0.95)
        >>> parse_value("compressor", "Uniform(4)", Compressor | None)
        Uniform(bits=4, stochastic=False, block=2048, seed=0)
    """
    if typing.get_origin(hint) is tuple:
        entries, words = typing.get_args(hint), text.split(",")
        if len(entries) != len(words):
            raise ValueError(f"{name} must be {len(entries)} values separated by commas, not {text!r}")
        return tuple(parse_value(name, word, kind) for word, kind in zip(words, entries, strict=True))
    kinds, choices = _alternatives(hint)
    if text in choices:
        return choices[text]
    if text == "none" and type(None) in kinds:
        return None
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    if Compressor in kinds:
        return parse(text)
    if Path in kinds:
        return Path(text)
    if str in kinds:
        return text
    described = [*choices, *(_DESCRIPTIONS.get(kind, getattr(kind, "__name__", str(kind))) for kind in kinds)]
    expected = " or ".join(", ".join(described).rsplit(", ", 1))
    raise ValueError(f"{name} must be {expected}, not {text!r}{suggestion(text, choices)}")


def placeholder(hint: Any) -> str:
    """Returns what a help text shows in place of a value of this type.

    Example:
        >>> placeholder(typing.Literal["local", "averaged"]), placeholder(int | typing.Literal["auto"] | None)
        ('{local,averaged}', '{auto,INT,none}')
        >>> placeholder(tuple[float, float]), placeholder(int)
        ('NUMBER,NUMBER', 'INT')
    """
    if typing.get_origin(hint) is tuple:
        return ",".join(placeholder(kind) for kind in typing.get_args(hint) if kind is not ...)
    kinds, choices = _alternatives(hint)
    words = [*choices, *(_PLACEHOLDERS[kind] for kind in kinds if kind in _PLACEHOLDERS)]
    words += ["none"] if type(None) in kinds else []
    if len(words) == 1 and not choices:
        return words[0]
    return "{" + ",".join(word.strip("{}") for word in words) + "}"


def _alternatives(hint: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns the types of a union, and the values of its literals by their text."""
    is_literal = typing.get_origin(hint) is typing.Literal
    members = [hint] if is_literal else list(typing.get_args(hint)) or [hint]
    literals = [member for member in members if typing.get_origin(member) is typing.Literal]
    choices = {str(value): value for literal in literals for value in typing.get_args(literal)}
    return [member for member in members if member not in literals], choices
