"""The arguments that can be read of a Trainer, as programs written for Lightning do."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import Callback, Trainer

# Public attributes of Lightning 2.6's Trainer, beside its methods.
FAMILIAR = [
    "accelerator", "accumulate_grad_batches", "barebones", "callback_metrics", "callbacks", "check_val_every_n_epoch",
    "checkpoint_callback", "checkpoint_callbacks", "ckpt_path", "current_epoch", "datamodule", "default_root_dir",
    "device_ids", "distributed_sampler_kwargs", "early_stopping_callback", "early_stopping_callbacks",
    "enable_autolog_hparams", "enable_validation", "estimated_stepping_batches", "evaluating", "fast_dev_run",
    "fit_loop", "global_rank", "global_step", "gradient_clip_algorithm", "gradient_clip_val", "interrupted",
    "is_global_zero", "is_last_batch", "lightning_module", "limit_predict_batches", "limit_test_batches",
    "limit_train_batches", "limit_val_batches", "local_rank", "log_dir", "log_every_n_steps", "logged_metrics",
    "logger", "loggers", "lr_scheduler_configs", "max_epochs", "max_steps", "min_epochs", "min_steps", "model",
    "node_rank", "num_devices", "num_nodes", "num_predict_batches", "num_sanity_val_batches", "num_sanity_val_steps",
    "num_test_batches", "num_training_batches", "num_val_batches", "optimizers", "overfit_batches", "precision",
    "precision_plugin", "predict_dataloaders", "predict_loop", "predicting", "profiler", "progress_bar_callback",
    "progress_bar_metrics", "received_sigterm", "reload_dataloaders_every_n_epochs", "sanity_checking", "scaler",
    "should_stop", "state", "strategy", "test_dataloaders", "test_loop", "testing", "train_dataloader", "training",
    "val_check_batch", "val_check_interval", "val_dataloaders", "validate_loop", "validating", "world_size",
]  # fmt: skip


def test_every_attribute_of_the_familiar_trainer_can_be_read_before_during_and_after_a_run(
    validated: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    missing: list[str] = []

    def read(trainer: Trainer) -> None:
        missing.extend(name for name in FAMILIAR if not hasattr(trainer, name))

    class Reading(Callback):
        def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
            read(trainer)

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            read(trainer)

        def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
            read(trainer)

        def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
            read(trainer)

    trainer = make_trainer(callbacks=Reading())
    read(trainer)
    trainer.fit(validated(), loader, loader)
    trainer.validate(validated(), loader, verbose=False)
    read(trainer)
    assert missing == []
    assert not hasattr(trainer, "no_such_attribute")  # the control: the reading above can fail


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"gradient_clip_val": None, "gradient_clip_algorithm": None, "num_sanity_val_steps": 2,
              "overfit_batches": 0.0, "barebones": False, "fast_dev_run": False, "enable_autolog_hparams": True}),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
         {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
        ({"num_sanity_val_steps": -1}, {"num_sanity_val_steps": float("inf")}),
        ({"num_sanity_val_steps": 0}, {"num_sanity_val_steps": 0}),
        ({"overfit_batches": 2}, {"overfit_batches": 2, "limit_train_batches": 2, "limit_val_batches": 2}),
        ({"fast_dev_run": True}, {"fast_dev_run": True, "num_sanity_val_steps": 0, "limit_train_batches": 1}),
        ({"enable_autolog_hparams": False}, {"enable_autolog_hparams": False}),
    ],
)  # fmt: skip
def test_an_argument_is_read_as_it_was_passed_or_with_its_default(
    arguments: Any, expected: Any, make_trainer: Any
) -> None:
    trainer = make_trainer(**arguments)
    assert {name: getattr(trainer, name) for name in expected} == expected


def test_barebones_is_read_and_has_no_sanity_check() -> None:
    trainer = Trainer(barebones=True, accelerator="cpu")
    assert trainer.barebones
    assert trainer.num_sanity_val_steps == 0


@pytest.mark.parametrize(
    "name", ["gradient_clip_val", "gradient_clip_algorithm", "overfit_batches", "barebones", "fast_dev_run"]
)
def test_an_argument_that_cannot_be_changed_says_so(name: str, make_trainer: Any) -> None:
    trainer = make_trainer()
    with pytest.raises(AttributeError, match=rf"trainer.{name} cannot be changed. Write Trainer\({name}=1\) instead"):
        setattr(trainer, name, 1)


@pytest.mark.parametrize(("value", "steps"), [(0, 0), (1, 1), (None, 2), (-1, 4)])
def test_how_long_the_sanity_check_is_may_be_written(
    value: int | None, steps: int, validated: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    seen: list[bool] = []

    class Counts(Callback):
        def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
            seen.append(trainer.sanity_checking)

    trainer = make_trainer(callbacks=Counts(), num_sanity_val_steps=3)
    trainer.num_sanity_val_steps = value
    trainer.fit(validated(), loader, loader)
    assert sum(seen) == steps


class Endless(IterableDataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


@pytest.mark.parametrize(
    ("interval", "before", "during"),
    [
        (None, None, 4),
        (0.5, None, 2),
        (3, 3, 3),
        (timedelta(hours=1), None, None),
    ],
)
def test_after_how_many_batches_validation_comes(
    interval: Any, before: Any, during: Any, validated: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    trainer = make_trainer(val_check_interval=interval)
    assert trainer.val_check_batch == before
    trainer.fit(validated(), loader, loader)
    assert trainer.val_check_batch == during


def test_with_a_loader_without_a_length_validation_comes_at_the_end(
    validated: Any, data: Any, loader: DataLoader[Any], make_trainer: Any
) -> None:
    found: list[Any] = []

    class Reads(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            found.append(trainer.val_check_batch)

    make_trainer(callbacks=Reads()).fit(validated(), DataLoader(Endless(data), batch_size=8), loader)
    assert found[0] == float("inf")


def test_code_that_profiles_runs(make_trainer: Any) -> None:
    profiler = make_trainer().profiler
    profiler.start("forward")
    with profiler.profile("backward"):
        pass
    profiler.stop("forward")
    profiler.describe()
    assert profiler.summary() == ""
