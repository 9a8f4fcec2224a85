"""What loggers write and say of their folders, as programs written for Lightning expect it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from drivetrain.compat.fabric_loggers import FabricCSVLogger, FabricTensorBoardLogger
from drivetrain.loggers import CSVLogger, TensorBoardLogger


def test_hparams_file_of_tensorboard_without_hyperparameters(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(logger=TensorBoardLogger(tmp_path))
    trainer.fit(regression(), loader)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    file = Path(trainer.log_dir) / "hparams.yaml"
    assert file.read_text() == "{}\n"
    assert isinstance(regression.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file=file), regression)


def test_a_continued_run_keeps_its_hparams_file(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path
) -> None:
    first = TensorBoardLogger(tmp_path, version="a")
    first.log_hyperparams({"width": 3})
    first.finalize("success")
    make_trainer(logger=TensorBoardLogger(tmp_path, version="a")).fit(regression(), loader)
    assert (Path(first.log_dir) / "hparams.yaml").read_text() == "width: 3\n"


@pytest.mark.parametrize("cls", [CSVLogger, TensorBoardLogger, FabricCSVLogger, FabricTensorBoardLogger])
@pytest.mark.parametrize("given", ["runs", "./runs/", "~/runs", "$HOME/runs", Path("runs")])
def test_save_dir_reads_back_as_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: Any, given: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    logger = cls(given, version=0)
    assert logger.save_dir == os.fspath(given)
    if cls.__name__.startswith("Fabric"):
        assert logger.root_dir == os.fspath(given)
    assert logger.log_dir == str(tmp_path / "runs" / "lightning_logs" / "version_0")  # absolute: docs/compat.md
    logger.log_metrics({"x": 1.0}, 0)
    logger.finalize("success")
    assert (tmp_path / "runs" / "lightning_logs" / "version_0").is_dir()


def test_log_graph_is_an_argument_of_the_engines_logger(tmp_path: Path) -> None:
    assert FabricTensorBoardLogger(tmp_path, log_graph=True)._log_graph
    assert not FabricTensorBoardLogger(tmp_path, log_graph=False)._log_graph


@pytest.mark.parametrize("cls", [CSVLogger, FabricCSVLogger])
def test_csv_writes_hyperparameters_when_they_are_logged(tmp_path: Path, cls: Any) -> None:
    logger = cls(tmp_path)
    logger.log_hyperparams({"width": 3})
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "width: 3\n"
