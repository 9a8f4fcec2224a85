"""The command ``drivetrain conformance``: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from drivetrain.cli import command
from drivetrain.cli.conformance import KINDS, SCHEMA
from drivetrain.testing.checks import REGISTRIES

PARTS = """
import os

from drivetrain.clusters import TorchElasticEnvironment


class Right(TorchElasticEnvironment):
    def __init__(self, first=0, environ=None):
        super().__init__(environ)
        self.first = first
        print("a part prints")
        os.system("echo and so does a program that it starts")
        open("left_behind", "w").close()

    def global_rank(self):
        return super().global_rank() + self.first


class Wrong(Right):
    main_port = 7


def makes_one():
    return Right()
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "parts_of_mine.py"
    path.write_text(PARTS)
    return path


def test_the_kinds_are_those_that_have_a_kit() -> None:
    assert set(KINDS) == set(REGISTRIES)


def test_a_table_shows_each_check_and_what_was_seen(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["conformance", "cluster", "parts_of_mine.py:Right"]) == 0
    *rows, last = capfd.readouterr().out.splitlines()
    assert {row.split()[0] for row in rows} == {"ok"}
    assert last == f"cluster parts_of_mine.py:Right: {len(rows)} ok, 0 failed, 0 skipped"
    assert command.main(["conformance", "cluster", f"{file}:Right", "--args", '{"first": 1}']) == 1
    rows = capfd.readouterr().out.splitlines()
    failed = next(number for number, row in enumerate(rows) if row.startswith("fails   each_rank_is_there_once"))
    assert rows[failed + 1].split(maxsplit=1) == [
        "seen:",
        "global_rank() of the processes: [1, 2], and [0, 1] is right",
    ]
    assert rows[failed + 2].split(maxsplit=1)[1].startswith("The global ranks of all processes are 0, 1, ...")


def test_json_and_badge_are_all_that_is_printed(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["conformance", "cluster", "parts_of_mine:Right", "--check", "it_can_be_torn_down"]
    assert command.main([*words, "--json"]) == 0
    shown = capfd.readouterr()
    found = json.loads(shown.out)
    assert (found["schema"], found["kind"], found["part"], found["error"]) == (SCHEMA, *words[1:3], None)
    assert found["counts"] == {"ok": 1, "fails": 0, "skipped": 0}
    assert {"name", "sentence", "result", "seen", "seconds"} == set(found["checks"][0])
    assert "and so does a program that it starts" in shown.err
    assert command.main([*words, "--badge"]) == 0
    [line] = capfd.readouterr().out.splitlines()
    assert line.startswith("![drivetrain ")
    assert line.endswith("_cluster-1_of_1_checks-brightgreen)")


def test_what_cannot_be_tried_is_neither_right_nor_wrong(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["cluster", "slum"], "Did you mean 'slurm'?"),
        (["cluster", "no_such_module:Class"], "No module named 'no_such_module'"),
        (["cluster", "no_such_file.py:Class"], "There is no Python file"),
        (["cluster", "parts_of_mine:Left"], "has no Left"),
        (["cluster", "parts_of_mine:Right", "--args", '{"second": 1}'], "unexpected keyword argument 'second'"),
        (["cluster", "parts_of_mine:Right", "--settings", '{"rank": []}'], "Did you mean 'ranks'?"),
        (["cluster", "parts_of_mine:Right", "--check", "it_can_be_torn"], "Did you mean 'it_can_be_torn_down'?"),
        (["cluster", "slurm", "--settings", '{"ranks": [{}]}'], "SLURM_NTASKS"),
        (["loader", "DataLoader"], "A loader has no registered name"),
        (["accelerator", "xla"], "XLAAccelerator is not available here"),
    ):
        assert command.main(["conformance", *words]) == 2
        assert said in capfd.readouterr().err
    assert command.main(["conformance", "cluster", "slum", "--json"]) == 2
    assert "slurm" in json.loads(capfd.readouterr().out)["error"]


@pytest.mark.parametrize("words", [["cluster"], ["clusters", "slurm"], ["cluster", "slurm", "--args", "[1]"]])
def test_wrong_words_are_wrong_usage(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["conformance", *words])
    assert ended.value.code == 2


def test_nothing_is_left_behind(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = dict(os.environ)
    assert command.main(["conformance", "cluster", "parts_of_mine.py:makes_one"]) == 0
    assert list(folder.iterdir()) == []
    assert sorted(each.name for each in tmp_path.iterdir() if each.name != "__pycache__") == [file.name, folder.name]
    assert (dict(os.environ), os.getcwd()) == (before, str(tmp_path))


def test_help_imports_no_torch() -> None:
    code = """
import sys
from drivetrain.cli.conformance import main
try:
    main(["--help"])
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
