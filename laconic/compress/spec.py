"""Compressors as short strings, for the command line: `log:3`, `uniform:8:stochastic`, `log:4:block=1024`."""

from dataclasses import MISSING, Field, fields
from typing import Any

from laconic.compress.compressor import Compressor
from laconic.compress.dense import Half, Identity
from laconic.compress.quantizers import Log, Pick, Sign, Ternary, Uniform
from laconic.compress.random_block import RandomBlock
from laconic.compress.topk import TopK
from laconic.names import look_up

NAMES: dict[str, type[Compressor]] = {
    "identity": Identity,
    "half": Half,
    "sign": Sign,
    "ternary": Ternary,
    "pick": Pick,
    "log": Log,
    "uniform": Uniform,
    "topk": TopK,
    "randomblock": RandomBlock,
}


def parse(text: str) -> Compressor:
    """The compressor that `text` names: a name, then settings in order or as setting=value, all separated by colons."""
    name, *arguments = text.strip().split(":")
    cls = look_up("compressor", name, NAMES)
    settings = {field.name: field for field in _fields(cls)}
    values: dict[str, Any] = {}
    for place, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if not equals:
            key, value = (list(settings)[place] if place < len(settings) else argument), argument
        if key not in settings or key in values:
            raise ValueError(f"{text!r}: {name} has no place for {argument!r}; its settings are {list(settings)}")
        values[key] = _value(settings[key], value, text)
    return cls(**values)


def spec(compressor: Compressor) -> str:
    """The text that `parse` turns back into `compressor`: what it is known by, then what differs from the defaults."""
    name = next(name for name, cls in NAMES.items() if type(compressor) is cls)
    words = [name]
    for place, field in enumerate(_fields(type(compressor))):
        value = getattr(compressor, field.name)
        if field.name in ("bits", "ratio"):
            words.append(str(value))
        elif value != field.default:
            in_order = place == len(words) - 1 and field.name in ("stochastic", "format")
            words.append((field.name if value is True else str(value)) if in_order else f"{field.name}={value}")
    return ":".join(words)


def _fields(cls: type[Compressor]) -> tuple[Field[Any], ...]:
    settings: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    assert all(field.default is not MISSING for field in settings)
    return settings


def _value(field: Field[Any], text: str, whole: str) -> Any:
    if field.type is bool:
        if text in (field.name, "True"):
            return True
        if text == "False":
            return False
        raise ValueError(f"{whole!r}: {field.name} is either written or left out, not {text!r}")
    if field.type in (int, float):
        try:
            return int(text) if field.type is int or text.isdigit() else float(text)
        except ValueError:
            raise ValueError(f"{whole!r}: {field.name} must be a number, not {text!r}") from None
    return text
