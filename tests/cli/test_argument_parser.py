from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentError

from drivetrain.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.cli import LightningArgumentParser
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger
from drivetrain.settings import DOCS, Settings

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("devices=1", 1),
        ("devices=auto", "auto"),
        ("devices=-1", -1),
        ("devices=[0,1]", [0, 1]),
        ("devices=0,1", "0,1"),
        ("precision=bf16-mixed", "bf16-mixed"),
        ("precision=64", 64),
        ("fast_dev_run=true", True),
        ("fast_dev_run=1", 1),
        ("max_epochs=-1", -1),
        ("max_epochs=null", None),
        ("max_time=00:00:01:00", "00:00:01:00"),
        ("max_time=1:00:00:00", "1:00:00:00"),  # to YAML 1.1 a number to the base of sixty
        ("max_time={minutes: 5, hours: 1}", {"minutes": 5, "hours": 1}),
        ("limit_train_batches=1", 1),
        ("limit_train_batches=1.0", 1.0),
        ("limit_val_batches=0.5", 0.5),
        ("overfit_batches=2", 2),
        ("overfit_batches=0.5", 0.5),
        ("val_check_interval=4", 4),
        ("val_check_interval=1.0", 1.0),
        ("val_check_interval=00:00:10:00", "00:00:10:00"),
        ("val_check_interval={minutes: 5}", {"minutes": 5}),
        ("deterministic=warn", "warn"),
        ("deterministic=false", False),
        ("logger=false", False),
        ("logger=null", None),
        ("gradient_clip_val=1", 1),
        ("gradient_clip_val=0.5", 0.5),
        ("gradient_clip_algorithm=value", "value"),
        ("benchmark=true", True),
        ("plugins=null", None),
        ("profiler=simple", "simple"),
        ("default_root_dir=runs/a", "runs/a"),
        ("check_val_every_n_epoch=null", None),
        ("num_sanity_val_steps=-1", -1),
    ],
)
def test_t34_an_option_has_the_value_and_the_kind_that_it_would_have_in_python(
    parser: LightningArgumentParser, option: str, value: Any
) -> None:
    name = option.partition("=")[0]
    for parsed in (
        parser.parse_args([f"--trainer.{option}"]),
        parser.parse_object({"trainer": {name: value}}),  # and in a file
    ):
        found = parsed.trainer[name]
        assert found == value
        assert type(found) is type(value)


@pytest.fixture
def parser() -> LightningArgumentParser:
    from drivetrain import Trainer

    made = LightningArgumentParser(exit_on_error=False)
    made.add_lightning_class_args(Trainer, "trainer")
    return made


@pytest.mark.parametrize("option", ["max_epochs=x", "max_epochs=1.5", "inference_mode=1", "num_nodes=a", "logger=7"])
def test_a_value_of_the_wrong_kind_is_refused(parser: LightningArgumentParser, option: str) -> None:
    with pytest.raises(ArgumentError, match=f"trainer.{option.partition('=')[0]}"):
        parser.parse_args([f"--trainer.{option}"])


def test_a_timedelta_is_read_from_a_program(cli: Make) -> None:
    made = cli(run=False, trainer_defaults={"max_time": timedelta(minutes=2)})
    assert made.trainer.settings.max_time == timedelta(minutes=2)


def test_every_argument_of_the_trainer_is_an_option_with_its_documentation(parser: LightningArgumentParser) -> None:
    shown = " ".join(parser.format_help().split())
    for field in dataclasses.fields(Settings):
        assert f"--trainer.{field.name} " in shown
        assert " ".join(DOCS[field.name].split()) in shown
        assert parser.get_default(f"trainer.{field.name}") == field.default


def test_objects_are_described_by_class_paths_and_arguments(cli: Make) -> None:
    words = (
        "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss", "--trainer.callbacks.patience=7",
        "--trainer.callbacks+=drivetrain.callbacks.LearningRateMonitor",
        "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs",
        "--trainer.plugins=TorchCheckpointIO",
    )  # fmt: skip
    trainer = cli(*words, run=False).trainer
    [stopping] = trainer.early_stopping_callbacks
    assert (stopping.monitor, stopping.patience) == ("val_loss", 7)
    assert any(isinstance(callback, LearningRateMonitor) for callback in trainer.callbacks)
    assert isinstance(trainer.logger, CSVLogger)
    assert isinstance(trainer.settings.plugins, TorchCheckpointIO)


def test_objects_are_described_in_a_file(cli: Make, tmp_path: Path) -> None:
    checkpoint = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "val_loss", "save_top_k": 2}}
    trainer = {
        "callbacks": [checkpoint, {"class_path": "drivetrain.callbacks.EarlyStopping", "init_args": {"monitor": "a"}}],
        "enable_checkpointing": None,
        "plugins": [{"class_path": "drivetrain.checkpoints.TorchCheckpointIO"}],
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"trainer": trainer}), encoding="utf-8")
    made = cli("--config=run.yaml", run=False).trainer
    [saving] = [callback for callback in made.callbacks if isinstance(callback, ModelCheckpoint)]
    assert (saving.monitor, saving.save_top_k) == ("val_loss", 2)
    assert any(isinstance(callback, EarlyStopping) for callback in made.callbacks)
    assert [type(plugin) for plugin in made.settings.plugins] == [TorchCheckpointIO]


def test_files_and_options_are_read_in_their_order(cli: Make, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("trainer: {max_epochs: 2, max_steps: 5}\nmodel: {width: 3}\n", encoding="utf-8")
    (tmp_path / "b.yaml").write_text("trainer: {max_epochs: 4}\n", encoding="utf-8")

    def given(*words: str) -> tuple[int, int, int]:
        made = cli(*words, run=False)
        return made.trainer.max_epochs, made.trainer.max_steps, made.model.width

    assert given("-c", "a.yaml") == (2, 5, 3)
    assert given("-c", "a.yaml", "--config", "b.yaml") == (4, 5, 3)
    assert given("-c", "b.yaml", "-c", "a.yaml", "--model.width=9") == (2, 5, 9)
    assert given("--trainer.max_epochs=7", "-c", "b.yaml") == (4, -1, 8)


def test_one_file_may_serve_several_subcommands(cli: Make, tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text("fit: {model: {width: 3}}\ntest: {model: {width: 4}}\n", encoding="utf-8")
    assert cli("--config=all.yaml", "fit").model.width == 3
    assert cli("--config=all.yaml", "test").model.width == 4


def test_a_printed_configuration_is_a_file_for_config(
    cli: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss", "--model.width=3")
    with pytest.raises(SystemExit) as ended:
        cli("fit", *words, "--optimizer=SGD", "--print_config", parser_kwargs={})
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["optimizer"]["class_path"] == "torch.optim.SGD"
    (tmp_path / "printed.yaml").write_text(printed, encoding="utf-8")
    with pytest.warns(UserWarning, match="which is not called then"):
        made = cli("fit", "-c", "printed.yaml")
    assert made.model.width == 3
    assert made.trainer.early_stopping_callback.monitor == "val_loss"


def test_only_classes_of_the_library_are_added_so() -> None:
    with pytest.raises(ConfigurationError, match="which is none of Trainer, LightningModule"):
        LightningArgumentParser().add_lightning_class_args(Path, "path")


def test_a_parser_that_is_too_old_is_named_with_its_version() -> None:
    program = (
        "import sys, types\nold = sys.modules['jsonargparse'] = types.ModuleType('jsonargparse')\n"
        "old.__version__ = '4.39.0'\nimport drivetrain.cli.lightning_cli\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs jsonargparse 4.53 or later, and version 4.39.0 is installed. Run `pip install --upg" in done.stderr
