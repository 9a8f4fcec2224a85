"""The command ``drivetrain migrate``: what it writes, shows and refuses."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from drivetrain.cli.command import main as drivetrain_command
from drivetrain.legacy.migrate.command import main

PROGRAM = "import pytorch_lightning as pl\r\n\r\ntrainer = pl.Trainer(gpus=0, terminate_on_nan=True)\r\n"
MIGRATED = 'import drivetrain as pl\r\n\r\ntrainer = pl.Trainer(accelerator="cpu", terminate_on_nan=True)\r\n'


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_bytes(PROGRAM.encode())
    return path


def test_a_file_is_rewritten_in_place_and_reported_by_line(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.chmod(0o750)
    assert drivetrain_command(["migrate", str(program)]) == 1  # something is left
    assert program.read_bytes() == MIGRATED.encode()
    assert stat.S_IMODE(program.stat().st_mode) == 0o750
    assert os.listdir(program.parent) == ["train.py"]
    assert capsys.readouterr().out.splitlines() == [
        f"{program}:1: import pytorch_lightning as pl -> import drivetrain as pl",
        f'{program}:3: Trainer(gpus=0) -> Trainer(accelerator="cpu")',
        f"{program}:3: left: Trainer(terminate_on_nan=True): write detect_anomaly=True, or "
        "callbacks=[EarlyStopping(..., check_finite=True)]",
        "1 file: 1 changed, 1 line left for you.",
    ]


@pytest.mark.parametrize("diff", [True, False])
def test_the_report_for_programs_is_the_same(program: Path, capsys: pytest.CaptureFixture[str], diff: bool) -> None:
    assert main([str(program), "--json", "--diff" if diff else "--check"]) == 1
    report = json.loads(capsys.readouterr().out)
    [file] = report["files"]
    assert (report["changed"], report["left"], file["file"], file["changes"]) == (1, 1, str(program), True)
    assert [(each["line"], each["is_left"]) for each in file["remarks"]] == [(1, False), (3, False), (3, True)]
    assert file["remarks"][0]["text"] == "import pytorch_lightning as pl -> import drivetrain as pl"
    assert ("+import drivetrain as pl" in file.get("diff", "")) is diff
    assert program.read_bytes() == PROGRAM.encode()


def test_a_second_run_changes_nothing(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(program)])
    before = program.stat()
    main([str(program)])
    assert program.stat().st_mtime_ns == before.st_mtime_ns
    assert capsys.readouterr().out.splitlines()[-1] == "1 file: 0 changed, 1 line left for you."


@pytest.mark.parametrize("option", ["--diff", "--check"])
def test_options_that_write_nothing(program: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([option, str(program)]) == 1
    assert program.read_bytes() == PROGRAM.encode()
    output = capsys.readouterr().out
    assert "1 would change" in output
    assert ("+import drivetrain as pl" in output) is (option == "--diff")


def test_the_exit_code_tells_whether_there_is_something_to_do(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import lightning as L\n", encoding="utf-8")
    assert main(["--check", str(path)]) == 1
    assert main(["--diff", str(path)]) == 0
    assert main([str(path)]) == 0
    assert main(["--check", str(path)]) == 0


def test_nothing_is_written_if_one_file_cannot_be_parsed(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program.parent / "old.py").write_text("x = 1\nprint 'two'\n", encoding="utf-8")
    assert main([str(program), str(program.parent / "old.py")]) == 2
    assert program.read_bytes() == PROGRAM.encode()
    error = capsys.readouterr().err
    assert f"{program.parent / 'old.py'}:2: this is no Python 3" in error
    assert "Nothing was written." in error


def test_a_notebook_a_configuration_and_a_missing_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.ipynb").write_text("{}", encoding="utf-8")
    assert main([str(tmp_path / "train.ipynb")]) == 2
    assert "notebooks are not rewritten. Convert it with `jupyter nbconvert --to script`" in capsys.readouterr().err
    assert main([str(tmp_path / "train.py")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_a_configuration_is_rewritten_and_reported_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fit.yaml"
    path.write_bytes(b"class_path: lightning.pytorch.loggers.CSVLogger\r\nmodel: lightning.Nothing\r\n")
    assert main([str(tmp_path)]) == 1
    assert path.read_bytes() == b"class_path: drivetrain.loggers.CSVLogger\r\nmodel: lightning.Nothing\r\n"
    changed, left, end = capsys.readouterr().out.splitlines()
    assert changed == f"{path}:1: lightning.pytorch.loggers.CSVLogger -> drivetrain.loggers.CSVLogger"
    assert left.startswith(f"{path}:2: left: lightning.Nothing: drivetrain has no such name.")
    assert end == "1 file: 1 changed, 1 line left for you."


def test_a_folder_stands_for_its_python_files(program: Path) -> None:
    for name in ("package/a.py", ".hidden/b.py", "package/data.txt"):
        path = program.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(PROGRAM.encode())
    main([str(program.parent), str(program)])
    assert program.read_bytes() == (program.parent / "package" / "a.py").read_bytes() == MIGRATED.encode()
    assert (program.parent / ".hidden" / "b.py").read_bytes() == PROGRAM.encode()
    assert (program.parent / "package" / "data.txt").read_bytes() == PROGRAM.encode()


def test_a_link_keeps_pointing_to_its_file(program: Path) -> None:
    link = program.parent / "link.py"
    link.symlink_to(program)
    main([str(link)])
    assert link.is_symlink()
    assert program.read_bytes() == MIGRATED.encode()


def test_the_generation_can_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.py"
    path.write_text("from pytorch_lightning.callbacks import ProgressBar\n", encoding="utf-8")
    assert main(["--generation", "1.3", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == "from drivetrain.callbacks import TQDMProgressBar as ProgressBar\n"
    with pytest.raises(SystemExit):
        main(["--generation", "0.9", str(path)])
    assert "invalid choice: '0.9'" in capsys.readouterr().err
