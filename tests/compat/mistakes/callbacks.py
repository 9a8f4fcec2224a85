"""Mistakes with callbacks, the finders and the tuner."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)  # fmt: skip
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from tests.compat.mistakes.common import LONG, Mistakes, fit, loader, make, manual, one, optimized
from torch.nn.utils import prune

SWA = StochasticWeightAveraging
TIME = timedelta(minutes=1)


class Half(prune.BasePruningMethod):
    """A method of pruning that is local to each tensor."""

    PRUNING_TYPE = "structured"

    def compute_mask(self, t: Any, default_mask: Any) -> Any:
        return default_mask


class Writer(BasePredictionWriter):
    """A writer that writes nothing."""


def two_schedulers(self: Any, optimizer: Any) -> Any:
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]


def named_groups(self: Any, optimizer: Any) -> Any:
    groups = [{"params": [self.layer.weight], "name": "a"}, {"params": [self.layer.bias], "name": "a"}]
    chosen = torch.optim.SGD(groups, lr=0.1)
    return [chosen], [torch.optim.lr_scheduler.StepLR(chosen, 1)]


def with_callback(callback: Any, model: Any = None, **arguments: Any) -> None:
    fit(model, **{**LONG, **arguments}, callbacks=[callback])


def with_store(callback: Any, **arguments: Any) -> None:
    with_callback(callback, enable_checkpointing=True, **arguments)


def tune(find: Any, model: Any = None, **arguments: Any) -> None:
    find(Tuner(make(**{**LONG, **arguments})), BoringModel() if model is None else model)


def rate(**members: Any) -> Any:
    return one(lr=0.1, **members)


MISTAKES: Mistakes = {
    "early_stopping_monitor": lambda: with_callback(EarlyStopping("nonsense")),
    "early_stopping_mode": lambda: EarlyStopping("a", mode="nonsense"),
    "early_stopping_no_monitor": lambda: EarlyStopping(),
    "early_stopping_patience": lambda: EarlyStopping("a", patience=-1),
    "early_stopping_min_delta": lambda: EarlyStopping("a", min_delta="nonsense"),
    "early_stopping_unknown": lambda: EarlyStopping("a", nonsense=1),
    "checkpoint_monitor": lambda: with_store(ModelCheckpoint("a", monitor="nonsense")),
    "checkpoint_mode": lambda: ModelCheckpoint(monitor="a", mode="nonsense"),
    "checkpoint_top_k": lambda: ModelCheckpoint(save_top_k=-2),
    "checkpoint_top_k_without_monitor": lambda: ModelCheckpoint(save_top_k=3),
    "checkpoint_triggers": lambda: ModelCheckpoint(every_n_epochs=1, every_n_train_steps=1),
    "checkpoint_time_and_steps": lambda: ModelCheckpoint(every_n_train_steps=1, train_time_interval=TIME),
    "checkpoint_every_n_train_steps": lambda: ModelCheckpoint(every_n_train_steps=-1),
    "checkpoint_every_n_epochs": lambda: ModelCheckpoint(every_n_epochs=-1),
    "checkpoint_save_last": lambda: ModelCheckpoint(save_last="nonsense"),
    "checkpoint_link_at_an_address": lambda: with_store(ModelCheckpoint("memory://a", save_last="link")),
    "checkpoint_filename": lambda: with_store(ModelCheckpoint("a", filename="{nonsense:x}")),
    "checkpoint_dirpath": lambda: ModelCheckpoint(dirpath=3),
    "checkpoint_period": lambda: ModelCheckpoint(period=1),
    "on_exception_filename": lambda: OnExceptionCheckpoint(".", filename=""),
    "timer_duration": lambda: Timer("nonsense"),
    "timer_duration_type": lambda: Timer(3),
    "timer_duration_keys": lambda: Timer({"nonsense": 1}),
    "timer_interval": lambda: Timer(interval="nonsense"),
    "accumulation_schedule": lambda: GradientAccumulationScheduler({}),
    "accumulation_schedule_keys": lambda: GradientAccumulationScheduler({"a": 1}),
    "accumulation_schedule_negative": lambda: GradientAccumulationScheduler({-1: 1}),
    "accumulation_schedule_values": lambda: GradientAccumulationScheduler({0: 0}),
    "accumulation_schedule_type": lambda: GradientAccumulationScheduler(3),
    "accumulation_scheduled_twice": lambda: with_callback(
        GradientAccumulationScheduler({0: 2}), accumulate_grad_batches=2
    ),
    "accumulation_scheduled_by_hand": lambda: with_callback(GradientAccumulationScheduler({0: 2}), manual()),
    "batch_size_finder_mode": lambda: BatchSizeFinder(mode="nonsense"),
    "batch_size_finder_loader": lambda: make(**LONG, callbacks=[BatchSizeFinder()]).fit(BoringModel(), loader()),
    "batch_size_finder_attribute": lambda: with_callback(BatchSizeFinder(batch_arg_name="nonsense")),
    "batch_size_finder_loaders": lambda: with_callback(
        BatchSizeFinder(), one(batch_size=1, train_dataloader=lambda self: [loader(), loader()])
    ),
    "lr_finder_mode": lambda: LearningRateFinder(mode="nonsense"),
    "lr_finder_attribute": lambda: with_callback(LearningRateFinder(attr_name="nonsense")),
    "lr_finder_no_attribute": lambda: with_callback(LearningRateFinder()),
    "lr_monitor_interval": lambda: LearningRateMonitor(logging_interval="nonsense"),
    "lr_monitor_without_logger": lambda: with_callback(LearningRateMonitor()),
    "lr_monitor_same_names": lambda: with_callback(
        LearningRateMonitor(), optimized(named_groups), logger=CSVLogger(".")
    ),
    "device_stats_without_logger": lambda: with_callback(DeviceStatsMonitor()),
    "throughput_without_function": lambda: ThroughputMonitor(),
    "throughput_without_logger": lambda: with_callback(ThroughputMonitor(lambda batch: 1)),
    "throughput_window": lambda: ThroughputMonitor(lambda batch: 1, window_size=1),
    "swa_lrs": lambda: SWA(swa_lrs=-1),
    "swa_lrs_none": lambda: SWA(swa_lrs=None),
    "swa_lrs_list": lambda: SWA(swa_lrs=[0.1, -0.1]),
    "swa_lrs_text": lambda: SWA(swa_lrs="nonsense"),
    "swa_epoch_start": lambda: SWA(swa_lrs=0.1, swa_epoch_start=1.5),
    "swa_epoch_start_zero": lambda: SWA(swa_lrs=0.1, swa_epoch_start=0),
    "swa_epoch_start_text": lambda: SWA(swa_lrs=0.1, swa_epoch_start="nonsense"),
    "swa_function": lambda: SWA(swa_lrs=0.1, avg_fn=3),
    "swa_device": lambda: SWA(swa_lrs=0.1, device=3),
    "swa_two_schedulers": lambda: with_callback(SWA(swa_lrs=0.1), optimized(two_schedulers)),
    "swa_no_end": lambda: with_callback(SWA(swa_lrs=0.1), max_epochs=-1, max_steps=1),
    "swa_two_optimizers": lambda: with_callback(SWA(swa_lrs=0.1), manual(configure_optimizers=both)),
    "backbone": lambda: with_callback(BackboneFinetuning()),
    "backbone_type": lambda: with_callback(BackboneFinetuning(), one(backbone=3)),
    "finetuning_without_freeze": lambda: with_callback(BaseFinetuning()),
    "finetuning_freeze": lambda: BaseFinetuning().freeze_before_training(BoringModel()),
    "finetuning_function": lambda: BaseFinetuning().finetune_function(BoringModel(), 0, None),
    "pruning_name": lambda: ModelPruning("nonsense"),
    "pruning_type": lambda: ModelPruning(3),
    "pruning_parameter_names": lambda: ModelPruning("l1_unstructured", parameter_names=["nonsense"]),
    "pruning_without_dim": lambda: ModelPruning("ln_structured", use_global_unstructured=False),
    "pruning_without_norm": lambda: ModelPruning("ln_structured", use_global_unstructured=False, pruning_dim=0),
    "pruning_global_structured": lambda: ModelPruning(
        "ln_structured", use_global_unstructured=True, pruning_dim=0, pruning_norm=1
    ),
    "pruning_method_structured": lambda: ModelPruning(Half),
    "pruning_method_local": lambda: ModelPruning(Half, use_global_unstructured=False),
    "pruning_amount": lambda: ModelPruning("l1_unstructured", amount="nonsense"),
    "pruning_verbose": lambda: ModelPruning("l1_unstructured", verbose=5),
    "pruning_parameters": lambda: with_callback(
        ModelPruning("l1_unstructured", parameters_to_prune=[(torch.nn.Linear(1, 1), "weight")])
    ),
    "pruning_parameters_type": lambda: with_callback(ModelPruning("l1_unstructured", parameters_to_prune="nonsense")),
    "prediction_writer_interval": lambda: Writer("nonsense"),
    "prediction_writer_batch": lambda: Writer("batch").write_on_batch_end(None, None, None, None, None, 0, 0),
    "prediction_writer_epoch": lambda: Writer("epoch").write_on_epoch_end(None, None, None, None),
    "prediction_writer_unwritten": lambda: make(**LONG, callbacks=[Writer("batch")]).predict(BoringModel()),
    "progress_bar_trainer": lambda: ProgressBar().trainer,
    "progress_bar_disable": lambda: ProgressBar().disable(),
    "progress_bar_enable": lambda: ProgressBar().enable(),
    "tqdm_bar": lambda: TQDMProgressBar().train_progress_bar,
    "tqdm_val_bar": lambda: TQDMProgressBar().val_progress_bar,
    "tqdm_test_bar": lambda: TQDMProgressBar().test_progress_bar,
    "tqdm_predict_bar": lambda: TQDMProgressBar().predict_progress_bar,
    "rich_unknown": lambda: RichProgressBar(nonsense=1),
    "summary_depth": lambda: fit(callbacks=[ModelSummary(max_depth=-2)], enable_model_summary=True),
    "lambda_unknown": lambda: LambdaCallback(on_nonsense=print),
    "lambda_type": lambda: with_callback(LambdaCallback(on_train_start=3)),
    # ---- the tuner ----
    "lr_find_method": lambda: tune(lambda tuner, model: tuner.lr_find(model, method="nonsense")),
    "lr_find_validate": lambda: tune(lambda tuner, model: tuner.lr_find(model, method="validate"), rate()),
    "lr_find_mode": lambda: tune(lambda tuner, model: tuner.lr_find(model, mode="nonsense"), rate()),
    "lr_find_dataloaders": lambda: tune(lambda tuner, model: tuner.lr_find(model, dataloaders=loader()), rate()),
    "lr_find_attribute": lambda: tune(lambda tuner, model: tuner.lr_find(model, attr_name="nonsense")),
    "lr_find_no_attribute": lambda: tune(lambda tuner, model: tuner.lr_find(model)),
    "lr_find_twice": lambda: tune(lambda tuner, model: tuner.lr_find(model), rate(), callbacks=[LearningRateFinder()]),
    "lr_find_two_optimizers": lambda: tune(
        lambda tuner, model: tuner.lr_find(model), manual(lr=0.1, configure_optimizers=both)
    ),
    "scale_method": lambda: tune(lambda tuner, model: tuner.scale_batch_size(model, method="nonsense")),
    "scale_mode": lambda: tune(lambda tuner, model: tuner.scale_batch_size(model, mode="nonsense"), one(batch_size=2)),
    "scale_attribute": lambda: tune(lambda tuner, model: tuner.scale_batch_size(model)),
    "scale_validate_train_loader": lambda: tune(
        lambda tuner, model: tuner.scale_batch_size(model, method="validate", train_dataloaders=loader())
    ),
    "scale_fit_loader": lambda: tune(lambda tuner, model: tuner.scale_batch_size(model, dataloaders=loader())),
    "scale_twice": lambda: tune(
        lambda tuner, model: tuner.scale_batch_size(model), one(batch_size=2), callbacks=[BatchSizeFinder()]
    ),
}


def both(self: Any) -> Any:
    return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]
