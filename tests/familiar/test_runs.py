"""What hooks, loggers and callers see of a run, as programs written for Lightning expect it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.data.combined import CombinedLoader
from drivetrain.loggers import Logger

pytestmark = pytest.mark.filterwarnings("ignore:.* has a validation_step but there is no validation loader")


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 3})
        self.layer = nn.Linear(4, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), on_step=True, on_epoch=True)
        self.log("of_step", 1.0, on_step=True, on_epoch=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Keeps(Logger):
    name, version = "keeps", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.hyperparameters: list[dict[str, Any]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any = None) -> None:
        self.hyperparameters.append(dict(params or {}))


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_the_stage_is_known_while_a_run_is_set_up(make_trainer: Any, loader: Any, stage: str) -> None:
    seen: dict[str, Any] = {}

    class Sees(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            seen["setup"] = self.of(trainer)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            seen["evaluates"] = trainer.evaluating

        def of(self, trainer: Any) -> list[str]:
            return [name for name in ("training", "validating", "testing", "predicting") if getattr(trainer, name)]

    trainer = make_trainer(callbacks=Sees())
    getattr(trainer, stage)(Net(), loader)
    assert seen["setup"] == [{"fit": "training", "validate": "validating", "test": "testing"}.get(stage, "predicting")]
    assert seen["evaluates"] is (stage in ("validate", "test"))
    assert trainer.state.stage is None


def test_an_epoch_that_a_checkpoint_has_ended_is_over_in_on_train_start(
    make_trainer: Any, loader: Any, tmp_path: Any
) -> None:
    seen: list[tuple[str, int]] = []

    class Sees(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(("start", pl_module.current_epoch))

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(("epoch", trainer.current_epoch))

    saver = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    make_trainer(max_epochs=2, callbacks=saver, enable_checkpointing=True).fit(Net(), loader)
    again = make_trainer(max_epochs=3, callbacks=[Sees(), ModelCheckpoint(tmp_path)], enable_checkpointing=True)
    again.fit(Net(), loader, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert seen == [("start", 2), ("epoch", 2)]


@pytest.mark.parametrize("kind", ["validation", "test"])
def test_super_of_model_train_goes_into_training_mode(make_trainer: Any, loader: Any, kind: str) -> None:
    class Own(Net):
        def on_validation_model_train(self) -> None:
            super().on_validation_model_train()

        def on_test_model_train(self) -> None:
            super().on_test_model_train()

    model = Own()
    trainer = make_trainer()
    if kind == "validation":
        trainer.fit(model, loader, loader)
    else:
        trainer.test(model, loader)
    assert model.training
    assert model.layer.training


def test_a_step_that_returned_nothing_gives_hooks_an_empty_dictionary(make_trainer: Any, loader: Any) -> None:
    seen = []

    class ByHand(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

    make_trainer().fit(ByHand(), loader)
    assert seen == [{}] * 4


def test_every_sample_is_predicted_also_with_drop_last(make_trainer: Any, data: Any) -> None:
    loader = DataLoader(data, batch_size=5, drop_last=True)
    found = make_trainer().predict(Net(), [loader, DataLoader(data, batch_size=5)])
    assert [sum(map(len, each)) for each in found] == [32, 32]
    assert len(list(loader)) == 6  # the user's own stays as it is


def test_hyperparameters_are_logged_by_every_entry_point(make_trainer: Any, loader: Any) -> None:
    for stage in ("validate", "test", "predict"):
        logger = Keeps()
        getattr(make_trainer(logger=logger), stage)(Net(), loader)
        assert logger.hyperparameters == [{"width": 3}]


def test_an_evaluation_after_a_fit_is_logged_at_the_number_of_its_steps(make_trainer: Any, loader: Any) -> None:
    logger = Keeps()
    trainer = make_trainer(logger=logger)
    trainer.fit(Net(), loader, loader)
    assert [step for step, row in logger.rows if "val_loss_epoch" in row] == [3]  # of the fit: the last step's index
    trainer.test(dataloaders=loader)
    assert [step for step, row in logger.rows if "test_loss" in row] == [4]


def test_a_validation_inside_a_window_is_logged_at_the_index_of_that_window(make_trainer: Any, loader: Any) -> None:
    logger = Keeps()
    make_trainer(logger=logger, accumulate_grad_batches=3, val_check_interval=2).fit(Net(), loader, loader)
    assert [step for step, row in logger.rows if "val_loss_epoch" in row] == [0, 1]  # after batches 2 and 4 of 3 + 1


def test_callback_metrics_hold_no_step_values_of_an_evaluation(make_trainer: Any, loader: Any) -> None:
    trainer = make_trainer()
    trainer.validate(Net(), loader)
    assert set(trainer.callback_metrics) == {"val_loss", "val_loss_epoch"}


def test_what_is_logged_when_an_epoch_starts_can_be_read_at_once(make_trainer: Any, loader: Any) -> None:
    seen = []

    class Logs(Net):
        def on_train_epoch_start(self) -> None:
            self.log("difficulty", float(self.current_epoch))
            seen.append(self.trainer.callback_metrics["difficulty"].item())

    make_trainer(max_epochs=2).fit(Logs(), loader)
    assert seen == [0.0, 1.0]


class Logged(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("hidden", loss, logger=False)
        self.log("count", torch.tensor(batch_idx))
        return loss

    def on_train_epoch_end(self) -> None:
        self.at_end = dict(self.trainer.logged_metrics)


@pytest.mark.filterwarnings("ignore:.*no logger has seen it")
@pytest.mark.parametrize("logger", [False, True])
def test_logged_metrics_are_tensors_of_the_logged_names_also_without_a_logger(
    make_trainer: Any, loader: Any, logger: bool
) -> None:
    model = Logged()
    trainer = make_trainer(logger=Keeps() if logger else False)  # 4 steps, so that no step is logged
    trainer.fit(model, loader, loader)
    assert set(model.at_end) == {"loss_step", "loss_epoch", "count", "val_loss_step", "val_loss_epoch", "of_step"}
    assert set(trainer.logged_metrics) == set(model.at_end)
    assert all(value.ndim == 0 and value.is_floating_point() for value in trainer.logged_metrics.values())
    assert trainer.logged_metrics["count"].item() == 3


def test_a_whole_number_is_a_float_in_callback_metrics(make_trainer: Any, loader: Any) -> None:
    trainer = make_trainer()
    trainer.fit(Logged(), loader)
    assert trainer.callback_metrics["count"].is_floating_point()


def test_the_loaders_of_a_combined_loader_are_those_that_it_holds(make_trainer: Any, loader: Any) -> None:
    class Takes(Net):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch["a"])

    combined = CombinedLoader({"a": loader, "b": loader}, "min_size")
    trainer = make_trainer()
    trainer.fit(Takes(), combined)
    assert trainer.train_dataloader == {"a": loader, "b": loader}
    assert trainer.train_dataloader["a"] is loader


class Remembers(Callback):
    """A callback with a state that an evaluation needs, such as averaged weights."""

    def __init__(self) -> None:
        self.value, self.found = 0, ""

    def state_dict(self) -> dict[str, Any]:
        return {"value": 5}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["remembered"] = "yes"

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["remembered"]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_restores_the_programs_callbacks(
    make_trainer: Any, loader: Any, tmp_path: Any, stage: str
) -> None:
    trainer = make_trainer(callbacks=Remembers())
    trainer.fit(Net(), loader)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    callback, saver = Remembers(), ModelCheckpoint(tmp_path / "others")
    trainer = make_trainer(callbacks=[callback, saver], enable_checkpointing=True)
    getattr(trainer, stage)(Net(), loader, ckpt_path=tmp_path / "run.ckpt")
    assert (callback.value, callback.found) == (5, "yes")
    assert saver.best_model_path == ""  # drivetrain's own keep the state that they have


def test_without_a_monitor_a_checkpoint_has_no_score(make_trainer: Any, loader: Any, tmp_path: Any) -> None:
    saver = ModelCheckpoint(tmp_path)
    make_trainer(callbacks=saver, enable_checkpointing=True).fit(Net(), loader)
    assert saver.best_model_path
    assert saver.current_score is None
