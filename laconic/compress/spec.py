"""Compressors as texts, for the command line: `Uniform(8, stochastic=True)`, or short, `uniform:8:stochastic`."""

import re
from dataclasses import Field
from typing import Any

from laconic.compress.compressor import Compressor, settings_of
from laconic.compress.dense import Half, Identity
from laconic.compress.quantizers import Log, Pick, Sign, Uniform
from laconic.compress.topk import TopK
from laconic.names import look_up
from laconic.rules import check_text

NAMES: dict[str, type[Compressor]] = {
    cls.__name__.lower(): cls for cls in (Identity, Half, Sign, Pick, Log, Uniform, TopK)
}


def parse(text: str) -> Compressor:
    """Returns the compressor that `text` describes; `str(compressor)` is the inverse.

    Args:
        text: a call as in Python, such as `Uniform(4)` or `Sign()`; or the compressor's name in lower case, then its
            settings, separated by colons. A setting is written as `name=value`, or as its value alone if the settings
            before it are written too. In the short form, a flag that is set is written as its name.

    Returns:
        The compressor.

    Raises:
        ValueError: an unknown name or setting, or a value that is not allowed.

    Example:
        >>> from laconic.compress import parse
        >>> parse("uniform:8:stochastic")
        Uniform(bits=8, stochastic=True, block=2048, seed=0)
        >>> parse("log:4:block=1024")
        Log(bits=4, block=1024)
        >>> parse("Log(4, block=1024)") == parse("log:4:block=1024")
        True
        >>> str(parse("log:4:block=1024"))
        'log:4:block=1024'
    """
    check_text("a compressor", text, "log:3")
    if text.count("(") != text.count(")"):
        state = "closed" if "(" in text else "opened"
        raise ValueError(f"{text!r}: the bracket is not {state}; write it as in Uniform(4)")
    call = re.fullmatch(r"([A-Za-z]\w*)(?:\((.*)\))?", text.strip())
    if call is None:
        name, *arguments = text.strip().split(":")
    else:
        name, arguments = call[1].lower(), [part.strip() for part in (call[2] or "").split(",") if part.strip()]
    cls = look_up("compressor", name, NAMES)
    settings = {field.name: field for field in settings_of(cls)}
    values: dict[str, Any] = {}
    for position, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if not equals:
            key, value = (list(settings)[position] if position < len(settings) else argument), argument
        if key in values:
            raise ValueError(f"{text!r}: {argument!r} sets {key} for the second time")
        if key not in settings:
            known = f"its settings are {', '.join(settings)}" if settings else "it has none"
            raise ValueError(f"{text!r}: {argument!r} is not a setting of {name}; {known}")
        values[key] = _convert(settings[key], value, text)
    return cls(**values)


def _convert(field: Field[Any], value: str, text: str) -> Any:
    if field.type is bool:
        if value in (field.name, "True"):
            return True
        if value == "False":
            return False
        raise ValueError(f"{text!r}: write {field.name!r} to set {field.name}, or leave it out; not {value!r}")
    if field.type in (int, float):
        try:
            return int(value) if field.type is int or value.isdigit() else float(value)
        except ValueError:
            raise ValueError(f"{text!r}: {field.name} must be a number, not {value!r}") from None
    return value
