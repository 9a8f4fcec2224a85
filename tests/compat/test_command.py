"""``drivetrain exec`` and ``python -m drivetrain.compat``: their own arguments. For the rest see tests/cli."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain import parity
from drivetrain.compat import command


@pytest.mark.parametrize("start", [("drivetrain.compat",), ("drivetrain.cli.command", "exec")], ids=" ".join)
def test_a_program_runs_with_the_switches_that_are_given(
    answer: Callable[..., str], tmp_path: Path, start: tuple[str, ...]
) -> None:
    (tmp_path / "program.py").write_text(
        "import json, sys, lightning\nfrom drivetrain import parity\n"
        "print(json.dumps([lightning.__version__, sys.argv, vars(parity.current())]))\n",
        encoding="utf-8",
    )
    for options, on in (((), set()), (("--numbers=original",), set(parity.NUMBERS))):
        version, argv, switches = json.loads(answer("-m", *start, *options, "program.py", "--numbers", "x"))
        assert version == "2.6.6"
        assert argv == ["program.py", "--numbers", "x"]
        assert {name for name, value in switches.items() if value} == {"pickle", *on}


def test_without_a_program_and_with_an_unknown_number_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (([], "PROGRAM"), (["--numbers", "orignal", "train.py"], "Did you mean 'original'?")):
        with pytest.raises(SystemExit) as ended:
            command.main(arguments)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_help_is_shown_without_installing_anything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    assert "undersized_windows" in "".join(capsys.readouterr().out.split())
    assert "DRIVETRAIN_COMPAT" not in os.environ
