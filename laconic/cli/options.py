"""Options of the command line, made from dataclasses: a field is an option, and the docstring's `Args` are its help.

Commands, methods, baselines and tasks are all dataclasses, so one function describes the options of each of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from laconic.bench.values import parse_value, placeholder
from laconic.names import suggestion

POSITIONAL = "positional"
"""`Annotated[T, POSITIONAL]` marks a field that is given by its position, without `--name`."""


@dataclass(frozen=True)
class Option:
    """One option of a command, or one setting of a method or task."""

    name: str
    hint: Any  # its type
    default: Any  # dataclasses.MISSING if it must be given
    help: str
    positional: bool = False

    @property
    def flag(self) -> str:
        return self.name if self.positional else "--" + self.name.replace("_", "-")


@dataclass(frozen=True)
class Group:
    """Options that a help text lists together.

    Args:
        title: The heading, such as "settings of the method local_sgd".
        label: The prefix of names in error messages, such as "local_sgd."; "" for none.
        options: The options.
    """

    title: str
    label: str
    options: list[Option]

    def without(self, names: set[str]) -> Group:
        """Returns the group without the options that have one of these names."""
        return dataclasses.replace(self, options=[option for option in self.options if option.name not in names])


def options_of(kind: type) -> list[Option]:
    """Returns the options that the fields of a dataclass describe.

    Example:
        >>> from laconic.methods import LocalSGD
        >>> [(option.flag, option.default) for option in options_of(LocalSGD)]
        [('--period', 8), ('--moments', 'local'), ('--compressor', None), ('--moments-every', 1)]
        >>> options_of(LocalSGD)[0].help
        'local steps between two rounds of averaging.'
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    helps = {name: text for base in reversed(kind.__mro__) for name, text in documented_arguments(base).items()}
    options = []
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        hint, positional = hints[field.name], False
        if typing.get_origin(hint) is Annotated:
            hint, *marks = typing.get_args(hint)
            positional = POSITIONAL in marks
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        options.append(Option(field.name, hint, default, helps.get(field.name, ""), positional))
    return options


def documented_arguments(kind: type) -> dict[str, str]:
    """Returns the entries of the section `Args` in a class's docstring, by name."""
    text = inspect.cleandoc(kind.__doc__ or "")
    found = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", text, flags=re.MULTILINE)
    entries: dict[str, str] = {}
    if found is None:
        return entries
    for entry in re.split(r"\n(?=\w)", textwrap.dedent(found[1])):
        name, colon, help_text = entry.partition(":")
        if colon and name.isidentifier():
            entries[name] = " ".join(help_text.split()).replace("`", "")
    return entries


def summary_of(kind: type) -> str:
    """Returns the first paragraph of a class's docstring."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())


class Parser(argparse.ArgumentParser):
    """Reports errors as a ValueError of one line, instead of a usage text and an exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message.removeprefix('argument ')}; see `{self.prog} --help`")


def parse(prog: str, description: str, groups: Sequence[Group], words: Sequence[str]) -> list[dict[str, Any]]:
    """Parses the options of a command. `--help` prints all of them and exits.

    Args:
        prog: The command as the user types it, such as "laconic train local_sgd".
        description: The first lines of the help text.
        groups: The options; their names must differ.
        words: The words after the command.

    Returns:
        For each group, the values of those options that were given, by name.

    Raises:
        ValueError: An option does not exist, or a value is not valid. The message suggests similar names.
    """
    parser = make_parser(prog, description, groups)
    given, unknown = parser.parse_known_args(words)
    name_of_command = prog.removeprefix("laconic ")  # error messages begin with "laconic: "
    flags = [option.flag for group in groups for option in group.options if not option.positional]
    for word in unknown:
        name = word.partition("=")[0]
        if name.startswith("-"):
            near = suggestion(name, flags)
            raise ValueError(f"{name_of_command} has no option {name}{near or ';'} `{prog} --help` lists all")
        raise ValueError(
            f"{name_of_command} does not expect {word!r}: options are written --name value; see `{prog} --help`"
        )
    return [
        {
            option.name: _convert(f"{group.label}{option.name}", option, getattr(given, option.name))
            for option in group.options
            if hasattr(given, option.name)
        }
        for group in groups
    ]


def known_words(groups: Sequence[Group], words: Sequence[str]) -> dict[str, Any]:
    """Returns the texts of those options that were given, and ignores all other words."""
    parser = make_parser("", "", groups, add_help=False)
    return vars(parser.parse_known_args([word for word in words if word not in ("-h", "--help")])[0])


def make_parser(prog: str, description: str, groups: Sequence[Group], add_help: bool = True) -> Parser:
    """Returns a parser of these options. It keeps values as texts, and leaves out options that are not given."""
    # A name that is not complete could become another option's name in a later version.
    positional = [option for group in groups for option in group.options if option.positional]
    places = "".join(f" {_place(option)}" for option in positional)
    parser = Parser(
        prog=prog,
        usage=f"{prog}{places} [--option value …]",
        description=description,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for group in groups:
        section = parser.add_argument_group(group.title)
        for option in sorted(group.options, key=lambda option: not option.positional):
            section.add_argument(option.flag, **_argument(option, is_setting=bool(group.label)))
    if add_help:
        section = parser.add_argument_group("help")
        section.add_argument("-h", "--help", action="help", help="show this text and exit")
    return parser


def _place(option: Option) -> str:
    many = "…" if typing.get_origin(option.hint) is tuple else ""
    name = option.name.upper() + many
    return name if option.default is dataclasses.MISSING else f"[{name}]"


def _argument(option: Option, is_setting: bool) -> dict[str, Any]:
    """Returns the arguments of argparse's `add_argument`. Flags of commands take no value, settings always do."""
    text = option.help.replace("%", "%%")
    if option.positional:
        many = typing.get_origin(option.hint) is tuple
        optional = option.default is not dataclasses.MISSING
        nargs = {"nargs": "*"} if many else {"nargs": "?"} if optional else {}
        return {"metavar": option.name.upper(), "help": _with_default(text, option), **nargs}
    if option.hint is bool and not is_setting:
        return {"action": "store_true", "help": text}
    # "none" is the default of a command's option, and a value only of settings.
    hint = option.hint if is_setting else _without_none(option.hint)
    return {"metavar": placeholder(hint), "help": _with_default(text, option)}


def _without_none(hint: Any) -> Any:
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 else hint


def _with_default(text: str, option: Option) -> str:
    if option.default is dataclasses.MISSING or "default" in text:
        return text
    default = value_text(option.default).replace("%", "%%")
    return f"{text.rstrip('.')} (default: {default})" if default else text


def value_text(value: Any) -> str:
    """Returns a value as the user would type it.

    Example:
        >>> value_text((0.9, 0.95)), value_text(None), value_text(True)
        ('0.9,0.95', 'none', 'true')
    """
    if isinstance(value, tuple):
        return ",".join(map(value_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _convert(name: str, option: Option, given: Any) -> Any:
    if isinstance(given, bool):
        return given
    if isinstance(given, list):
        kind = typing.get_args(option.hint)[0]
        return tuple(parse_value(name, word, kind) for word in given)
    return parse_value(name, given, option.hint)
