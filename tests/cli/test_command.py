"""The command ``drivetrain``: it finds its subcommands and imports them when they are called."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import drivetrain
from drivetrain.base.registry import load
from drivetrain.cli import command
from drivetrain.cli.command import COMMANDS, Command, main


def test_help_lists_the_commands_and_imports_no_torch() -> None:
    code = """
import json, sys
from drivetrain.cli.command import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    heavy = {"torch", "numpy", "rich", "jsonargparse"} & set(sys.modules)
    print(json.dumps([ended.code, sorted(heavy), "drivetrain.compat" in sys.modules]))
"""
    for arguments in (["--help"], ["checkpoint", "--help"], ["exec", "--help"], ["run", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        *shown, ended = done.stdout.splitlines()
        assert json.loads(ended) == [0, [], arguments[0] == "exec"]
        if arguments == ["--help"]:
            assert [line.split()[0] for line in shown[shown.index("commands:") + 1 :]] == list(COMMANDS)


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain.cli.command", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"drivetrain {drivetrain.__version__}\n"


def answered(arguments: list[str], prog: str) -> int:
    print(prog, arguments)
    return 7


def test_a_command_gets_what_follows_its_name_and_answers_with_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS, "answer", Command("somewhere:answered", "for this test"))
    monkeypatch.setattr(command, "load", {"somewhere:answered": answered}.__getitem__)
    assert main(["answer", "a", "--help", "-m", "--", "b"]) == 7
    assert capsys.readouterr().out == "drivetrain answer ['a', '--help', '-m', '--', 'b']\n"
    monkeypatch.setattr(sys, "argv", ["drivetrain", "answer", "c"])
    assert main() == 7
    assert capsys.readouterr().out == "drivetrain answer ['c']\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "COMMAND"), (["rnu"], "Did you mean 'run'?"), (["--verbose"], "required: COMMAND")],
)
def test_wrong_usage_is_answered(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_entry_leads_to_a_function(name: str) -> None:
    assert callable(load(COMMANDS[name].function))
    assert COMMANDS[name].help
