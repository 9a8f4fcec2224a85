"""WandbLogger with a stand-in for the package, which writes down its calls; the real one is in tests/extras."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.extras.logged import Net, loader, trainer

from drivetrain.callbacks import ModelCheckpoint
from drivetrain.loggers import WandbLogger


class Run:
    """A run of the stand-in."""

    def __init__(self, run_id: str | None) -> None:
        self.id = run_id or "made"
        self.axes: list[Any] = []
        self.rows: list[dict[str, Any]] = []
        self.artifacts: list[Any] = []
        self.config = SimpleNamespace(update=lambda *args, **kwargs: None)

    def define_metric(self, name: str, **options: Any) -> None:
        self.axes.append((name, options))

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        self.artifacts.append((artifact, aliases))


class Artifact:
    def __init__(self, name: str, type: str, metadata: dict[str, Any]) -> None:
        self.name, self.metadata = name, metadata

    def add_file(self, path: str, name: str, policy: str) -> None:
        assert Path(path).is_file()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each ``wandb.init``."""
    calls: list[dict[str, Any]] = []
    package: Any = ModuleType("wandb")
    package.__spec__ = ModuleSpec("wandb", None)
    package.run, package.Artifact = None, Artifact

    def init(**arguments: Any) -> Run:
        calls.append(arguments)
        return Run(arguments["id"])

    package.init = init
    monkeypatch.setitem(sys.modules, "wandb", package)
    return calls


def test_the_metadata_of_an_artifact_have_the_score_and_the_settings_of_the_checkpoint_callback(
    begun: list[dict[str, Any]], tmp_path: Path
) -> None:
    logger = WandbLogger(save_dir=tmp_path, log_model="all")
    saves = ModelCheckpoint(monitor="loss_epoch", save_top_k=2, filename="{epoch}")
    trainer(tmp_path, logger, max_epochs=2, callbacks=[saves]).fit(Net(), loader())
    first, last = (artifact for artifact, _ in logger.experiment.artifacts)
    assert first.name == "model-made"
    assert last.metadata == {
        "score": pytest.approx(float(saves.best_k_models[saves.best_model_path])),
        "original_filename": "epoch=1.ckpt",
        "ModelCheckpoint": {
            "monitor": "loss_epoch", "mode": "min", "save_last": None, "save_top_k": 2, "save_weights_only": False,
            "_every_n_train_steps": 0,
        },
    }  # fmt: skip
    assert logger.experiment.artifacts[-1][1] == ["latest", "best"]


def test_curves_have_the_trainers_step_as_their_axis(begun: list[dict[str, Any]], tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    logger.log_metrics({"loss": 1.0}, step=3)
    axis = "trainer/global_step"
    assert logger.experiment.axes == [(axis, {}), ("*", {"step_metric": axis, "step_sync": True})]
    assert logger.experiment.rows == [{"loss": 1.0, axis: 3}]


def test_with_sync_tensorboard_the_axis_is_that_of_tensorboard(begun: list[dict[str, Any]], tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path, sync_tensorboard=True)
    logger.log_metrics({"loss": 1.0}, step=3)
    assert begun[0]["sync_tensorboard"] is True
    assert logger.experiment.axes == [("*", {"step_metric": "global_step"})]
    assert logger.experiment.rows == [{"loss": 1.0}]


@pytest.mark.parametrize(("offline", "mode"), [(False, None), (True, "offline")])
def test_only_offline_overrides_the_variable_wandb_mode(
    begun: list[dict[str, Any]], tmp_path: Path, offline: bool, mode: str | None
) -> None:
    """wandb itself reads WANDB_MODE where it is given no mode."""
    _ = WandbLogger(save_dir=tmp_path, offline=offline).experiment
    assert begun[0].get("mode") == mode


def test_version_is_the_id_that_was_passed_or_that_of_the_run(begun: list[dict[str, Any]], tmp_path: Path) -> None:
    forms: list[Any] = [{"id": "a"}, {"version": "b"}, {"id": "a", "version": "b"}]
    assert [WandbLogger(**form).version for form in forms] == ["a", "b", "b"]
    logger = WandbLogger(save_dir=tmp_path)
    assert logger.version is None
    _ = logger.experiment
    assert logger.version == "made"
    assert WandbLogger(experiment=Run("given")).version == "given"
    assert begun == [{"project": "lightning_logs", "name": None, "id": None, "dir": str(tmp_path), "resume": "allow"}]
