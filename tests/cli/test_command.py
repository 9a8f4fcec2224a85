"""The command ``drivetrain``: it finds its subcommands and imports them when they are called."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import drivetrain
from drivetrain.cli.command import COMMANDS, Command, main, parser_of


def test_the_package_can_be_run_as_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", "report", tmp_path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "has no run in it" in done.stderr) == (2, True)


def test_help_of_every_command_imports_no_torch() -> None:
    code = """
import contextlib, io, json, sys
import drivetrain.forecast.memory  # of the result that the command of a plan reads
from drivetrain.cli import command, completion
for name in command.COMMANDS:
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            command.main([name, "--help"])
    except SystemExit as ended:
        assert ended.code == 0
    heavy = {"torch", "numpy", "rich", "jsonargparse", "yaml", "importlib.metadata"} & set(sys.modules)
    print(json.dumps([name, shown.getvalue(), sorted(heavy), len(sys.modules)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    helps = {name: (text, heavy, count) for name, text, heavy, count in map(json.loads, done.stdout.splitlines())}
    assert list(helps) == list(COMMANDS)
    for name, (text, heavy, count) in helps.items():
        assert f"usage: drivetrain {name} " in text
        assert text == parser_of(name).format_help()  # the help shows the parser that completion reads
        assert (name, heavy) == (name, [])
        assert count < 300  # modules, of which Python and argparse need most; torch has 1,100


def test_help_lists_every_command_under_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    parts = capsys.readouterr().out.split("\n\n")
    for name, each in COMMANDS.items():
        [heading] = [part for part in parts if f"\n  {name} " in part]
        assert heading.startswith(f"{each.group}:\n")


def parsers(name: str, parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser of a command, or those of its subcommands."""
    below = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    yield from (its for each in below for its in each.choices.values()) if below else [parser]


def test_the_page_has_a_row_for_every_command_and_tells_which_print_json() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = {
        name: [cell.strip() for cell in row.split("|")[2:-1]]
        for row in page.splitlines() if row.startswith("| `drivetrain ")
        for name in re.findall(r"`drivetrain ([a-z-]+)`", row.split("|")[1])
    }  # fmt: skip
    assert list(rows) == list(COMMANDS)
    for name, (about, prints_json, _) in rows.items():
        assert about
        has_option = {
            any("--json" in each.option_strings for each in its._actions) for its in parsers(name, parser_of(name))
        }
        assert has_option == {prints_json == "yes"}


@pytest.mark.parametrize(
    "words",
    [
        ["checkpoint", "verify", "nowhere"], ["checkpoint", "diff", "nowhere", "here"], ["goodput", "nowhere"],
        ["stacks", "nowhere"], ["diff", "nowhere", "here"], ["conformance", "cluster", "nowhere:Part"],
        ["migrate", "nowhere.py"], ["report", "nowhere"],
    ],
    ids=lambda words: " ".join(words[:2]),
)  # fmt: skip
def test_what_cannot_be_tried_is_one_json_document_and_exit_code_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main([*words, "--json"]) == 2
    shown = capfd.readouterr()
    error = json.loads(shown.out)["error"]
    assert "nowhere" in error
    assert error in shown.err
    assert main(words) == 2  # and without the option, it is only said on stderr
    assert capfd.readouterr() == ("", shown.err)


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_usage_of_every_command_exits_with_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--no-such-option"])
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out) == (2, "")
    assert "error:" in shown.err


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_reader_that_ends_early_is_no_error(options: list[str]) -> None:
    words = [sys.executable, *options, "-m", "drivetrain.cli.command", "explain"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": ""}
    ) as started:
        assert started.stdout
        assert started.stderr
        started.stdout.close()
        assert (started.stderr.read(), started.wait()) == (b"", 141)


def test_another_broken_pipe_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: Sequence[str], prog: str) -> int:
        raise BrokenPipeError(prog)

    monkeypatch.setitem(sys.modules, "drivetrain.cli.explain", SimpleNamespace(main=broken))
    with pytest.raises(BrokenPipeError, match="drivetrain explain"):
        main(["explain"])


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
    monkeypatch.setitem(COMMANDS, "answer", Command("somewhere", "for this test"))
    monkeypatch.setitem(sys.modules, "drivetrain.somewhere", SimpleNamespace(main=answered))
    assert main(["answer", "a", "--help", "-m", "--", "b"]) == 7
    assert capsys.readouterr().out == "drivetrain answer ['a', '--help', '-m', '--', 'b']\n"
    monkeypatch.setattr(sys, "argv", ["drivetrain", "answer", "c"])
    assert main() == 7
    assert capsys.readouterr().out == "drivetrain answer ['c']\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["rnu"], "Did you mean 'run'?"), (["--verbose"], "required: COMMAND")],
)
def test_wrong_usage_is_answered(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert {*COMMANDS} <= {*capsys.readouterr().err.split()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_entry_leads_to_a_function(name: str) -> None:
    module = COMMANDS[name].load()
    assert callable(module.main)
    assert callable(module.parser)
    assert COMMANDS[name].help
