"""The Trainer as a whole: what it refuses, what it leaves behind, what can be read."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningDataModule, LightningModule, Trainer
from drivetrain.callbacks import EarlyStopping, ModelCheckpoint, Timer
from drivetrain.errors import ConfigurationError, LoggingError
from drivetrain.trainer import life
from drivetrain.trainer import trainer as trainer_module


def test_the_datamodule_may_stand_where_the_loaders_do(validated: Any, data: Any, make_trainer: Any) -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(data, batch_size=8)

        test_dataloader = train_dataloader

    source, trainer = Data(), make_trainer()
    trainer.fit(_only_training(validated), source)
    assert trainer.global_step == 4
    assert trainer.datamodule is source
    assert source.trainer is trainer
    assert trainer.test(validated(), source, verbose=False)


def _only_training(validated: Any) -> Any:
    class OnlyTraining(validated):  # type: ignore[misc]
        validation_step = LightningModule.validation_step

    return OnlyTraining()


def test_the_modules_own_loaders_are_used(validated: Any, data: Any, make_trainer: Any) -> None:
    class Own(validated):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return DataLoader(data, batch_size=8)

        def val_dataloader(self) -> Any:
            return [DataLoader(data, batch_size=16)]

    trainer = make_trainer()
    trainer.fit(Own())
    assert (trainer.num_training_batches, trainer.num_val_batches) == (4, [2])
    assert isinstance(trainer.train_dataloader, DataLoader)
    assert [type(each) for each in trainer.val_dataloaders] == [DataLoader]


def refused(make_trainer: Any, model: Any, *loaders: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make_trainer().fit(model, *loaders)
    return str(caught.value)


def test_t53_a_module_that_cannot_train_is_refused_before_anything_runs(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    class NoStep(LightningModule):
        def configure_optimizers(self) -> Any: ...

    class NoOptimizer(LightningModule):
        def training_step(self, batch: Any) -> Any: ...

    class Old(regression):  # type: ignore[misc]
        def training_epoch_end(self, outputs: Any) -> None: ...

    assert "NoStep has no training_step" in refused(make_trainer, NoStep(), loader)
    assert "NoOptimizer has no configure_optimizers" in refused(make_trainer, NoOptimizer(), loader)
    assert "Do its work in on_train_epoch_end" in refused(make_trainer, Old(), loader)
    assert "needs a LightningModule, not a Linear" in refused(make_trainer, nn.Linear(1, 1), loader)
    assert "has no loader. Pass one, or define train_dataloader" in refused(make_trainer, regression())
    assert "cannot be iterated" in refused(make_trainer, regression(), 3)


def test_t53_a_step_without_a_loader_and_a_loader_without_a_step_warn(
    regression: Any, validated: Any, loader: Any, make_trainer: Any
) -> None:
    with pytest.warns(UserWarning, match="has a validation_step but there is no validation loader"):
        make_trainer().fit(validated(), loader)
    with pytest.warns(UserWarning, match="There is a validation loader but Regression has no validation_step"):
        make_trainer().fit(regression(), loader, loader)


def test_t48_callbacks_tuners_first_checkpoints_last(make_trainer: Any) -> None:
    class Tunes(Callback):
        position = "first"

    class Plain(Callback):
        pass

    checkpoint, plain, tunes = ModelCheckpoint(), Plain(), Tunes()
    trainer = make_trainer(callbacks=[checkpoint, plain, tunes], enable_checkpointing=True)
    assert trainer.callbacks == [tunes, plain, checkpoint]
    assert trainer.checkpoint_callback is checkpoint


def test_t48_the_modules_callbacks_replace_those_of_their_class(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    class Marked(Callback):
        def __init__(self, mark: str) -> None:
            self.mark = mark

    class Other(Callback):
        pass

    class Configures(regression):  # type: ignore[misc]
        def configure_callbacks(self) -> Any:
            return Marked("module")

    trainer = make_trainer(callbacks=[Marked("trainer"), Other()])
    trainer.fit(Configures(), loader)
    assert [getattr(callback, "mark", "other") for callback in trainer.callbacks] == ["other", "module"]


def test_t48_two_callbacks_with_one_state_key_are_refused(make_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match="Two EarlyStopping callbacks would save their state under"):
        make_trainer(callbacks=[EarlyStopping("x"), EarlyStopping("x", patience=9)])
    make_trainer(callbacks=[EarlyStopping("x"), EarlyStopping("y")])


def test_defaults_that_contradict_what_was_passed_are_refused(make_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"enable_checkpointing=False\) contradicts the ModelCheckpoint"):
        make_trainer(callbacks=[ModelCheckpoint()], enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match=r"callbacks=...\) got a str: 'early'"):
        make_trainer(callbacks=["early"])
    with pytest.raises(ConfigurationError, match=r"logger=...\) got an? int"):
        make_trainer(logger=3)
    with pytest.raises(ConfigurationError, match=r"logger=...\) got a str"):
        make_trainer(logger="cvs")


def test_the_defaults(tmp_path: Path) -> None:
    names = [type(callback).__name__ for callback in Trainer(default_root_dir=tmp_path).callbacks]
    assert names == ["ModelSummary", "PlainProgressBar", "ModelCheckpoint"]
    names = [type(c).__name__ for c in Trainer(default_root_dir=tmp_path, fast_dev_run=True).callbacks]
    assert "ModelCheckpoint" not in names
    assert list(tmp_path.iterdir()) == []  # making a Trainer writes nothing


@pytest.mark.parametrize("progress_bar", [False, True])
def test_the_plan_is_shown_once_with_its_reasons(
    regression: Any, loader: Any, make_trainer: Any, caplog: Any, monkeypatch: Any, progress_bar: bool
) -> None:
    monkeypatch.setattr(life, "_PLANS_SHOWN", set())
    trainer, equal, other = (
        make_trainer(enable_progress_bar=progress_bar, max_epochs=1, accumulate_grad_batches=k, precision=precision)
        for k, precision in ((1, None), (2, None), (1, "64-true"))
    )
    with caplog.at_level(logging.INFO):
        for each in (trainer, trainer, equal, other, trainer):
            each.fit(regression(), loader)
    plans = [record.message for record in caplog.records if record.message.startswith("drivetrain plan")]
    assert len(plans) == 2
    for plan, each in zip(plans, (trainer, other), strict=True):  # one more line when the step is bound
        assert str(each.plan).startswith(f"{plan}\n  step ")
    assert 'because accelerator="cpu"' in plans[0]


def test_a_trainer_and_its_plan_show_themselves_in_a_line() -> None:
    trainer = Trainer(max_epochs=3, accelerator="cpu", callbacks=[Timer()], logger=False)
    assert repr(trainer) == ("Trainer(accelerator='cpu', logger=False, callbacks=[<Timer object>], max_epochs=3)")
    assert repr(trainer.plan) == (
        "Plan(accelerator='cpu', devices='cpu', strategy='SingleDeviceStrategy', processes='this one', "
        "precision='32-true', logger='none')"
    )


def test_ctrl_c_leaves_with_code_130_after_everything_is_cleaned_up(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    class Watches(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append((type(exception), trainer.interrupted, signal.getsignal(signal.SIGINT) is signal.SIG_IGN))

    class Interrupts(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            signal.raise_signal(signal.SIGINT)
            return self.loss(batch)

    trainer = make_trainer(callbacks=[Watches()])
    with pytest.raises(SystemExit) as caught:
        trainer.fit(Interrupts(), loader)
    assert caught.value.code == 130
    assert seen == [(KeyboardInterrupt, True, True)]
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_in_a_notebook_shows_no_frame_below_the_call(
    regression: Any, loader: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook shows each frame with ten lines of its source."""

    class Interrupts(regression):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            signal.raise_signal(signal.SIGINT)
            return self.loss(batch)

    monkeypatch.setattr(trainer_module, "in_notebook", lambda: True)
    with pytest.raises(KeyboardInterrupt) as caught:
        make_trainer().fit(Interrupts(), loader)
    names = [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert names == ["test_ctrl_c_in_a_notebook_shows_no_frame_below_the_call", "fit", "run_job"]
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("fails", ["training_step", "on_train_epoch_end"])
def test_an_error_in_a_notebook_shows_the_users_lines_and_what_is_below_them(
    regression: Any, loader: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def broken(self: Any, *args: Any) -> Any:
        self.log("name", 1.0, on_step=False, on_epoch=False)

    monkeypatch.setattr(trainer_module, "in_notebook", lambda: True)
    model = type("Broken", (regression,), {fails: broken})()
    with pytest.raises(LoggingError, match="would log nothing") as caught:
        make_trainer().fit(model, loader)
    names = [entry.name for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:] == ["fit", "run_job", "broken"]  # the text contains the cure, so nothing below the user's line
    wrong = type("Wrong", (regression,), {"training_step": lambda self, batch, batch_idx: torch.ones(2) @ batch[0]})()
    with pytest.raises(RuntimeError) as failed:
        make_trainer().fit(wrong, loader)
    names = [entry.name for entry in traceback.extract_tb(failed.value.__traceback__)]
    assert names[1:] == ["fit", "run_job", "<lambda>"]


def test_a_trainer_may_fit_again_after_a_failure(regression: Any, loader: Any, make_trainer: Any) -> None:
    class Breaks(regression):  # type: ignore[misc]
        broken = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.broken:
                raise RuntimeError("broken")
            return self.loss(batch)

    model, trainer = Breaks(), make_trainer()
    with pytest.raises(RuntimeError):
        trainer.fit(model, loader)
    model.broken = False
    trainer.fit(model, loader)
    assert not trainer.interrupted
    assert trainer.global_step == 4


def test_runs_leave_no_thread_file_or_tensor_behind(
    validated: Any, loader: Any, make_trainer: Any, tmp_path: Path
) -> None:
    def one() -> tuple[Any, Any]:
        trainer = make_trainer(
            logger=True, enable_checkpointing=True, enable_progress_bar=True, enable_model_summary=True
        )
        model = validated()
        trainer.fit(model, loader, loader)
        return weakref.ref(trainer), weakref.ref(model)

    one()  # what torch and the loggers load once is not ours
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd")) if os.path.exists("/proc") else 0
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    for _ in range(3):
        references = one()
        gc.collect()
        assert [reference() for reference in references] == [None, None]
    assert threading.active_count() == threads
    assert not files or len(os.listdir("/proc/self/fd")) == files
    assert sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()) == tensors
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_epochs": 3}, 12),
        ({"max_epochs": 3, "accumulate_grad_batches": 3}, 6),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 6),
        ({"max_epochs": -1}, float("inf")),
        ({"max_epochs": -1, "max_steps": 7}, 7),
    ],
)
def test_t50_estimated_stepping_batches_inside_of_configure_optimizers(
    regression: Any, loader: Any, make_trainer: Any, arguments: Any, expected: float
) -> None:
    seen: list[float] = []

    class Asks(regression):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            seen.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

        def on_train_start(self) -> None:
            self.trainer.should_stop = True

    make_trainer(**arguments).fit(Asks(), loader)
    assert seen == [expected]


def test_what_can_be_read(validated: Any, loader: Any, make_trainer: Any) -> None:
    stages: set[tuple[str, ...]] = set()

    class Reads(Callback):
        def _note(self, trainer: Any) -> None:
            names = ("training", "validating", "testing", "sanity_checking", "predicting")
            stages.add(tuple(name for name in names if getattr(trainer, name)))

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            self._note(trainer)

        def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
            self._note(trainer)

        def on_test_batch_start(self, trainer: Any, *args: Any) -> None:
            self._note(trainer)

    model, trainer = validated(), make_trainer(callbacks=[Reads()], max_epochs=2, min_epochs=1)
    trainer.fit(model, loader, loader)
    trainer.test(model, loader, verbose=False)
    assert stages == {("training",), ("validating",), ("sanity_checking",), ("testing",)}
    assert (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size) == (0, 0, 0, 1)
    assert (trainer.num_nodes, trainer.num_devices, trainer.device_ids) == (1, 1, [0])
    assert trainer.is_global_zero
    assert (trainer.max_epochs, trainer.min_epochs, trainer.max_steps, trainer.precision) == (2, 1, -1, "32-true")
    assert trainer.lightning_module is model
    assert trainer.model is model
    assert trainer.accelerator is trainer.strategy.accelerator
    assert trainer.log_dir == trainer.default_root_dir
    assert model.trainer is trainer
    assert (model.current_epoch, model.global_step) == (2, 8)
    assert trainer.state.status == "finished"


def test_the_module_reaches_its_optimizers_schedulers_and_loggers(
    regression: Any, loader: Any, make_trainer: Any
) -> None:
    class Asks(regression):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

        def on_train_start(self) -> None:
            assert isinstance(self.optimizers(), torch.optim.SGD)
            assert isinstance(self.lr_schedulers(), torch.optim.lr_scheduler.StepLR)
            assert self.logger is None
            assert self.loggers == []
            assert (self.device.type, self.dtype) == ("cpu", torch.float32)

    trainer = make_trainer()
    trainer.fit(Asks(), loader)
    assert trainer.global_step == 4


def test_a_module_copies_and_pickles_without_its_trainer(regression: Any, loader: Any, make_trainer: Any) -> None:
    import copy

    trainer, model = make_trainer(), regression()
    trainer.fit(model, loader)
    twin = copy.deepcopy(model)
    assert model.trainer is trainer
    with pytest.raises(RuntimeError, match="not attached to a Trainer"):
        _ = twin.trainer
    assert torch.equal(twin.net[0].weight, model.net[0].weight)


def test_save_checkpoint_needs_a_model(make_trainer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no model to save yet"):
        make_trainer().save_checkpoint(tmp_path / "x.ckpt")


def test_ctrl_c_of_a_real_process(tmp_path: Path) -> None:
    """The last checkpoint is whole, the log is flushed and the exit code is 1."""
    script = tmp_path / "train.py"
    script.write_text(
        """
import sys, torch
from drivetrain import LightningModule, Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.loggers import CSVLogger

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch):
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        if self.global_step == 20:
            print("running", flush=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=4)
    Trainer(accelerator="cpu", max_epochs=-1, enable_progress_bar=False, log_every_n_steps=1, logger=CSVLogger("."),
            callbacks=[ModelCheckpoint(dirpath=".", save_last=True)]).fit(Model(), loader)
"""
    )
    with subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any("running" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] >= 20
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(rows) > 20


def test_no_validation_is_no_missing_loader(validated: Any, loader: Any, make_trainer: Any) -> None:
    make_trainer(limit_val_batches=0).fit(validated(), loader)  # a warning would be an error here


def test_loaders_and_a_datamodule_together_are_refused(validated: Any, loader: Any, make_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"trainer.fit got both loaders and a datamodule"):
        make_trainer().fit(validated(), loader, datamodule=LightningDataModule())


def test_the_users_home_is_understood(make_trainer: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert make_trainer(default_root_dir="~/runs").default_root_dir == os.path.join(tmp_path, "runs")


def test_evaluating_after_a_fit_keeps_its_optimizers_for_a_checkpoint(
    validated: Any, loader: Any, make_trainer: Any, tmp_path: Path
) -> None:
    model, trainer = validated(), make_trainer()
    trainer.fit(model, loader, loader)
    trainer.validate(model, loader, verbose=False)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert len(torch.load(tmp_path / "x.ckpt", weights_only=True)["optimizer_states"]) == 1
    trainer.validate(validated(), loader, verbose=False)
    assert trainer.optimizers == []  # they belong to another model


@pytest.mark.parametrize(
    ("entry", "argument", "expected"),
    [
        ("fit", "train_dataloader", "Did you mean 'train_dataloaders'?"),
        ("fit", "val_dataloader", "Did you mean 'val_dataloaders'?"),
        ("fit", "data_module", "Did you mean 'datamodule'?"),
        ("fit", "max_epochs", "it is one of the Trainer. Write Trainer(max_epochs=...)."),
        ("fit", "epochs", "Did you mean Trainer(max_epochs=...)?"),
        ("fit", "resume_from_checkpoint", "Write ckpt_path=..."),
        ("validate", "val_dataloaders", "Did you mean 'dataloaders'?"),
        ("test", "dataloader", "Did you mean 'dataloaders'?"),
        ("predict", "return_prediction", "Did you mean 'return_predictions'?"),
    ],
)
def test_a_misspelt_keyword_of_an_entry_point_is_named_with_a_similar_one(
    validated: Any, loader: Any, make_trainer: Any, entry: str, argument: str, expected: str
) -> None:
    with pytest.raises(TypeError, match=f"trainer.{entry} has no argument {argument}") as caught:
        getattr(make_trainer(), entry)(validated(), **{argument: loader})
    assert isinstance(caught.value, ConfigurationError)
    assert expected in str(caught.value)


@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_what_catches_misspelt_keywords_is_no_part_of_the_signature(entry: str) -> None:
    parameters = inspect.signature(getattr(Trainer, entry)).parameters
    assert "unknown" not in parameters
    assert list(parameters)[:2] == ["self", "model"]


def test_setup_and_teardown_get_the_entry_point_itself_which_is_also_its_name(
    validated: Any, data: Any, make_trainer: Any
) -> None:
    stages: list[Any] = []

    class Records:
        def setup(self, *args: Any) -> None:
            stages.append(args[-1])

        teardown = setup

    class Data(Records, LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(data, batch_size=8)

        val_dataloader = test_dataloader = train_dataloader

    class Recording(Records, Callback):
        pass

    model, trainer = type("Model", (Records, validated), {})(), make_trainer(callbacks=[Recording()])
    for entry in (trainer.fit, trainer.validate, trainer.test):
        entry(model, datamodule=Data())
        assert len(stages) == 6
        assert all(each is trainer.state.fn and f"{each}" == each + "" == entry.__name__ for each in stages)
        stages.clear()
