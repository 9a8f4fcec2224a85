"""Wrong arguments of the Trainer, and calls of it that make no sense."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    TorchCheckpointIO,
    TorchSyncBatchNorm,
)
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from tests.compat.mistakes.common import LONG, Mistakes, fit, loader, make, saved, wider
from torch import nn


def resumed(**arguments: Any) -> None:
    """Resume a checkpoint of one epoch."""
    path = saved(max_epochs=2)
    make(**{**LONG, **arguments}).fit(BoringModel(), ckpt_path=path)


def weights_only() -> str:
    """The path of a checkpoint that holds weights only."""
    trainer = make(**LONG)
    trainer.fit(BoringModel())
    trainer.save_checkpoint("a.ckpt", weights_only=True)
    return "a.ckpt"


MISTAKES: Mistakes = {
    "accelerator": lambda: make(accelerator="nonsense"),
    "accelerator_gpu": lambda: make(accelerator="gpu", devices=1),
    "accelerator_cuda": lambda: make(accelerator="cuda", devices=1),
    "accelerator_mps": lambda: make(accelerator="mps", devices=1),
    "accelerator_type": lambda: make(accelerator=3),
    "accelerator_and_strategy": lambda: make(strategy=SingleDeviceStrategy("cpu", CPUAccelerator())),
    "devices_zero": lambda: make(devices=0),
    "devices_text": lambda: make(devices="nonsense"),
    "devices_fraction": lambda: make(devices="3.5"),
    "devices_float": lambda: make(devices=2.5),
    "devices_none": lambda: make(devices=None),
    "devices_list_cpu": lambda: make(devices=[]),
    "devices_negative": lambda: make(devices=-2),
    "devices_with_gpu_list": lambda: make(accelerator="gpu", devices=[0, 0]),
    "num_nodes": lambda: make(num_nodes=0),
    "num_nodes_negative": lambda: make(num_nodes=-1),
    "num_nodes_type": lambda: make(num_nodes="nonsense"),
    "strategy": lambda: make(strategy="nonsense"),
    "strategy_type": lambda: make(strategy=3),
    "strategy_class": lambda: make(strategy=DDPStrategy),
    "strategy_fsdp": lambda: make(strategy="fsdp"),
    "precision": lambda: make(precision="nonsense"),
    "precision_int": lambda: make(precision=7),
    "precision_and_plugin": lambda: make(precision="bf16-mixed", plugins=[MixedPrecision("bf16-mixed", "cpu")]),
    "precision_in_strategy": lambda: make(
        strategy=DDPStrategy(precision_plugin=DoublePrecision()), plugins=HalfPrecision("bf16-true")
    ),
    "store_in_strategy": lambda: make(
        strategy=DDPStrategy(checkpoint_io=TorchCheckpointIO()), plugins=TorchCheckpointIO()
    ),
    "environment_in_strategy": lambda: make(
        strategy=DDPStrategy(cluster_environment=LightningEnvironment()), plugins=LightningEnvironment()
    ),
    "plugin_name": lambda: make(plugins="nonsense"),
    "plugin_type": lambda: make(plugins=[3]),
    "plugins_twice": lambda: make(plugins=[DoublePrecision(), DoublePrecision()]),
    "stores_twice": lambda: make(plugins=[TorchCheckpointIO(), TorchCheckpointIO()]),
    "sync_batchnorm_and_plugin": lambda: make(sync_batchnorm=True, plugins=[TorchSyncBatchNorm()]),
    "unknown_argument": lambda: make(nonsense=1),
    "removed_argument_gpus": lambda: make(gpus=1),
    "removed_argument_resume": lambda: make(resume_from_checkpoint="a.ckpt"),
    "fast_dev_run_negative": lambda: make(fast_dev_run=-1),
    "overfit_batches": lambda: make(overfit_batches=-1),
    "overfit_batches_fraction": lambda: make(overfit_batches=1.5),
    "limit_train_batches": lambda: make(limit_train_batches=-0.1),
    "limit_train_batches_type": lambda: make(limit_train_batches="nonsense"),
    "limit_train_batches_whole_float": lambda: make(limit_train_batches=10.0),
    "limit_val_batches": lambda: make(limit_val_batches=1.2),
    "limit_test_batches": lambda: make(limit_test_batches=2.5),
    "limit_predict_batches": lambda: make(limit_predict_batches=-1),
    "val_check_interval": lambda: make(val_check_interval=1.2),
    "val_check_interval_none": lambda: make(val_check_interval=1.0, check_val_every_n_epoch=None),
    "val_check_interval_half": lambda: make(val_check_interval=0.5, check_val_every_n_epoch=None),
    "val_check_interval_unset": lambda: make(check_val_every_n_epoch=None),
    "val_check_interval_text": lambda: make(val_check_interval="nonsense"),
    "val_check_interval_words": lambda: make(val_check_interval="a:b:c:d"),
    "val_check_interval_keys": lambda: make(val_check_interval={"nonsense": 1}),
    "val_check_interval_list": lambda: make(val_check_interval=[1]),
    "check_val_every_n_epoch": lambda: make(check_val_every_n_epoch=0.5),
    "max_epochs": lambda: make(max_epochs=-2),
    "max_epochs_text": lambda: make(max_epochs="3"),
    "max_steps": lambda: make(max_steps=-2),
    "max_steps_none": lambda: make(max_steps=None),
    "max_time": lambda: make(max_time="nonsense"),
    "max_time_type": lambda: make(max_time=3),
    "max_time_keys": lambda: make(max_time={"nonsense": 3}),
    "max_time_negative": lambda: make(max_time=timedelta(seconds=-3)),
    "gradient_clip_val": lambda: make(gradient_clip_val="nonsense"),
    "gradient_clip_val_list": lambda: make(gradient_clip_val=[1.0]),
    "gradient_clip_algorithm": lambda: make(gradient_clip_val=1.0, gradient_clip_algorithm="nonsense"),
    "gradient_clip_algorithm_type": lambda: make(gradient_clip_val=1.0, gradient_clip_algorithm=2),
    "accumulate_grad_batches": lambda: make(accumulate_grad_batches=0),
    "accumulate_grad_batches_dict": lambda: make(accumulate_grad_batches={0: 2}),
    "profiler": lambda: make(profiler="nonsense"),
    "reload_dataloaders": lambda: make(reload_dataloaders_every_n_epochs=-1),
    "reload_dataloaders_type": lambda: make(reload_dataloaders_every_n_epochs=0.5),
    "checkpointing_off": lambda: make(callbacks=[ModelCheckpoint()], enable_checkpointing=False),
    "progress_bar_off": lambda: make(callbacks=[TQDMProgressBar()], enable_progress_bar=False),
    "progress_bars_twice": lambda: make(callbacks=[TQDMProgressBar(), TQDMProgressBar()], enable_progress_bar=True),
    "same_callback_twice": lambda: make(callbacks=[EarlyStopping("a"), EarlyStopping("a")]),
    "same_checkpoint_twice": lambda: make(callbacks=[ModelCheckpoint(), ModelCheckpoint()], enable_checkpointing=True),
    "callback_type": lambda: make(callbacks=[3]),
    "callback_name": lambda: make(callbacks="nonsense"),
    "callback_class": lambda: fit(callbacks=[pl.Callback]),
    "default_root_dir": lambda: make(default_root_dir=3),
    "deterministic": lambda: make(deterministic="nonsense"),
    "barebones_logger": lambda: pl.Trainer(barebones=True, logger=True),
    "barebones_checkpointing": lambda: pl.Trainer(barebones=True, enable_checkpointing=True),
    "barebones_progress_bar": lambda: pl.Trainer(barebones=True, enable_progress_bar=True),
    "barebones_log_every_n_steps": lambda: pl.Trainer(barebones=True, log_every_n_steps=1),
    "barebones_model_summary": lambda: pl.Trainer(barebones=True, enable_model_summary=True),
    "barebones_sanity": lambda: pl.Trainer(barebones=True, num_sanity_val_steps=1),
    "barebones_fast_dev_run": lambda: pl.Trainer(barebones=True, fast_dev_run=True),
    "barebones_detect_anomaly": lambda: pl.Trainer(barebones=True, detect_anomaly=True),
    "barebones_profiler": lambda: pl.Trainer(barebones=True, profiler="simple"),
    "overfit_and_trial": lambda: make(fast_dev_run=True, overfit_batches=2),
    # ---- calls ----
    "fit_no_module": lambda: make(fast_dev_run=1).fit(nn.Linear(1, 1)),
    "fit_class": lambda: make(fast_dev_run=1).fit(BoringModel),
    "fit_nothing": lambda: make(fast_dev_run=1).fit(),
    "fit_none": lambda: make(fast_dev_run=1).fit(None),
    "validate_without_model": lambda: make(fast_dev_run=1).validate(),
    "test_without_model": lambda: make(fast_dev_run=1).test(),
    "predict_without_model": lambda: make(fast_dev_run=1).predict(),
    "validate_no_module": lambda: make(fast_dev_run=1).validate(nn.Linear(1, 1)),
    "fit_loaders_and_datamodule": lambda: make(fast_dev_run=1).fit(
        BoringModel(), train_dataloaders=loader(), datamodule=pl.LightningDataModule()
    ),
    "validate_loaders_and_datamodule": lambda: make(fast_dev_run=1).validate(
        BoringModel(), dataloaders=loader(), datamodule=pl.LightningDataModule()
    ),
    "test_loaders_and_datamodule": lambda: make(fast_dev_run=1).test(
        BoringModel(), dataloaders=loader(), datamodule=pl.LightningDataModule()
    ),
    "predict_loaders_and_datamodule": lambda: make(fast_dev_run=1).predict(
        BoringModel(), dataloaders=loader(), datamodule=pl.LightningDataModule()
    ),
    "save_without_model": lambda: make().save_checkpoint("a.ckpt"),
    "test_best_without_checkpoint": lambda: make().test(BoringModel(), ckpt_path="best"),
    "test_best_in_a_trial": lambda: make(fast_dev_run=1, enable_checkpointing=True).test(ckpt_path="best"),
    "validate_best_not_saved": lambda: make(enable_checkpointing=True, callbacks=ModelCheckpoint()).validate(
        BoringModel(), ckpt_path="best"
    ),
    "test_hpc": lambda: make().test(BoringModel(), ckpt_path="hpc"),
    "fit_missing_checkpoint": lambda: make(**LONG).fit(BoringModel(), ckpt_path="/nonexistent/a.ckpt"),
    "test_missing_checkpoint": lambda: make(**LONG).test(BoringModel(), ckpt_path="/nonexistent/a.ckpt"),
    "resume_beyond_max_epochs": lambda: resumed(max_epochs=1),
    "resume_weights": lambda: make(**LONG).fit(BoringModel(), ckpt_path=weights_only()),
    "resume_another_model": lambda: make(**LONG).fit(wider(), ckpt_path=saved()),
    "unknown_keyword_of_fit": lambda: make(fast_dev_run=1).fit(BoringModel(), train_loader=loader()),
}
