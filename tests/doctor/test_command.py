"""``drivetrain doctor``: its lines, its JSON and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from drivetrain.doctor import command
from drivetrain.doctor.checks import NOTE, WRONG, Check, Finding, Result
from drivetrain.doctor.command import main


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace what the checks find."""

    def replace(*severities: str) -> None:
        def run(check: Check) -> Result:
            findings = [Finding(f"{each} {check.name}.", "So.", "that.", each) for each in severities]
            return Result(check.name, ["a fact"], findings if check.name == "disk" else [], 1.0)

        monkeypatch.setattr(command, "run", run)

    return replace


@pytest.mark.parametrize(
    ("severities", "code", "last"),
    [((), 0, "0 wrong, 0 to note"), ((NOTE,), 0, "0 wrong, 1 to note"), ((WRONG, NOTE), 1, "1 wrong, 1 to note")],
)
def test_only_what_is_wrong_fails(
    finds: Callable[..., None], severities: tuple[str, ...], code: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(*severities)
    assert main([]) == code
    *lines, end = capsys.readouterr().out.splitlines()
    assert end.startswith(last)
    assert "fine  clock       a fact" in lines
    shown = [f"{each:<6}disk        {each} disk. So. Write: that." for each in severities]
    assert [line for line in lines if "Write" in line] == shown
    assert main(["--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["wrong"]) == (1, code)
    assert [each["severity"] for result in found["checks"] for each in result["findings"]] == list(severities)


def test_only_the_named_checks_run(finds: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    finds()
    assert main(["disk", "clock"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[:-1]] == ["clock", "disk"]


def test_ctrl_c_ends_it_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(check: Check) -> Result:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    assert main([]) == 130
    assert capsys.readouterr() == ("", "drivetrain doctor: interrupted.\n")


def test_ctrl_c_leaves_json_with_the_checks_that_were_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(check: Check) -> Result:
        if check.name == "clock":
            raise KeyboardInterrupt
        return Result(check.name, ["a fact"], [], 1.0)

    monkeypatch.setattr(command, "run", interrupted)
    assert main(["--json", "limits", "clock"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["checks"]] == ["limits"]
    assert found["error"] == "drivetrain doctor: interrupted."


@pytest.mark.parametrize(("arguments", "said"), [(["disc"], "Did you mean 'disk'?"), (["--jason"], "--jason")])
def test_wrong_usage_is_answered(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_help_imports_no_torch() -> None:
    code = """
import sys
from drivetrain.cli.command import main
try:
    main(["doctor", "--help"])
except SystemExit as ended:
    print(ended.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
