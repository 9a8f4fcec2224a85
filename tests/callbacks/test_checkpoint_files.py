"""The files of a ModelCheckpoint: whose they are, what may be removed, and where a link leads at any moment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.callbacks._checkpoint_durability import check_state, is_below
from drivetrain.checkpoints import TorchCheckpointIO
from drivetrain.errors import CheckpointError
from drivetrain.loggers import CSVLogger, TensorBoardLogger


class Net(LightningModule):
    def __init__(self, note: str = "", metric: str = "loss") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer, self.metric = nn.Linear(1, 1), metric

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).square().mean()
        self.log(self.metric, loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", float(-self.current_epoch))
        self.log(f"val_{self.metric}", 1.0)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader() -> Any:
    return DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)


def trainer(folder: Path, callback: Any, **arguments: Any) -> Trainer:
    given: dict[str, Any] = {
        "max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": folder, "accelerator": "cpu", "callbacks": callback, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return Trainer(**{**given, **arguments})


def fit(folder: Path, callback: Any, ckpt_path: Any = None, module: Any = None, **arguments: Any) -> Trainer:
    made = trainer(folder, callback, **arguments)
    made.fit(module or Net(), loader(), loader(), ckpt_path=ckpt_path)
    return made


def load(path: Any) -> dict[str, Any]:
    return TorchCheckpointIO().load_checkpoint(path)


def state_of(path: Any) -> dict[str, Any]:
    [state] = [state for key, state in load(path)["callbacks"].items() if key.startswith("ModelCheckpoint")]
    return state


# ---- two runs in one folder ------------------------------------------------------------------------------------------


class Overtaken(TorchCheckpointIO):
    """Another run puts a file in every place that this run is about to write to for the first time."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if (name := Path(path).name) in self.names:
            self.names.remove(name)
            Path(path).parent.mkdir(exist_ok=True)
            Path(path).write_bytes(b"theirs")
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.mark.parametrize("last", [None, True, "link"])
def test_a_run_that_begins_at_the_same_time_is_not_overwritten(tmp_path: Path, last: Any) -> None:
    callback = ModelCheckpoint(save_last=last)
    fit(tmp_path, callback, plugins=[Overtaken("epoch=0-step=2.ckpt", "last.ckpt")])
    folder = tmp_path / "checkpoints"
    assert (folder / "epoch=0-step=2.ckpt").read_bytes() == b"theirs"
    assert callback.best_model_path == str(folder / "epoch=0-step=2-v1.ckpt")
    assert list(callback.best_k_models) == [callback.best_model_path]
    state = state_of(callback.best_model_path)
    assert state["best_model_path"] == callback.best_model_path  # the file says where it is
    assert not list(folder.glob(".*"))
    if last is True:
        assert (folder / "last.ckpt").read_bytes() == b"theirs"
        assert callback.last_model_path == state["last_model_path"] == str(folder / "last-v1.ckpt")
    if last:
        assert load(callback.last_model_path)["global_step"] == 2


def test_a_link_of_another_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.symlink

    def overtaken(target: Any, link: Any) -> None:
        monkeypatch.setattr(os, "symlink", real)
        real("theirs.ckpt", tmp_path / "last.ckpt")
        real(target, link)

    monkeypatch.setattr(os, "symlink", overtaken)
    callback = ModelCheckpoint(tmp_path, save_last="link")
    fit(tmp_path, callback)
    assert os.readlink(tmp_path / "last.ckpt") == "theirs.ckpt"
    assert callback.last_model_path == str(tmp_path / "last-v1.ckpt")
    assert state_of(tmp_path / "last-v1.ckpt")["last_model_path"] == str(tmp_path / "last-v1.ckpt")


def test_an_exception_checkpoint_of_another_run_stays(tmp_path: Path) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx:
                raise RuntimeError("now")
            return super().training_step(batch, batch_idx)

    for _ in range(2):
        with pytest.raises(RuntimeError, match="now"):
            fit(tmp_path, ModelCheckpoint(tmp_path, save_on_exception=True), module=Fails())
    assert sorted(os.listdir(tmp_path)) == ["epoch=0-step=1-v1.ckpt", "epoch=0-step=1.ckpt"]


def test_a_trainer_that_never_runs_leaves_no_folder(tmp_path: Path) -> None:
    made = trainer(tmp_path, [ModelCheckpoint()], logger=CSVLogger(tmp_path))
    assert made.log_dir is not None  # reading it decides the run: that makes its folder
    shutil.rmtree(tmp_path / "lightning_logs")
    trainer(tmp_path, [ModelCheckpoint()], logger=CSVLogger(tmp_path))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        trainer(tmp_path, [ModelCheckpoint()], logger=CSVLogger(tmp_path)).validate(Net(), loader(), ckpt_path="last")
    assert list(tmp_path.iterdir()) == []


def test_runs_beside_each_other_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    first, second = (
        trainer(tmp_path, [ModelCheckpoint()], logger=CSVLogger(tmp_path), log_every_n_steps=1) for _ in range(2)
    )
    for made in (first, second):
        made.fit(Net(), loader(), loader())
    assert [made.logger.version for made in (first, second)] == [0, 1]  # type: ignore[union-attr]
    assert first.checkpoint_callback.best_model_path != second.checkpoint_callback.best_model_path  # type: ignore[union-attr]


# ---- what may be removed ---------------------------------------------------------------------------------------------


def foreign(saved: Path, **changes: Any) -> None:
    """Write other paths into the state of the ModelCheckpoint in ``saved``."""
    checkpoint = load(saved)
    [key] = [key for key in checkpoint["callbacks"] if key.startswith("ModelCheckpoint")]
    checkpoint["callbacks"][key].update(changes)
    TorchCheckpointIO().save_checkpoint(checkpoint, saved)


@pytest.mark.parametrize(
    "place", ["{out}/thesis.ckpt", "{runs}/../out/thesis.ckpt", "{runs}/link/thesis.ckpt", "{runs}/notes.txt"]
)
def test_a_file_that_is_not_its_own_is_never_removed(tmp_path: Path, place: str) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    out.mkdir()
    fit(tmp_path, ModelCheckpoint(runs, monitor="score"))
    [saved] = runs.iterdir()
    (out / "thesis.ckpt").write_text("precious")
    (runs / "notes.txt").write_text("precious")
    (runs / "link").symlink_to(out)
    precious = place.format(out=out, runs=runs)
    foreign(saved, best_k_models={precious: torch.tensor(9.0)}, kth_best_model_path=precious, last_model_path=precious)
    callback = ModelCheckpoint(runs, monitor="score")
    with pytest.warns(UserWarning, match="which is not a .ckpt file in its folder.*This entry is ignored") as warned:
        fit(tmp_path, callback, ckpt_path=saved, max_epochs=4)
    assert len(warned) == 1
    assert Path(precious).read_text() == "precious"
    assert precious not in callback.best_k_models
    assert callback.last_model_path == ""


def test_its_own_files_are_removed(tmp_path: Path) -> None:  # the control of the test above
    fit(tmp_path, ModelCheckpoint(tmp_path, monitor="score"))
    (tmp_path / "mine.ckpt").write_text("x")
    foreign(tmp_path / "epoch=0-step=2.ckpt", best_k_models={str(tmp_path / "mine.ckpt"): torch.tensor(9.0)})
    fit(tmp_path, ModelCheckpoint(tmp_path, monitor="score"), ckpt_path=tmp_path / "epoch=0-step=2.ckpt", max_epochs=2)
    assert not (tmp_path / "mine.ckpt").exists()


def test_below_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "to_a").symlink_to(tmp_path / "a")
    assert is_below(str(tmp_path / "to_a" / "b" / "x.ckpt"), str(tmp_path / "a"))
    assert is_below(str(tmp_path / "a" / "x.ckpt"), str(tmp_path / "to_a"))
    assert not is_below(str(tmp_path / "ab" / "x.ckpt"), str(tmp_path / "a"))
    assert not is_below(str(tmp_path / "a" / ".." / "x.ckpt"), str(tmp_path / "a"))
    assert not is_below("x.ckpt", None)


# ---- the last one ----------------------------------------------------------------------------------------------------


def test_a_link_never_leads_to_a_file_that_is_removed(tmp_path: Path) -> None:
    removed = []

    class Watching(TorchCheckpointIO):
        def remove_checkpoint(self, path: Any) -> None:
            removed.append(path)
            assert os.path.realpath(tmp_path / "last.ckpt") != os.path.realpath(path)
            super().remove_checkpoint(path)

    fit(tmp_path, ModelCheckpoint(tmp_path, save_last="link"), max_epochs=3, plugins=[Watching()])
    assert len(removed) == 2


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_link_where_nothing_was_due_is_a_file(tmp_path: Path, epochs: int) -> None:
    callback = ModelCheckpoint(tmp_path, save_last="link", every_n_epochs=3)
    fit(tmp_path, callback, max_epochs=epochs)
    assert (tmp_path / "last.ckpt").is_symlink() is (epochs == 3)
    assert callback.last_model_path == str(tmp_path / "last.ckpt")
    assert load(tmp_path / "last.ckpt")["global_step"] == 2 * epochs


def dangling(folder: Path, **options: Any) -> ModelCheckpoint:
    callback = ModelCheckpoint(folder, save_last="link", **options)
    fit(folder, callback, max_epochs=3)
    Path(os.path.realpath(folder / "last.ckpt")).unlink()
    return ModelCheckpoint(folder, save_last="link", **options)


def test_a_link_to_nothing_is_an_error_and_no_start_from_zero(tmp_path: Path) -> None:
    callback = dangling(tmp_path)
    with pytest.raises(CheckpointError, match=r"last\.ckpt, a link to epoch=2.*no complete checkpoint"):
        fit(tmp_path, callback, ckpt_path="last", max_epochs=4)
    with pytest.raises(CheckpointError, match=r"last\.ckpt is a link to epoch=2-step=6.ckpt, which does not exist"):
        fit(tmp_path, callback, ckpt_path=tmp_path / "last.ckpt", max_epochs=4)


def test_a_link_to_nothing_gives_way_to_the_newest_complete_file(tmp_path: Path) -> None:
    callback = dangling(tmp_path, save_top_k=-1)
    (tmp_path / "damaged.ckpt").write_bytes((tmp_path / "epoch=1-step=4.ckpt").read_bytes()[:-100])
    for age, name in enumerate(("damaged", "epoch=1-step=4", "epoch=0-step=2")):
        os.utime(tmp_path / f"{name}.ckpt", (1e9 - age, 1e9 - age))
    with pytest.warns(
        UserWarning,
        match=r"last\.ckpt, a link to epoch=2.*damaged.ckpt cannot be read .*complete checkpoint is taken: .*epoch=1",
    ):
        made = fit(tmp_path, callback, ckpt_path="last", max_epochs=4)
    assert made.ckpt_path == str(tmp_path / "epoch=1-step=4.ckpt")
    assert made.global_step == 8


def test_a_last_file_that_is_gone_is_no_start_from_zero(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0)
    made = fit(tmp_path, callback)
    (tmp_path / "last.ckpt").unlink()
    with pytest.raises(CheckpointError, match=r"last.ckpt is gone, and there is no complete checkpoint"):
        made.fit(Net(), loader(), ckpt_path="last")


def test_a_best_file_that_is_gone_is_named(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path)
    made = fit(tmp_path, callback)
    Path(callback.best_model_path).unlink()
    with pytest.raises(CheckpointError, match=r'ckpt_path="best" means .*epoch=0-step=2.ckpt.*that file is gone'):
        made.validate(Net(), loader(), ckpt_path="best")
    with pytest.raises(CheckpointError, match="that file is gone"):
        made.validate(dataloaders=loader())  # which takes the best one by itself


@pytest.mark.parametrize("last", [True, "link"])
def test_a_folder_in_place_of_the_last_one_is_named(tmp_path: Path, last: Any) -> None:
    (tmp_path / "last.ckpt").mkdir()
    callback = ModelCheckpoint(tmp_path, save_last=last, enable_version_counter=False)
    with pytest.raises(CheckpointError, match=r"a folder has this name"):
        fit(tmp_path, callback)
    saved = tmp_path / "epoch=0-step=2.ckpt"
    os.utime(saved, (1e9, 1e9))
    with pytest.warns(UserWarning, match=r"the save of .*last.ckpt was not finished.* is taken: .*epoch=0-step=2.ckpt"):
        made = fit(tmp_path, ModelCheckpoint(tmp_path), ckpt_path="last")
    assert made.ckpt_path == str(saved)


# ---- names that are no UTF-8 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("logger", [CSVLogger, TensorBoardLogger])
def test_a_folder_and_values_that_are_no_utf_8_end_no_run(
    tmp_path: Path, logger: type[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    callback = ModelCheckpoint(monitor="score", save_last="link")
    bar = {"enable_progress_bar": True, "enable_model_summary": True}
    note = "a\udce9\x00\x1b[31m\n\u2028"
    made = fit(folder, callback, module=Net(note, "loss\udce9"), logger=logger(folder), log_every_n_steps=1, **bar)
    assert callback.best_model_path.startswith(str(folder))
    assert state_of(callback.best_model_path)["dirpath"] is not None
    assert Net.load_from_checkpoint(callback.best_model_path).hparams["note"] == note
    made.test(Net(note, "loss\udce9"), loader(), ckpt_path="best")
    again = fit(folder, ModelCheckpoint(Path(callback.best_model_path).parent, monitor="score"),
                ckpt_path=callback.last_model_path, max_epochs=2, module=Net(note, "loss\udce9"))  # fmt: skip
    assert again.global_step == 4
    capsys.readouterr().out.encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"best_model_path": None}, r"\['best_model_path'\] is None"),
        ({"current_score": "x"}, r"\['current_score'\] is 'x'"),
        ({"current_score": torch.ones(2)}, r"\['current_score'\] is tensor.*a number is expected"),
        ({"best_k_models": {"a": "x"}}, r"\['best_k_models'\]\['a'\] is 'x'"),
        ({"last_at_batch": "x"}, r"\['last_at_batch'\] is 'x'"),
    ],
)
def test_a_state_of_another_form_is_refused(change: dict[str, Any], message: str) -> None:
    state = ModelCheckpoint().state_dict()
    check_state(state)
    with pytest.raises(CheckpointError, match=message):
        check_state({**state, **change})
