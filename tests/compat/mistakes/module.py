"""Mistakes in modules: steps, hooks, optimizers, logging, hyperparameters, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from tests.compat.mistakes.common import (
    LONG,
    Mistakes,
    fit,
    loader,
    logs,
    make,
    manual,
    one,
    optimized,
    plateau,
    saved,
    step,
    wider,
)  # fmt: skip
from torch import nn
from torchmetrics import MeanMetric, Metric

SGD = torch.optim.SGD
Base = pl.LightningModule


class Needs(BoringModel):
    """A model with an argument that is not saved."""

    def __init__(self, needed: int) -> None:
        super().__init__()


class Keeps(BoringModel):
    """A model that saves its argument."""

    def __init__(self, kept: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()


class Lenient(BoringModel):
    """A model that accepts checkpoints that lack names."""

    @property
    def strict_loading(self) -> bool:
        return False


class Strange:
    """No scheduler of torch, though it can be saved."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class Stateless:
    """No scheduler, and nothing that can be saved."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class Words(Metric):
    """A metric whose result cannot be logged."""

    def update(self, value: Any) -> None:
        pass

    def compute(self) -> Any:
        return "words"


def with_scheduler(build: Any) -> Any:
    return optimized(lambda self, optimizer: ([optimizer], [build(optimizer)]))


def foreign_scheduler() -> Any:
    other = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    return with_scheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(other, 1))


def scheduler_config(**config: Any) -> Any:
    def configure(self: Any, optimizer: Any) -> Any:
        built = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), **config}
        return {"optimizer": optimizer, "lr_scheduler": {k: v for k, v in built.items() if v is not ...}}

    return optimized(configure)


def hook(name: str, *arguments: Any, **options: Any) -> Any:
    """A model that logs in the hook ``name``."""

    def log(self: Any, *_: Any, **__: Any) -> None:
        self.log(*arguments, **options)

    return one(**{name: log})


def nothing(*_: Any, **__: Any) -> None:
    pass


def clips(value: Any = None, algorithm: Any = None, **arguments: Any) -> None:
    def clip(self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)

    fit(one(configure_gradient_clipping=clip), **arguments)


def damaged() -> str:
    Path("a.ckpt").write_bytes(b"no checkpoint")
    return "a.ckpt"


def hparams_from(name: str) -> None:
    Path(name).write_text("kept: 3\n")
    Keeps.load_from_checkpoint(saved(model=Keeps()), hparams_file=name)


def two_losses(*_: Any) -> Any:
    return torch.zeros(2, requires_grad=True)


class Two(Words):
    """A metric that computes two numbers."""

    def compute(self) -> Any:
        return torch.zeros(()), torch.ones(())


def metric_of(kind: Any, is_called: bool = False, **options: Any) -> Any:
    """A model with a metric that it logs as an object, after calling it or its ``update``."""
    model = step(
        lambda self: ((self.metric if is_called else self.metric.update)(1.0), self.log("a", self.metric, **options))
    )
    model.metric = kind()
    return model


MISTAKES: Mistakes = {
    # ---- what a module must have ----
    "no_training_step": lambda: fit(one(training_step=Base.training_step)),
    "no_configure_optimizers": lambda: fit(one(configure_optimizers=Base.configure_optimizers)),
    "no_validation_step": lambda: make(fast_dev_run=1).validate(one(validation_step=Base.validation_step)),
    "no_test_step": lambda: make(fast_dev_run=1).test(one(test_step=Base.test_step)),
    "predict_step_none": lambda: make(fast_dev_run=1).predict(one(predict_step=None)),
    "no_forward": lambda: make(fast_dev_run=1).predict(one(forward=Base.forward)),
    "no_init_of_the_base": lambda: fit(type("Model", (BoringModel,), {"__init__": nothing})()),
    "training_epoch_end": lambda: fit(one(training_epoch_end=nothing)),
    "validation_epoch_end": lambda: fit(one(validation_epoch_end=nothing)),
    "test_epoch_end": lambda: make(fast_dev_run=1).test(one(test_epoch_end=nothing)),
    "optimizer_idx": lambda: fit(one(training_step=lambda self, batch, batch_idx, optimizer_idx: self.step(batch))),
    "training_step_without_arguments": lambda: fit(one(training_step=lambda self: None)),
    "training_step_too_many": lambda: fit(one(training_step=lambda self, batch, batch_idx, a, b: self.step(batch))),
    "needless_dataloader_idx": lambda: make(**LONG).validate(
        one(validation_step=lambda self, batch, batch_idx, dataloader_idx: None)
    ),
    "missing_dataloader_idx": lambda: make(**LONG).validate(
        one(validation_step=lambda self, batch, batch_idx: None), [loader(), loader()]
    ),
    "missing_dataloader_idx_in_hook": lambda: make(**LONG).validate(
        one(
            validation_step=lambda self, batch, batch_idx, dataloader_idx=0: None,
            on_validation_batch_start=lambda self, batch, batch_idx: None,
        ),
        [loader(), loader()],
    ),
    # ---- what training_step returns ----
    "returns_text": lambda: fit(one(training_step=lambda self, batch, batch_idx: "text")),
    "returns_number": lambda: fit(one(training_step=lambda self, batch, batch_idx: 1.0)),
    "returns_dict": lambda: fit(one(training_step=lambda self, batch, batch_idx: {"a": 1})),
    "returns_dict_with_text": lambda: fit(one(training_step=lambda self, batch, batch_idx: {"loss": "text"})),
    "returns_list": lambda: fit(one(training_step=lambda self, batch, batch_idx: [self.step(batch)])),
    "returns_two_losses": lambda: fit(one(training_step=two_losses)),
    "returns_no_grad": lambda: fit(one(training_step=lambda self, batch, batch_idx: torch.zeros(()))),
    "returns_nan": lambda: fit(
        one(training_step=lambda self, batch, batch_idx: self.step(batch) * float("nan")), detect_anomaly=True
    ),
    "manual_returns_text": lambda: fit(manual(training_step=lambda self, batch, batch_idx: "text")),
    # ---- configure_optimizers ----
    "optimizers_number": lambda: fit(one(configure_optimizers=lambda self: 3)),
    "optimizers_text": lambda: fit(one(configure_optimizers=lambda self: "sgd")),
    "optimizers_class": lambda: fit(one(configure_optimizers=lambda self: SGD)),
    "optimizers_empty_dict": lambda: fit(one(configure_optimizers=lambda self: {})),
    "optimizers_dict_without": lambda: fit(one(configure_optimizers=lambda self: {"lr_scheduler": None})),
    "optimizers_and_number": lambda: fit(optimized(lambda self, optimizer: ([optimizer], 3))),
    "optimizers_mixed": lambda: fit(optimized(lambda self, optimizer: [optimizer, 3])),
    "optimizers_two": lambda: fit(optimized(lambda self, optimizer: [optimizer, SGD(self.parameters(), lr=0.1)])),
    "optimizers_two_dicts": lambda: fit(
        optimized(lambda self, o: [{"optimizer": o}, {"optimizer": SGD(self.parameters(), lr=0.1)}])
    ),
    "optimizers_no_parameters": lambda: fit(one(configure_optimizers=lambda self: SGD([], lr=0.1))),
    "scheduler_text": lambda: fit(with_scheduler(lambda optimizer: "step")),
    "scheduler_class": lambda: fit(with_scheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR)),
    "scheduler_without_monitor": lambda: fit(plateau()),
    "scheduler_plain_without_monitor": lambda: fit(with_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau)),
    "scheduler_monitor": lambda: fit(plateau(monitor="nonsense"), **LONG),
    "scheduler_interval": lambda: fit(plateau(monitor="a", interval="nonsense")),
    "scheduler_interval_step": lambda: fit(scheduler_config(interval="batch")),
    "scheduler_missing_in_dict": lambda: fit(scheduler_config(scheduler=...)),
    "scheduler_none_in_dict": lambda: fit(scheduler_config(scheduler=None)),
    "scheduler_unknown_key": lambda: fit(scheduler_config(nonsense=1)),
    "scheduler_frequency": lambda: fit(scheduler_config(frequency=0)),
    "scheduler_of_another_optimizer": lambda: fit(foreign_scheduler()),
    "scheduler_strange": lambda: fit(with_scheduler(Strange)),
    "scheduler_stateless": lambda: fit(with_scheduler(Stateless)),
    # ---- stepping by hand ----
    "manual_clip": lambda: fit(manual(), gradient_clip_val=1.0),
    "manual_accumulate": lambda: fit(manual(), accumulate_grad_batches=2),
    "manual_backward_in_automatic": lambda: fit(step(lambda self: self.manual_backward(torch.zeros(())))),
    "manual_backward_without_trainer": lambda: BoringModel().manual_backward(torch.zeros(())),
    "manual_step_without_closure": lambda: fit(
        manual(training_step=lambda self, batch, batch_idx: self.optimizers().step(closure=3))
    ),
    "manual_optimizer_call": lambda: fit(
        manual(training_step=lambda self, batch, batch_idx: self.optimizers()[0].step())
    ),
    "optimizers_without_trainer": lambda: BoringModel().optimizers(),
    "schedulers_without_trainer": lambda: BoringModel().lr_schedulers(),
    "closure_not_called": lambda: fit(one(optimizer_step=nothing)),
    "closure_not_passed": lambda: fit(
        one(optimizer_step=lambda self, epoch, batch_idx, optimizer, optimizer_closure: optimizer.step())
    ),
    "closure_type": lambda: fit(
        one(optimizer_step=lambda self, epoch, batch_idx, optimizer, optimizer_closure: optimizer.step(closure=3))
    ),
    "clip_another_value": lambda: clips(2.0, gradient_clip_val=1.0),
    "clip_another_algorithm": lambda: clips(1.0, "value", gradient_clip_val=1.0, gradient_clip_algorithm="norm"),
    "clip_text": lambda: clips("nonsense"),
    "clip_algorithm": lambda: clips(1.0, "nonsense"),
    # ---- self.log ----
    "log_text": lambda: fit(logs("a", "text")),
    "log_none": lambda: fit(logs("a", None)),
    "log_list": lambda: fit(logs("a", [1.0])),
    "log_nested": lambda: fit(logs("a", {"b": {"c": 1.0}})),
    "log_two_values": lambda: fit(logs("a", torch.zeros(2))),
    "log_name": lambda: fit(logs(3, 1.0)),
    "log_name_none": lambda: fit(logs(None, 1.0)),
    "log_without_value": lambda: fit(logs("a")),
    "log_nowhere": lambda: fit(logs("a", 1.0, on_step=False, on_epoch=False)),
    "log_reduce": lambda: fit(logs("a", 1.0, reduce_fx="nonsense")),
    "log_reduce_type": lambda: fit(logs("a", 1.0, reduce_fx=3)),
    "log_reduce_function": lambda: fit(logs("a", 1.0, reduce_fx=lambda values: values, on_epoch=True)),
    "log_reserved_name": lambda: fit(logs("a/dataloader_idx_0", 1.0)),
    "log_twice": lambda: fit(step(lambda self: (self.log("a", 1.0), self.log("a", 1.0, on_epoch=True)))),
    "log_unknown_option": lambda: fit(logs("a", 1.0, nonsense=True)),
    "log_metric_attribute": lambda: fit(logs("a", 1.0, metric_attribute="nonsense")),
    "log_foreign_metric": lambda: fit(logs("a", MeanMetric())),
    "log_metric_of_words": lambda: fit(metric_of(Words), **LONG),
    "log_metric_of_two_at_the_step": lambda: fit(metric_of(Two, is_called=True), **LONG),
    "log_metric_of_two_at_the_epoch": lambda: fit(metric_of(Two, on_step=False, on_epoch=True), **LONG),
    "log_metric_class": lambda: fit(logs("a", MeanMetric)),
    "log_dict_list": lambda: fit(step(lambda self: self.log_dict([1.0]))),
    "log_dict_nested": lambda: fit(step(lambda self: self.log_dict({"a": {"b": 1.0}}))),
    "log_in_on_fit_start": lambda: fit(hook("on_fit_start", "a", 1.0)),
    "log_in_on_fit_end": lambda: fit(hook("on_fit_end", "a", 1.0)),
    "log_in_setup": lambda: fit(hook("setup", "a", 1.0)),
    "log_in_teardown": lambda: fit(hook("teardown", "a", 1.0)),
    "log_in_prepare_data": lambda: fit(hook("prepare_data", "a", 1.0)),
    "log_in_configure_model": lambda: fit(hook("configure_model", "a", 1.0)),
    "log_in_configure_optimizers": lambda: fit(hook("configure_optimizers", "a", 1.0)),
    "log_in_train_dataloader": lambda: fit(hook("train_dataloader", "a", 1.0)),
    "log_in_on_sanity_check_start": lambda: fit(hook("on_sanity_check_start", "a", 1.0), **LONG),
    "log_step_in_on_train_start": lambda: fit(hook("on_train_start", "a", 1.0, on_step=True)),
    "log_in_on_train_start": lambda: fit(hook("on_train_start", "a", 1.0)),
    "log_in_on_train_end": lambda: fit(hook("on_train_end", "a", 1.0)),
    "log_step_in_on_train_epoch_end": lambda: fit(hook("on_train_epoch_end", "a", 1.0, on_step=True)),
    "log_in_on_save_checkpoint": lambda: saved(model=hook("on_save_checkpoint", "a", 1.0)),
    "log_in_on_validation_end": lambda: fit(hook("on_validation_end", "a", 1.0), **LONG),
    "log_in_predict_step": lambda: make(fast_dev_run=1).predict(hook("predict_step", "a", 1.0)),
    "log_without_trainer": lambda: BoringModel().log("a", 1.0),
    # ---- without a Trainer, and base hooks ----
    "trainer_not_attached": lambda: BoringModel().trainer,
    "fabric_not_attached": lambda: BoringModel().fabric,
    "forward": lambda: Base()(1),
    "train_dataloader": lambda: Base().train_dataloader(),
    "val_dataloader": lambda: Base().val_dataloader(),
    "test_dataloader": lambda: Base().test_dataloader(),
    "predict_dataloader": lambda: Base().predict_dataloader(),
    "datamodule_train_dataloader": lambda: pl.LightningDataModule().train_dataloader(),
    "all_gather_without_trainer": lambda: BoringModel().all_gather(torch.zeros(1)),
    "example_type": lambda: fit(one(example_input_array=3), enable_model_summary=True, fast_dev_run=1),
    "onnx_without_example": lambda: BoringModel().to_onnx("a.onnx"),
    "torchscript_method": lambda: BoringModel().to_torchscript(method="nonsense"),
    "torchscript_without_example": lambda: BoringModel().to_torchscript(method="trace"),
    "dtype_set": lambda: setattr(BoringModel(), "dtype", torch.float64),
    # ---- hyperparameters and load_from_checkpoint ----
    "save_hyperparameters_number": lambda: BoringModel().save_hyperparameters(3),
    "save_hyperparameters_list": lambda: BoringModel().save_hyperparameters([1, 2]),
    "save_hyperparameters_unknown": lambda: BoringModel().save_hyperparameters("nonsense"),
    "hparams_attribute": lambda: Keeps().hparams.nonsense,
    "hparams_item": lambda: Keeps().hparams["nonsense"],
    "hparams_delete": lambda: delattr(Keeps().hparams, "nonsense"),
    "hparams_set": lambda: setattr(Keeps(), "hparams", {}),
    "load_missing": lambda: BoringModel.load_from_checkpoint("/nonexistent/a.ckpt"),
    "load_damaged": lambda: BoringModel.load_from_checkpoint(damaged()),
    "load_on_instance": lambda: BoringModel().load_from_checkpoint(saved()),
    "load_datamodule_on_instance": lambda: pl.LightningDataModule().load_from_checkpoint(saved()),
    "load_missing_argument": lambda: Needs.load_from_checkpoint(saved(model=Needs(1))),
    "load_unknown_argument": lambda: BoringModel.load_from_checkpoint(saved(), nonsense=1),
    "load_another_model": lambda: type(wider()).load_from_checkpoint(saved()),
    "load_strict_conflict": lambda: Lenient.load_from_checkpoint(saved(), strict=True),
    "load_hparams_file": lambda: hparams_from("a.txt"),
    "load_hparams_file_missing": lambda: Keeps.load_from_checkpoint(saved(model=Keeps()), hparams_file="none.yaml"),
    "load_map_location": lambda: BoringModel.load_from_checkpoint(saved(), map_location="nonsense"),
    "load_from_base": lambda: Base.load_from_checkpoint(saved()),
}
