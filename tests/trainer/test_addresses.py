"""Fits whose files are at an address: fsspec's files in memory stand for any store; tests/extras/test_s3.py has S3."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import os
import sys
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from tests import addresses
from tests.addresses import Net, loader, names, net, trainer

from drivetrain import Engine, Trainer
from drivetrain.base import files, remote, yaml_text
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.loggers import CSVLogger, TensorBoardLogger
from drivetrain.profilers import SimpleProfiler


@pytest.fixture
def folder() -> Iterator[str]:
    name = f"memory://{uuid.uuid4().hex}"
    yield name
    addresses.clear(name)


def test_a_fit_saves_and_resumes_exactly(folder: str) -> None:
    addresses.check_fit_saves_and_resumes_exactly(folder)


def test_the_best_and_the_last_are_kept(folder: str) -> None:
    addresses.check_top_k_and_last(folder)


def test_a_fit_that_raises_leaves_its_checkpoint(folder: str) -> None:
    addresses.check_failures_save(folder)


def test_an_upload_that_fails_leaves_the_earlier_checkpoint(folder: str) -> None:
    addresses.check_upload_that_fails(folder, addresses.lost_connection(MemoryFileSystem))


def test_everything_of_a_run_lies_below_default_root_dir(folder: str, tmp_path: Path) -> None:
    addresses.check_root(folder, tmp_path)


def test_a_stopped_fit_is_found(folder: str) -> None:
    trainer(folder, max_time={"milliseconds": 1}).fit(net(), loader())
    assert "stopped.ckpt" in names(f"{folder}/checkpoints")
    again = trainer(folder, max_time={"minutes": 1})
    again.fit(net(), loader(), ckpt_path="last")
    assert again.global_step == 8


def test_a_checkpoint_that_is_not_there(folder: str) -> None:
    with pytest.raises(CheckpointError, match=f"There is no checkpoint at {folder}/none.ckpt"):
        trainer(folder).fit(net(), loader(), ckpt_path=f"{folder}/none.ckpt")
    with pytest.raises(CheckpointError, match=f"There is no checkpoint at {folder}/none.ckpt. Check the address"):
        Net.load_from_checkpoint(f"{folder}/none.ckpt")


def test_a_damaged_one_is_not_read(folder: str) -> None:
    path = f"{folder}/a.ckpt"
    TorchCheckpointIO().save_checkpoint({"state_dict": {"w": torch.arange(64.0)}}, path)
    content = bytearray(remote.read(path))
    content[len(content) // 2] ^= 1
    fsspec.filesystem("memory").pipe_file(path, bytes(content))
    assert not TorchCheckpointIO().is_complete(path)
    with pytest.raises(CheckpointError, match=f"{path} is damaged"):
        TorchCheckpointIO().load_checkpoint(path)


def test_nothing_is_unpickled(folder: str) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, ("made",)

    buffer = io.BytesIO()
    torch.save({"state_dict": {}, "evil": Evil()}, buffer)
    fsspec.filesystem("memory").pipe_file(f"{folder}/a.ckpt", buffer.getvalue())
    with contextlib.suppress(CheckpointError), warnings.catch_warnings(action="ignore"):
        TorchCheckpointIO().load_checkpoint(f"{folder}/a.ckpt")
    assert not os.path.exists("made")


def test_the_engine_saves_and_loads(folder: str) -> None:
    engine = Engine(accelerator="cpu", devices=1)
    engine.save(f"{folder}/a.ckpt", {"model": {"w": torch.ones(2)}, "step": 3})
    assert engine.load(f"{folder}/a.ckpt")["step"] == 3


def test_the_table_of_a_csv_logger(folder: str) -> None:
    def rows() -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(remote.read(f"{folder}/a/version_0/metrics.csv").decode())))

    logger = CSVLogger(folder, "a", flush_logs_every_n_steps=2)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_metrics({"loss": 2.0}, 1)
    assert [row["loss"] for row in rows()] == ["1.0", "2.0"]
    logger.log_metrics({"other": 3.0}, 2)
    logger.finalize("success")
    assert rows()[-1] == {"step": "2", "loss": "", "other": "3.0"}
    again = CSVLogger(folder, "a", version=0)  # as a resumed run does
    again.log_metrics({"loss": 4.0}, 3)
    again.finalize("success")
    assert [row["step"] for row in rows()] == ["0", "1", "2", "3"]
    assert logger.metrics_file_path == f"{folder}/a/version_0/metrics.csv"


def test_the_curves_of_tensorboard(folder: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(folder, "a")
    for step in range(3):
        logger.log_metrics({"loss": 1.0 / (1 + step)}, step)
    logger.finalize("success")
    found = remote.find(f"{folder}/a/version_0", "events*")
    assert len(found) == 1
    with remote.fetched(found[0]) as local:
        curves = EventAccumulator(str(local)).Reload()
        assert [each.step for each in curves.Scalars("loss")] == [0, 1, 2]


def test_a_logger_that_cannot_upload_does_not_end_the_fit(folder: str) -> None:
    ours = trainer(folder, logger=CSVLogger(folder), enable_checkpointing=False)
    assert ours.logger is not None
    ours.logger.version  # noqa: B018  # decides it, with the connection that is still there
    with addresses.lost_connection(MemoryFileSystem), pytest.warns(UserWarning, match="Connection reset") as caught:
        ours.fit(net(), loader())
    assert (ours.global_step, len(caught)) == (8, 2)  # of the logger, and of the record of the run
    ours.logger.save()
    assert "metrics.csv" in names(ours.logger.log_dir)


def test_a_version_that_was_not_used_is_given_back(folder: str) -> None:
    logger = CSVLogger(folder, "a")
    assert logger.version == 0
    assert CSVLogger(folder, "a").version == 1
    logger.leave_run()
    assert names(f"{folder}/a") == ["version_1"]


def test_what_cannot_be_written_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setitem(sys.modules, "s3fs", None)
    for made in (
        lambda: Trainer(default_root_dir="s3://bucket/run"), lambda: ModelCheckpoint("s3://bucket/run"),
        lambda: CSVLogger("s3://bucket/run"), lambda: Net.load_from_checkpoint("s3://bucket/a.ckpt"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match="pip install s3fs"):
            made()
    with pytest.raises(ConfigurationError, match="'s3://bucket/run'"):
        ModelCheckpoint(Path("s3://bucket/run"))
    with pytest.raises(ConfigurationError, match="http://host/run can only be read"):
        ModelCheckpoint("http://host/run")


def test_file_addresses_are_local_paths(tmp_path: Path) -> None:
    ours = trainer(f"file://{tmp_path}")
    ours.fit(net(), loader())
    assert os.listdir(tmp_path / "checkpoints") == ["epoch=1-step=8.ckpt"]
    ours.test_path = f"file://{tmp_path}/checkpoints/epoch=1-step=8.ckpt"  # type: ignore[attr-defined]
    assert Net.load_from_checkpoint(ours.test_path).hparams["width"] == 4  # type: ignore[attr-defined]


def test_a_configuration_at_an_address(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.cli import LightningCLI

    monkeypatch.setattr("jsonargparse._optionals._config_read_mode", "fr")  # other tests get what they had
    trains = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    config = {"trainer": {**trains, "default_root_dir": f"{folder}/run", "barebones": False}}
    files.write(f"{folder}/config.yaml", yaml_text.dump(config).encode())
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with mock.patch.object(Net, "train_dataloader", return_value=loader()):
        cli = LightningCLI(Net, args=["fit", "--config", f"{folder}/config.yaml"])
        assert (cli.trainer.max_epochs, cli.trainer.global_step) == (1, 4)
        written = f"{cli.trainer.log_dir}/config.yaml"
        assert written == f"{folder}/run/lightning_logs/version_0/config.yaml"
        again = LightningCLI(Net, args=["fit", f"--config={written}"])  # which repeats the run
        assert again.trainer.log_dir == f"{folder}/run/lightning_logs/version_1"
        with pytest.raises(SystemExit):
            LightningCLI(Net, args=["fit", "--config", f"{folder}/none.yaml"])
        with pytest.raises(ConfigurationError, match="pip install s3fs"):
            LightningCLI(Net, args=["fit", "--config", "s3://bucket/a.yaml"])


def test_hyperparameters_at_an_address(folder: str) -> None:
    TorchCheckpointIO().save_checkpoint({"state_dict": net(width=7).state_dict()}, f"{folder}/a.ckpt")
    files.write(f"{folder}/hparams.yaml", b"width: 7")
    loaded = Net.load_from_checkpoint(f"{folder}/a.ckpt", hparams_file=f"{folder}/hparams.yaml")
    assert loaded.hparams["width"] == 7


def test_a_profiler_writes_here(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(folder, profiler=SimpleProfiler(filename="times")).fit(net(), loader())
    assert [path.name for path in tmp_path.iterdir()] == ["fit-times.txt"]
    with pytest.raises(ConfigurationError, match="profilers write to local folders"):
        SimpleProfiler(dirpath=folder)


def test_a_folder_with_a_slash_at_its_end_is_the_same(folder: str) -> None:
    """As another trainer writes the folder into its checkpoints."""
    saver = ModelCheckpoint(f"{folder}/", monitor="loss")
    trainer(folder, callbacks=[saver]).fit(net(), loader())
    state = {**saver.state_dict(), "dirpath": f"{folder}/"}
    again = ModelCheckpoint(folder, monitor="loss")
    again.load_state_dict(state)  # without a warning
    assert list(again.best_k_models) == list(saver.best_k_models) == [saver.best_model_path]


def test_services_keep_local_files(folder: str) -> None:
    from drivetrain.loggers._run import local_folder, scored

    with pytest.raises(ConfigurationError, match="save_dir is a local folder"):
        local_folder("WandbLogger", folder)
    saver = ModelCheckpoint(folder)
    saver.best_model_path = f"{folder}/a.ckpt"
    with pytest.warns(UserWarning, match=f"not uploaded to the service of the logger.*{folder}"):
        assert scored(saver, {}) == []


def test_the_checkpoint_of_a_job_that_was_put_back_is_found(folder: str) -> None:
    ours = trainer(folder, 1)
    ours.fit(net(), loader())
    for number in (9, 10):
        ours.save_checkpoint(f"{folder}/hpc_ckpt_{number}.ckpt")
    again = trainer(folder, 2)
    again.fit(net(), loader(), ckpt_path="hpc")
    assert (again.ckpt_path, again.global_step) == (f"{folder}/hpc_ckpt_10.ckpt", 8)


def test_no_room_for_the_temporary_file(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, content: Any) -> int:
        self.failure = OSError(errno.ENOSPC, "No space left on device")
        raise self.failure

    monkeypatch.setattr(files._Stream, "write", full)
    with pytest.raises(
        CheckpointError, match=f"{folder}/a.ckpt could not be written: no space.*set the variable TMPDIR"
    ):
        TorchCheckpointIO().save_checkpoint({"a": 1}, f"{folder}/a.ckpt")
    assert names(folder) == []


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_logger_leaves_no_copies_on_this_machine(kind: Any, folder: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    logger = kind(folder)
    for epochs in (1, 2):
        trainer(folder, epochs, logger=logger).fit(net(), loader())
        assert os.listdir(tmp_path) == []
    logger.log_metrics({"after": 1.0}, 99)
    assert kind is CSVLogger or os.listdir(tmp_path) != []  # which shows that the check can fail
    logger.finalize("success")
    assert os.listdir(tmp_path) == []
    assert len(names(logger.log_dir)) > 1
