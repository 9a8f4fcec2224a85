from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain.cli import SaveConfigCallback
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger
from drivetrain.trainer import last

Make = Callable[..., Any]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_configuration_is_written_to_the_log_dir_and_can_be_read_back(cli: Make, tmp_path: Path) -> None:
    words = ("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", "--model.width=3")
    made = cli("fit", *words, save_config_callback=SaveConfigCallback)
    path = Path(made.trainer.log_dir) / "config.yaml"
    assert path.resolve().is_relative_to(tmp_path / "logs")
    saved = read(path)
    assert saved["model"] == {"width": 3, "lr": 0.05}
    assert saved["trainer"]["logger"]["class_path"] == "drivetrain.loggers.CSVLogger"
    assert saved["trainer"]["max_steps"] == -1  # a default
    assert saved["trainer"]["min_epochs"] is None

    again = cli("fit", "--config", str(path))
    assert again.model.width == 3
    assert isinstance(again.trainer.logger, CSVLogger)
    assert {**again.config.fit.as_dict(), "config": None} == {**made.config.fit.as_dict(), "config": None}


def test_an_earlier_configuration_is_kept_unless_overwriting_is_asked_for(cli: Make, tmp_path: Path) -> None:
    cli("fit", "--model.width=3", save_config_callback=SaveConfigCallback)
    with pytest.raises(RuntimeError, match="holds the configuration of an earlier run"):
        cli("fit", "--model.width=4", save_config_callback=SaveConfigCallback)
    assert read(tmp_path / "config.yaml")["model"]["width"] == 3
    overwriting = {"overwrite": True}
    cli("fit", "--model.width=4", save_config_callback=SaveConfigCallback, save_config_kwargs=overwriting)
    assert read(tmp_path / "config.yaml")["model"]["width"] == 4


@pytest.mark.parametrize("asked", [["--ckpt_path=last"], []], ids=["last", "by the environment"])
def test_a_run_that_resumes_writes_its_configuration_beside_the_first(
    cli: Make, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    words = ("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", "--trainer.enable_checkpointing=true")
    monkeypatch.setattr(last, "finished_fits", 0)
    first = cli("fit", *words, save_config_callback=SaveConfigCallback)
    if not asked:
        monkeypatch.setenv("DRIVETRAIN_RESUME", "auto")
    for epochs in (2, 3):
        monkeypatch.setattr(last, "finished_fits", 0)  # as in a process of its own
        more = (*words, *asked, f"--trainer.max_epochs={epochs}")
        resumed = cli("fit", *more, save_config_callback=SaveConfigCallback)
        assert resumed.trainer.log_dir == first.trainer.log_dir
    written = {path.name: read(path)["trainer"]["max_epochs"] for path in Path(first.trainer.log_dir).glob("config*")}
    assert written == {"config.yaml": 1, "config-v1.yaml": 2, "config-v2.yaml": 3}


def test_last_without_a_checkpoint_replaces_no_configuration(cli: Make, tmp_path: Path) -> None:
    """The control: without something to resume from, an earlier run's file is an error."""
    cli("fit", "--model.width=3", save_config_callback=SaveConfigCallback)
    words = ("fit", "--ckpt_path=last", "--trainer.enable_checkpointing=true")
    with pytest.raises(RuntimeError, match="holds the configuration of an earlier run"):
        cli(*words, save_config_callback=SaveConfigCallback)
    assert [path.name for path in tmp_path.glob("*.yaml")] == ["config.yaml"]


def test_the_file_is_written_once_however_often_the_trainer_runs(cli: Make, tmp_path: Path) -> None:
    made = cli("fit", save_config_callback=SaveConfigCallback)
    made.trainer.test(made.model, datamodule=made.datamodule, verbose=False)
    assert [path.name for path in tmp_path.glob("*.yaml")] == ["config.yaml"]


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["--trainer.fast_dev_run=true"], {"save_config_callback": SaveConfigCallback}),
        ([], {"save_config_callback": None}),
    ],
    ids=["a trial run", "no callback"],
)
def test_nothing_is_written(cli: Make, tmp_path: Path, words: list[str], arguments: dict[str, Any]) -> None:
    cli("fit", *words, **arguments)
    assert list(tmp_path.rglob("*.yaml")) == []


def test_save_config_is_called_once_beside_the_file(cli: Make, tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []

    class Elsewhere(SaveConfigCallback):
        def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
            calls.append((stage, self.config.model.width))

    cli("fit", "--model.width=3", save_config_callback=Elsewhere, save_config_kwargs={"config_filename": "run.yaml"})
    assert calls == [("fit", 3)]
    assert (tmp_path / "run.yaml").is_file()


def test_t30_only_rank_zero_writes_and_t31_every_rank_learns_that_the_file_exists(
    cli: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cli("--model.width=3", run=False, save_config_callback=SaveConfigCallback)
    [callback] = [callback for callback in made.trainer.callbacks if isinstance(callback, SaveConfigCallback)]
    monkeypatch.setattr(type(made.trainer), "is_global_zero", False)
    callback.setup(made.trainer, made.model, "fit")
    assert list(tmp_path.glob("*.yaml")) == []

    callback.already_saved = False
    monkeypatch.setattr(made.trainer.strategy, "broadcast", lambda obj: True)  # what rank 0 has found
    with pytest.raises(ConfigurationError, match="earlier run"):
        callback.setup(made.trainer, made.model, "fit")
