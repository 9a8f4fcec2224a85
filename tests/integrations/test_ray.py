"""The callback that reports to Ray Train, with a stand-in for ``ray.train``; real_clusters/ has the real one."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.integrations import ray
from drivetrain.integrations.ray import RayTrainEnvironment, RayTrainReportCallback
from drivetrain.plugins import AsyncCheckpointIO
from drivetrain.trainer import last

WORKER = {
    "RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
}  # fmt: skip


class Reported:
    """A checkpoint in Ray's storage, which is downloaded while it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.downloads = folder, 0

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        self.downloads += 1
        copy = shutil.copytree(self.folder, self.folder.with_name(f"download{self.downloads}"))
        yield str(copy)
        shutil.rmtree(copy)

    @property
    def note(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "drivetrain.json").read_text())
        return found


class RayTrain:
    """What the callback uses of ``ray.train``: keeps each report, and copies the files as Ray does."""

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        self.reports: list[tuple[dict[str, float], Reported | None]] = []
        self.newest: Reported | None = None
        self.Checkpoint = SimpleNamespace(from_directory=lambda folder: folder)

    def get_context(self) -> Any:
        return SimpleNamespace(get_world_rank=lambda: 0)

    def get_checkpoint(self) -> Reported | None:
        return self.newest

    def report(self, metrics: dict[str, float], checkpoint: str | None = None) -> None:
        kept = None
        if checkpoint is not None:
            kept = Reported(Path(shutil.copytree(checkpoint, self.storage / str(len(self.reports)))))
        self.reports.append((metrics, kept))

    @property
    def steps(self) -> list[tuple[float, str | None]]:
        """The step of each report, and the file of its checkpoint."""
        return [(metrics["step"], kept and kept.note["checkpoint"]) for metrics, kept in self.reports]


@pytest.fixture
def ray_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayTrain:
    (tmp_path / "storage").mkdir()
    made = RayTrain(tmp_path / "storage")
    monkeypatch.setitem(sys.modules, "ray.train", made)  # type: ignore[arg-type]  # a stand-in
    for name, value in WORKER.items():
        monkeypatch.setenv(name, value)
    start_again(monkeypatch)
    return made


def start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Ray had started a new process for this worker."""
    monkeypatch.setattr(last, "finished_fits", 0)
    ray._checkpoint_at_start.cache_clear()


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("counted", float(self.global_step), on_step=True)
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    options = {"max_epochs": 2, "log_every_n_steps": 1, **arguments}
    return Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=list(callbacks), default_root_dir=folder, **options,
    )  # fmt: skip


def fit(folder: Path, *callbacks: Callback, ckpt_path: str | None = None, **arguments: Any) -> Trainer:
    """Fit on four batches per epoch."""
    made = trainer(folder, *callbacks, **arguments)
    made.fit(Model(), DataLoader(torch.ones(4, 1)), ckpt_path=ckpt_path)
    return made


# ---- who reports -----------------------------------------------------------------------------------------------------


def test_in_a_worker_the_trainer_reports_each_checkpoint_with_its_files(ray_train: RayTrain, tmp_path: Path) -> None:
    assert isinstance(fit(tmp_path).plan.environment, RayTrainEnvironment)
    assert ray_train.steps == [(4, "epoch=0-step=4.ckpt"), (8, "epoch=1-step=8.ckpt")]
    assert ray_train.reports[0][0] == {"counted": 3.0, "epoch": 0, "step": 4}
    for _, kept in ray_train.reports:
        assert kept is not None
        name = kept.note["checkpoint"]
        assert sorted(os.listdir(kept.folder)) == ["drivetrain.json", name]
        assert torch.load(kept.folder / name, weights_only=True)["global_step"] == int(name[-6])


def test_outside_of_a_worker_the_callback_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.train", None)  # importing it would fail
    assert fit(tmp_path, RayTrainReportCallback()).global_step == 8
    assert not any(isinstance(each, RayTrainReportCallback) for each in trainer(tmp_path).callbacks)


class OfAnotherLibrary:
    class RayTrainReportCallback(Callback):
        """As that of ray.train.lightning is called."""


@pytest.mark.parametrize("own", [RayTrainReportCallback, OfAnotherLibrary.RayTrainReportCallback])
def test_a_callback_of_this_name_is_not_added_twice(ray_train: RayTrain, tmp_path: Path, own: type[Callback]) -> None:
    passed = own()
    named = [each for each in trainer(tmp_path, passed).callbacks if type(each).__name__ == "RayTrainReportCallback"]
    assert named == [passed]


@pytest.mark.filterwarnings("ignore:Model.log was called with barebones")
@pytest.mark.parametrize("argument", ["fast_dev_run", "barebones"])
def test_a_trial_run_reports_nothing(ray_train: RayTrain, tmp_path: Path, argument: str) -> None:
    fit(tmp_path, log_every_n_steps=None, **{argument: True})
    assert ray_train.reports == []


def test_an_environment_that_names_no_callback_reports_nothing(
    ray_train: RayTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = RayTrainEnvironment()
    environment.report_callback = ""
    fit(tmp_path, plugins=[environment])
    assert ray_train.reports == []


# ---- when ------------------------------------------------------------------------------------------------------------


def test_epochs_without_a_checkpoint_report_metrics(ray_train: RayTrain, tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path, every_n_train_steps=3))
    files = [(3, "epoch=0-step=3.ckpt"), (4, None), (6, "epoch=1-step=6.ckpt"), (8, None)]
    assert ray_train.steps == files


@pytest.mark.parametrize("first", [True, False])
def test_in_whichever_order_callbacks_are_passed_a_step_is_reported_once(
    ray_train: RayTrain, tmp_path: Path, first: bool
) -> None:
    own, saves = RayTrainReportCallback(), ModelCheckpoint(tmp_path, save_last=True, save_top_k=-1)
    fit(tmp_path, *([own, saves] if first else [saves, own]))
    assert ray_train.steps == [(4, "epoch=0-step=4.ckpt"), (8, "epoch=1-step=8.ckpt")]


def test_a_checkpoint_at_the_end_of_training_is_reported_after_the_metrics(ray_train: RayTrain, tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path, every_n_epochs=0, save_last=True), max_epochs=1)
    assert ray_train.steps == [(4, None), (4, "last.ckpt")]


def test_a_save_in_the_background_is_reported_when_it_is_durable_with_the_metrics_of_its_step(
    ray_train: RayTrain, tmp_path: Path
) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, monitor="counted"),
        plugins=[AsyncCheckpointIO()])  # fmt: skip
    with_files = [metrics for metrics, kept in ray_train.reports if kept is not None]
    assert with_files == [{"counted": 2.0, "epoch": 0, "step": 3}, {"counted": 5.0, "epoch": 1, "step": 6}]
    named = [name for _, name in ray_train.steps if name is not None]
    assert named == ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt"]


def test_after_an_exception_nothing_is_reported(ray_train: RayTrain, tmp_path: Path) -> None:
    """A rank that fails alone would wait for the others."""
    with pytest.raises(SystemError):
        fit(tmp_path, ModelCheckpoint(tmp_path, every_n_train_steps=5), Dies(), plugins=[AsyncCheckpointIO()])
    assert (tmp_path / "epoch=1-step=5.ckpt").exists()
    assert ray_train.steps == [(4, None)]


def test_a_callback_reports_each_fit_of_a_program(ray_train: RayTrain, tmp_path: Path) -> None:
    own = RayTrainReportCallback()
    for folder in ("first", "second"):
        fit(tmp_path / folder, own, max_epochs=1)
    assert [step for step, _ in ray_train.steps] == [4, 4]
    assert own._saved == {}


def test_a_program_may_start_processes_with_the_callback() -> None:
    assert isinstance(pickle.loads(pickle.dumps(RayTrainReportCallback())), RayTrainReportCallback)


# ---- resuming --------------------------------------------------------------------------------------------------------


class Dies(Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            raise SystemError


class Steps(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.global_step)


def broken_off(ray_train: RayTrain, folder: Path, **arguments: Any) -> Reported:
    """Let a fit fail in its second epoch; return the newest checkpoint that Ray has then."""
    with pytest.raises(SystemError):
        fit(folder, Dies(), **arguments)
    ray_train.newest = next(kept for _, kept in reversed(ray_train.reports) if kept is not None)
    ray._checkpoint_at_start.cache_clear()
    return ray_train.newest


@pytest.mark.parametrize("ckpt_path", [None, "last"])
def test_a_fit_resumes_from_the_newest_checkpoint_that_ray_has(
    ray_train: RayTrain, tmp_path: Path, ckpt_path: str | None
) -> None:
    reported, steps = broken_off(ray_train, tmp_path / "first"), Steps()
    fit(tmp_path / "on another machine", steps, ckpt_path=ckpt_path)
    assert steps.seen == [5, 6, 7, 8]
    assert reported.downloads == 1
    assert list(ray_train.storage.glob("download*")) == []


def test_another_fit_does_not_resume_from_it(ray_train: RayTrain, tmp_path: Path) -> None:
    reported, steps = broken_off(ray_train, tmp_path), Steps()
    last.finished_fits = 1
    fit(tmp_path / "second", steps)
    assert steps.seen[0] == 1
    assert list(ray_train.storage.glob("download*")) == []
    assert reported.note["fit"] == 0


def test_of_several_fits_the_interrupted_one_resumes(
    ray_train: RayTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path / "first")
    broken_off(ray_train, tmp_path / "second")
    start_again(monkeypatch)
    before, again, steps = len(ray_train.reports), Steps(), Steps()
    fit(tmp_path / "first again", again)
    ray_train.newest = ray_train.reports[-1][1]
    fit(tmp_path / "second again", steps)
    assert (again.seen[0], steps.seen[0]) == (1, 5)
    assert [step for step, _ in ray_train.steps[before:]] == [4, 8, 8]


def test_a_checkpoint_that_the_program_has_reported_itself_is_left_to_it(ray_train: RayTrain, tmp_path: Path) -> None:
    (own := tmp_path / "own").mkdir()
    (own / "model.pt").touch()
    ray_train.newest, steps = Reported(own), Steps()
    fit(tmp_path / "fit", steps)
    assert steps.seen[0] == 1


def test_weights_alone_are_reported_and_no_fit_resumes_from_them(
    ray_train: RayTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = ModelCheckpoint(tmp_path / "weights", save_weights_only=True)
    with pytest.raises(SystemError):
        fit(tmp_path, Dies(), weights)
    ray_train.newest, steps = ray_train.reports[0][1], Steps()
    start_again(monkeypatch)
    assert ray_train.newest is not None
    assert "state_dict" in torch.load(ray_train.newest.folder / "epoch=0-step=4.ckpt", weights_only=True)
    fit(tmp_path / "again", steps)
    assert steps.seen[0] == 1


# ---- files -----------------------------------------------------------------------------------------------------------


class Rank:
    """What the callback reads of the Trainer on one rank of a job; rank 0 sees ``seen``."""

    def __init__(self, rank: int, local_rank: int, seen: list[Path]) -> None:
        from drivetrain.checkpoints import TorchCheckpointIO

        self.global_step, self.local_rank, self.is_global_zero = 4, local_rank, rank == 0
        self.callback_metrics: dict[str, Any] = {}
        self.current_epoch = 0
        self.strategy = SimpleNamespace(
            checkpoint_io=TorchCheckpointIO(), broadcast=lambda here: here if self.is_global_zero else seen
        )


def reporting() -> RayTrainReportCallback:
    callback = RayTrainReportCallback()
    callback._reports = True
    return callback


def reported_by(ray_train: RayTrain, path: str, rank: int, local_rank: int, *seen: str) -> list[str]:
    callback = reporting()
    callback._report(Rank(rank, local_rank, [Path(name) for name in seen]), path, 4)  # type: ignore[arg-type]  # a stand-in
    [(_, kept)] = ray_train.reports
    ray_train.reports.clear()
    assert kept is not None
    found = sorted(str(each.relative_to(kept.folder)) for each in kept.folder.rglob("*") if each.is_file())
    shutil.rmtree(kept.folder)
    return found


def test_each_machine_uploads_what_rank_0_does_not_see(ray_train: RayTrain, tmp_path: Path) -> None:
    names = ["m.ckpt", "m.ckpt.0123abcd.rank1", "m.ckpt.0123abcd.rank2"]
    for name in [*names, "m.ckpt-v1", "other.ckpt"]:
        (tmp_path / name).touch()
    path = str(tmp_path / "m.ckpt")
    assert reported_by(ray_train, path, 0, 0) == ["drivetrain.json", *names]
    assert reported_by(ray_train, path, 1, 1) == []
    assert reported_by(ray_train, path, 2, 0, *names) == []
    assert reported_by(ray_train, path, 2, 0, *names[:2]) == names[2:]
    (tmp_path / "m.ckpt").unlink()  # which only the machine of rank 0 has
    assert reported_by(ray_train, path, 2, 0, *names[:2]) == names[2:]


def test_a_sharded_checkpoint_is_a_folder(ray_train: RayTrain, tmp_path: Path) -> None:
    (tmp_path / "m.ckpt").mkdir()
    for name in ("manifest.json", "0123abcd.rank0.bin", "0123abcd.rank1.bin"):
        (tmp_path / "m.ckpt" / name).touch()
    path = str(tmp_path / "m.ckpt")
    files = ["m.ckpt/0123abcd.rank0.bin", "m.ckpt/0123abcd.rank1.bin", "m.ckpt/manifest.json"]
    assert reported_by(ray_train, path, 0, 0) == ["drivetrain.json", *files]
    assert reported_by(ray_train, path, 1, 0, files[0], files[2]) == [files[1]]


def test_of_a_checkpoint_at_an_address_only_the_address_is_reported(ray_train: RayTrain, tmp_path: Path) -> None:
    address = "s3://bucket/run/m.ckpt"
    callback = reporting()
    callback._saved[4] = {"epoch": 0}
    callback._report(Rank(0, 0, []), address, 4)  # type: ignore[arg-type]  # a stand-in
    [(metrics, kept)] = ray_train.reports
    assert metrics == {"epoch": 0, "step": 4}
    assert kept is not None
    assert os.listdir(kept.folder) == ["drivetrain.json"]
    ray_train.newest = kept
    assert callback.own_checkpoint(None) == address  # type: ignore[arg-type]  # a stand-in
