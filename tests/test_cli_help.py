"""Help texts: every option and setting is in them, with its choices, its default and an explanation."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from laconic import __version__, cli
from laconic.bench.strategies import find_strategy, strategy_names
from laconic.cli.command import options_group, parse_target
from laconic.cli.options import Option, options_of
from laconic.tasks import TASKS, find_task


def help_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str) -> str:
    monkeypatch.setenv("COLUMNS", "10000")  # no line breaks inside of sentences
    with pytest.raises(SystemExit) as info:
        cli.call(line.split())
    assert info.value.code == 0
    return capsys.readouterr().out


def assert_listed(text: str, options: list[Option]) -> None:
    lines = text.splitlines()
    for option in options:
        starts = [i for i, line in enumerate(lines) if line.split()[:1] == [option.flag]]
        assert len(starts) == 1, f"{option.flag} must be listed once"
        line = " ".join(lines[starts[0] : starts[0] + 2])  # an explanation after a long name is on a line of its own
        assert option.help[:40].rstrip(".") in line
        if typing.get_origin(option.hint) is typing.Literal:
            assert "{" + ",".join(map(str, typing.get_args(option.hint))) + "}" in line


@pytest.mark.parametrize("name", strategy_names())
def test_help_of_train_lists_every_setting_of_the_method(name, capsys, monkeypatch) -> None:
    kind = find_strategy(name)
    options = options_of(kind)
    assert [option.name for option in options] == [field.name for field in dataclasses.fields(kind) if field.init]
    assert all(option.help for option in options), "each setting is documented in Args"
    text = help_text(capsys, monkeypatch, f"train {name} --help")
    own = {option.name for option in options_group(cli.COMMANDS["train"]).options}
    assert_listed(text, [option for option in options if option.name not in own])
    for option in options:
        if option.name in own:
            assert f"{name}+{option.name}=VALUE" in text
    assert f"usage: laconic train {name} [--option value …]" in text


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("command", ["compare", "train local_sgd"])
def test_help_lists_every_setting_of_the_task(name, command, capsys, monkeypatch) -> None:
    options = [option for option in options_of(find_task(name)) if option.name != "steps"]
    assert all(option.help for option in options)
    assert_listed(help_text(capsys, monkeypatch, f"{command} --task {name} --help"), options)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_lists_every_option_of_the_command(name, capsys, monkeypatch) -> None:
    options = [option for option in options_group(cli.COMMANDS[name]).options if not option.positional]
    assert_listed(help_text(capsys, monkeypatch, f"{name} --help"), options)


def test_overview_names_commands_tasks_and_methods(capsys, monkeypatch) -> None:
    assert cli.call(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.COMMANDS)
    training = help_text(capsys, monkeypatch, "train --help")
    assert training.index("\n  METHOD ") < training.index("\n  --task "), "the method comes first"
    assert cli.call([]) == 2, "without a command there is nothing to do"
    assert all(name in help_text(capsys, monkeypatch, "train --help") for name in [*TASKS, *strategy_names()])
    assert cli.call(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f"laconic {__version__}\n")


@pytest.mark.parametrize(
    ("text", "metric", "value"),
    [
        ("accuracy=85", "accuracy", 0.85),
        ("accuracy=85%", "accuracy", 0.85),
        ("accuracy=0.85", "accuracy", 0.85),
        ("accuracy=0.5%", "accuracy", 0.005),
        ("85", "accuracy", 0.85),
        ("1", "accuracy", 1.0),
        ("loss=1.9", "loss", 1.9),
        ("bleu=27", "bleu", 27.0),
    ],
)
def test_targets(text: str, metric: str, value: float) -> None:
    assert parse_target(text, metric) == pytest.approx(value)
