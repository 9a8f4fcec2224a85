"""``drivetrain fit``, ``validate``, ``test`` and ``predict``, with the user's train.py of these tests."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.cli.conftest import PROGRAM

from drivetrain import errors
from drivetrain.cli import LightningCLI, class_files
from drivetrain.cli.command import main

Run = Callable[..., "subprocess.CompletedProcess[str]"]
QUIET = [
    "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=.",
    "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false",
]  # fmt: skip


@pytest.fixture
def run(programs: Any, tmp_path: Path) -> Run:
    """Run the command in a folder with train.py."""
    shutil.copy(PROGRAM, tmp_path / "train.py")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = programs.run("-m", "drivetrain.cli.command", *words, cwd=tmp_path)
        return done

    return run


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command in this process, which must end with code 2, and return what it says."""
    # Its classes live on after the test, and others find models by their names: this one's is of this file alone.
    (tmp_path / "train_of_user.py").write_text(Path(PROGRAM).read_text("utf-8").replace("CliDeep", "FitDeep"), "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def wrong(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(words)
        sys.modules.pop("train_of_user", None)
        assert ended.value.code == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        return shown.err

    return wrong


def test_a_class_of_a_file_is_trained_and_its_written_configuration_repeats_it(run: Run, tmp_path: Path) -> None:
    done = run("fit", "train.py:Net", "--data", "train.py:Data", "--model.width", "3", "--data.batch_size=16", *QUIET)
    assert done.returncode == 0, done.stderr
    written = tmp_path / "lightning_logs" / "version_0" / "config.yaml"
    config = yaml.safe_load(written.read_text())
    assert config["model"] == {"class_path": "train.py:Net", "init_args": {"width": 3, "lr": 0.05}}
    assert config["data"] == {"class_path": "train.py:Data", "init_args": {"batch_size": 16}}
    again = run("fit", str(written.relative_to(tmp_path)), "--model.lr=0.5")
    assert again.returncode == 0, again.stderr
    config["model"]["init_args"]["lr"] = 0.5
    assert yaml.safe_load((tmp_path / "lightning_logs" / "version_1" / "config.yaml").read_text()) == config


@pytest.mark.parametrize(("name", "shown"), [("validate", "val_loss"), ("test", "test_loss"), ("predict", "")])
def test_the_other_methods_of_the_trainer_have_commands_too(run: Run, name: str, shown: str) -> None:
    done = run(name, "train.py:Net", "--data=train.py:Data", "--trainer.logger=false", *QUIET[2:])
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_predictions_are_saved_beside_the_logs_unless_a_callback_has_them(run: Run, tmp_path: Path) -> None:
    done = run("predict", "train.py:Net", "--data=train.py:Data", *QUIET)
    path = tmp_path / "lightning_logs" / "version_0" / "predictions.pt"
    assert f"Predictions: {path}, a list" in done.stderr
    assert all(isinstance(each, torch.Tensor) for each in torch.load(path))
    path.unlink()
    done = run("predict", "train.py:Net", "--data=train.py:Data", "--return_predictions=false", *QUIET)
    assert (done.returncode, [*tmp_path.rglob("predictions.pt")]) == (0, [])


def test_a_model_with_loaders_of_its_own_needs_no_data(run: Run, tmp_path: Path) -> None:
    own = "import train\nclass Own(train.Net):\n    train_dataloader = train.Data()._loader\n"
    (tmp_path / "own.py").write_text(own)
    (tmp_path / "config.yaml").write_text("mine: of the user")
    done = run("fit", "own.py:Own", "--trainer.logger=false", *QUIET[2:])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "config.yaml").read_text() == "mine: of the user"


def test_help_of_a_class_has_its_arguments(run: Run) -> None:
    shown = run("fit", "train.py:Net", "--data", "train.py:Data", "--help").stdout
    for words in ("--model.width WIDTH", "units of the hidden layer", "--data.batch_size", "--trainer.max_epochs"):
        assert words in shown


class NothingRuns(LightningCLI):
    """Only parses."""

    def instantiate_classes(self) -> None: ...

    def _run_subcommand(self, name: str) -> None: ...


def test_a_spawned_rank_writes_the_file_of_a_class_too(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"{PROGRAM}:Net"
    parsed = cli("fit", f"--model={place}", model_class=None, datamodule_class=None, cls=NothingRuns)
    parser = pickle.loads(pickle.dumps(parsed._parser(parsed.subcommand)))
    monkeypatch.setattr(class_files, "imported", {})
    assert f"class_path: {place}" in parser.dump(parsed.config["fit"])
    assert "class_path: cli_program.Net" in parser.dump(parsed.config["fit"], format="yaml")  # for a checkpoint


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: TARGET"),
        (["trian_of_user.py:Net"], "trian_of_user.py. Did you mean 'train_of_user.py'?"),
        (["train_of_user.py:Nte"], "train_of_user.py has no Nte. Did you mean 'Net'?"),
        (["train_of_user.py"], "names no class. Write train_of_user.py:Net or train_of_user.py:FitDeep or"),
        (["train_of_user.py:Any"], "train_of_user.py:Any is"),
        (["train_of_user.py:Data"], "is the class Data itself, and no LightningModule. Write class Data(LightningMod"),
        (["train_of_user.py:Net", "--data=train_of_user.py:Net"], "and no LightningDataModule."),
        (["none.yaml"], "There is no file none.yaml."),
        (["Net"], "'Net' is neither a class in a file nor a configuration. Write train.py:Net or config.yaml."),
        (["nowhere.Net"], "There is no class at the path 'nowhere.Net'"),
        (["train_of_user.py:Net", "--trainer.max_epoch=3"], "Did you mean --trainer.max_epochs?"),
        (["train_of_user.py:Net", "--model.wdth=3"], "Did you mean width?"),
    ],
)
def test_what_cannot_be_is_answered_with_what_to_write(wrong: Callable[..., str], words: list[str], said: str) -> None:
    assert said in wrong("fit", *words)


def test_a_configuration_with_a_file_that_is_not_there_is_answered(wrong: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.yaml").write_text("model: {class_path: train_of_usr.py:Net}")
    # the path begins in the working directory, not beside the configuration
    assert f"{tmp_path}/train_of_usr.py. Did you mean 'train_of_user.py'?" in wrong("fit", "configs/a.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "trainer:\n  max_epochs: 3\n   logger: [\n",
            "a.yaml, line 3, 'logger: [': this is not YAML: mapping values",
        ),
        ("trainer: [1", "a.yaml, line 1, 'trainer: [1': this is not YAML: "),
        ("a: \x00", "a.yaml: this is not YAML: "),
        ("- fit\n- Net\n", "a.yaml has a list: ['fit', 'Net'], and a configuration has options by their names. Write"),
        ("", "a.yaml has None, and a configuration"),
        (
            "trainers: 3\n",
            "a.yaml: there is no option 'trainers'. Did you mean 'trainer'? Known: ckpt_path, config, data",
        ),
        ("verbose: true\n", "a.yaml: there is no option 'verbose'."),
        ("trainer:\n  max_epoch: 3\n", "Trainer has no argument max_epoch=3. Did you mean 'max_epochs'?"),
        ("trainer: {gpus: 2}\n", "Trainer has no argument gpus=2. "),
    ],
)
@pytest.mark.parametrize("words", [["a.yaml"], ["--model=train_of_user.py:Net", "-c", "a.yaml"]])
def test_a_configuration_of_a_wrong_form_is_answered_with_its_line_or_name(
    wrong: Callable[..., str], words: list[str], text: str, said: str
) -> None:
    Path("a.yaml").write_text(text)
    assert said in " ".join(wrong("fit", *words).split())


def test_without_jsonargparse_it_says_what_to_install(
    wrong: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors.importlib.util, "find_spec", lambda name: None)
    said = wrong("fit", "train_of_user.py:Net")
    assert 'needs the package jsonargparse, which is not installed. Run `pip install "drivetrain[cli]"`.' in said


@pytest.mark.parametrize("name", ["fit", "predict"])
def test_short_help_names_the_options_of_every_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert (ended.value.code, f"drivetrain {name} FILE.py:CLASS --help" in " ".join(shown.split())) == (0, True)
    assert len(shown.splitlines()) < 35
