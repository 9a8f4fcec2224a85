"""The parts of a Trainer that libraries reach under private names, in fits that use them."""

from __future__ import annotations

import copy
import csv
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningDataModule
from drivetrain.callbacks import EarlyStopping, ModelCheckpoint
from drivetrain.clusters import LightningEnvironment
from drivetrain.errors import CheckpointError, ConfigurationError, NotSupportedError
from drivetrain.loggers import CSVLogger
from drivetrain.strategies import ModelParallelStrategy


class GoesBack(Callback):
    """Restores a checkpoint of epoch 0 when epoch 2 begins, step by step as finetuning-scheduler does."""

    def __init__(self, path: Path, change: Any = None) -> None:
        self.path, self.change, self.seen = path, change, []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch != 2:
            return
        connector = trainer._checkpoint_connector
        connector.resume_start(checkpoint_path=self.path)
        connector.restore_datamodule()
        if self.change is not None:
            connector._loaded_checkpoint = self.change(connector._loaded_checkpoint)
        connector.restore_model()
        connector.restore_precision_plugin_state()
        connector.restore_optimizers_and_schedulers()
        self.seen = [trainer.current_epoch, trainer.global_step, dict(connector._loaded_checkpoint)]
        connector.resume_end()
        self.weights = copy.deepcopy(pl_module.state_dict())
        self.moment = copy.deepcopy(trainer.optimizers[0].state_dict())
        self.rates = trainer.lr_scheduler_configs[0].scheduler.state_dict()


class Remembers(LightningDataModule):
    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data, self.restored = data, []

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=8)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.trainer.current_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored.append(state_dict)


@pytest.fixture
def scheduled(regression: Any) -> Any:
    class Scheduled(regression):  # type: ignore[misc]
        loaded = 0

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.loaded += 1

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    return Scheduled()


def saver(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, monitor="epoch", mode="max", **options)


def test_a_fit_takes_back_weights_optimizers_and_schedulers_and_stays_where_it_is(
    make_trainer: Any, scheduled: Any, data: Any, tmp_path: Path
) -> None:
    datamodule, back = Remembers(data), GoesBack(tmp_path / "epoch=0.ckpt")
    trainer = make_trainer(max_epochs=3, callbacks=[back, saver(tmp_path)], enable_checkpointing=True)
    trainer.fit(scheduled, datamodule=datamodule)
    kept = torch.load(tmp_path / "epoch=0.ckpt", weights_only=False)
    assert back.seen[:2] == [2, 8]
    assert back.seen[2].keys() >= {"state_dict", "optimizer_states", "lr_schedulers", "epoch"}
    torch.testing.assert_close(back.weights, kept["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(back.moment["state"], kept["optimizer_states"][0]["state"], rtol=0, atol=0)
    assert back.rates["last_epoch"] == 1
    assert (scheduled.loaded, datamodule.restored) == (1, [{"epoch": 0}])
    assert (trainer.current_epoch, trainer.global_step) == (3, 12)
    assert trainer._checkpoint_connector._loaded_checkpoint == {}


def test_what_was_read_may_be_changed_before_it_is_restored(
    make_trainer: Any, scheduled: Any, loader: Any, tmp_path: Path
) -> None:
    def zeros(checkpoint: dict[str, Any]) -> dict[str, Any]:
        return {**checkpoint, "state_dict": {k: torch.zeros_like(v) for k, v in checkpoint["state_dict"].items()}}

    back = GoesBack(tmp_path / "epoch=0.ckpt", zeros)
    trainer = make_trainer(max_epochs=3, callbacks=[back, saver(tmp_path)], enable_checkpointing=True)
    trainer.fit(scheduled, loader)
    assert not any(weight.any() for weight in back.weights.values())


@pytest.mark.parametrize("states", [0, 2])
def test_the_number_of_optimizer_states_may_differ(
    make_trainer: Any, scheduled: Any, loader: Any, tmp_path: Path, states: int
) -> None:
    back = GoesBack(
        tmp_path / "epoch=0.ckpt", lambda kept: {**kept, "optimizer_states": kept["optimizer_states"] * states}
    )
    trainer = make_trainer(max_epochs=3, callbacks=[back, saver(tmp_path)], enable_checkpointing=True)
    trainer.fit(scheduled, loader)
    assert {int(each["step"]) for each in back.moment["state"].values()} == {4 if states else 8}


def test_the_error_of_a_callback_is_not_wrapped(make_trainer: Any, scheduled: Any, loader: Any) -> None:
    class Fails(Callback):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise ValueError("own error")

    trainer = make_trainer(callbacks=Fails())
    trainer.fit(scheduled, loader)
    trainer._checkpoint_connector._loaded_checkpoint = {"callbacks": {"Absent": {}}}
    trainer._checkpoint_connector.restore_callbacks()  # without a warning
    trainer._checkpoint_connector._loaded_checkpoint = {"callbacks": {"Absent": {}, Fails().state_key: {}}}
    with pytest.raises(ValueError, match="^own error$"):
        trainer._checkpoint_connector.restore_callbacks()


def test_a_checkpoint_of_weights_alone_is_a_key_error(
    make_trainer: Any, scheduled: Any, loader: Any, tmp_path: Path
) -> None:
    back = GoesBack(tmp_path / "epoch=0.ckpt")
    callbacks = [back, saver(tmp_path, save_weights_only=True)]
    with pytest.raises(KeyError, match="has no 'optimizer_states': it was saved with save_weights_only=True"):
        make_trainer(max_epochs=3, callbacks=callbacks, enable_checkpointing=True).fit(scheduled, loader)


def test_all_of_it_at_once_but_never_the_progress(
    make_trainer: Any, scheduled: Any, loader: Any, tmp_path: Path
) -> None:
    class All(GoesBack):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 2:
                trainer.early_stopping_callbacks[0].wait_count = 7
                trainer._checkpoint_connector.restore(self.path)
                self.weights = copy.deepcopy(pl_module.state_dict())
                with pytest.raises(NotSupportedError, match=r"Resume from the checkpoint instead: trainer\.fit"):
                    trainer._checkpoint_connector.restore_training_state()

    back, stopping = All(tmp_path / "epoch=0.ckpt"), EarlyStopping("epoch", mode="max", strict=False)
    trainer = make_trainer(max_epochs=3, callbacks=[back, stopping, saver(tmp_path)], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="was not logged"):
        trainer.fit(scheduled, loader)
    kept = torch.load(tmp_path / "epoch=0.ckpt", weights_only=False)
    torch.testing.assert_close(back.weights, kept["state_dict"], rtol=0, atol=0)
    assert (stopping.wait_count, trainer.current_epoch) == (0, 3)


def test_without_a_path_nothing_is_restored(make_trainer: Any, scheduled: Any, loader: Any) -> None:
    trainer = make_trainer()
    trainer.fit(scheduled, loader)
    connector, before = trainer._checkpoint_connector, copy.deepcopy(scheduled.state_dict())
    connector.restore()
    connector.restore_optimizers_and_schedulers()
    torch.testing.assert_close(scheduled.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="missing"):
        connector.resume_start("missing.ckpt")


def test_a_dump_is_what_would_be_saved(make_trainer: Any, scheduled: Any, loader: Any, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.fit(scheduled, loader)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    dumped = trainer._checkpoint_connector.dump_checkpoint()
    assert dumped.keys() == torch.load(tmp_path / "saved.ckpt", weights_only=False).keys()
    assert "optimizer_states" not in trainer._checkpoint_connector.dump_checkpoint(weights_only=True)


def test_what_was_read_does_not_travel_into_other_processes(make_trainer: Any) -> None:
    trainer = make_trainer()
    trainer._checkpoint_connector._loaded_checkpoint = {"state_dict": lambda: 0}  # cannot be pickled
    assert pickle.loads(pickle.dumps(trainer))._checkpoint_connector._loaded_checkpoint == {}


def test_callbacks_in_the_order_in_which_they_run(make_trainer: Any, tmp_path: Path) -> None:
    stopping, saves = EarlyStopping("loss"), saver(tmp_path)
    ordered = make_trainer()._callback_connector._reorder_callbacks([saves, stopping])
    assert ordered == [stopping, saves]


def test_the_strategy_by_the_name_or_the_object_that_was_given(make_trainer: Any) -> None:
    assert make_trainer(strategy="ddp", devices=2)._accelerator_connector._strategy_flag == "ddp"
    strategy = ModelParallelStrategy(tensor_parallel_size=1)
    flag = make_trainer(strategy=strategy, devices=2)._accelerator_connector._strategy_flag
    assert flag is strategy
    assert flag.strategy_name == "modelparallelstrategy"  # finetuning-scheduler has an adapter of this name


def test_how_a_name_was_logged(make_trainer: Any, validated: Any, loader: Any) -> None:
    class Asks(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.found = {each.meta.name: each for each in trainer._results.result_metrics}

    class Logs(validated):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("alone", 1.0, prog_bar=True)
            self.log("shared", 1.0, sync_dist=True)

    asks = Asks()
    trainer = make_trainer(callbacks=asks)
    trainer.fit(Logs(), loader, loader)
    assert {name: each.meta.sync.should for name, each in asks.found.items()} == {"alone": False, "shared": True}
    assert {name: each.meta.prog_bar for name, each in asks.found.items()} == {"alone": True, "shared": False}
    assert all(each.is_tensor and each.meta.on_epoch for each in asks.found.values())
    assert trainer._results is None


# ---- loggers and data ------------------------------------------------------------------------------------------------


def test_whether_this_batch_is_logged_and_values_past_the_module(
    make_trainer: Any, regression: Any, loader: Any, tmp_path: Path
) -> None:
    class Logs(Callback):
        def __init__(self) -> None:
            self.asked: list[bool] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer._logger_connector.should_update_logs:
                trainer._logger_connector.log_metrics({"own": torch.tensor(batch_idx)})
                trainer._logger_connector.log_metrics({"other": 1}, step=50)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.asked.append(trainer._logger_connector.should_update_logs)

    logs, logger = Logs(), CSVLogger(tmp_path)
    trainer = make_trainer(callbacks=logs, logger=logger, log_every_n_steps=2)
    trainer.fit(regression(), loader)
    assert logs.asked == [False, True, False, True]
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    assert [(row["step"], row["own"]) for row in rows if row["own"]] == [("1", "1.0"), ("3", "3.0")]
    assert {row["step"] for row in rows if row["other"]} == {"50"}
    assert trainer._logger_connector.callback_metrics is trainer.callback_metrics


class AsksForLoaders(Callback):
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.ask("setup", trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.ask("on_fit_start", trainer)

    def ask(self, when: str, trainer: Any) -> None:
        source = trainer._data_connector._train_dataloader_source
        try:
            self.found[when] = source.dataloader()
        except ConfigurationError as error:
            self.found[when] = str(error)


def test_the_loader_that_was_passed(make_trainer: Any, regression: Any, loader: Any) -> None:
    asks = AsksForLoaders()
    trainer = make_trainer(callbacks=asks)
    trainer.fit(regression(), loader)
    assert "There is no train_dataloader, and loaders that are passed" in asks.found["setup"]
    assert "estimated_stepping_batches" in asks.found["setup"]
    assert asks.found["on_fit_start"] is loader
    assert trainer._data_connector._train_dataloader_source.is_defined()
    assert not trainer._data_connector._test_dataloader_source.is_defined()


def test_the_loader_of_a_hook_and_whose_hooks_there_are(make_trainer: Any, regression: Any, data: Any) -> None:
    asks, module, datamodule = AsksForLoaders(), regression(), Remembers(data)
    trainer = make_trainer(callbacks=asks)
    trainer.fit(module, datamodule=datamodule)
    assert [len(asks.found[when]) for when in ("setup", "on_fit_start")] == [4, 4]
    selector = trainer._data_connector._datahook_selector
    assert (selector.model, selector.datamodule) == (module, datamodule)


def test_who_has_started_the_job(make_trainer: Any) -> None:
    one, two = (make_trainer(devices=devices, strategy="ddp")._accelerator_connector for devices in (1, 2))
    assert (one.is_distributed, two.is_distributed) == (False, True)
    assert isinstance(one.cluster_environment, LightningEnvironment)


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("use_distributed_sampler", False, r"Trainer\(use_distributed_sampler=False\)"),
        ("_accelerator_flag", "cuda", r"Trainer\(accelerator='cuda'\)"),
    ],
)
def test_what_is_decided_cannot_be_set_in_vain(make_trainer: Any, name: str, value: Any, cure: str) -> None:
    """Programs set the first one in ``setup``, so that their samplers stay as they are."""
    trainer = make_trainer()
    assert trainer._accelerator_connector.use_distributed_sampler
    assert not make_trainer(use_distributed_sampler=False)._accelerator_connector.use_distributed_sampler
    with pytest.raises(NotSupportedError, match=cure):
        setattr(trainer._accelerator_connector, name, value)
