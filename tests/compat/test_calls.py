"""Hooks that a library calls itself, in the middle of a fit."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain import Callback, LightningDataModule
from drivetrain.compat.calls import (
    _call_callback_hooks,
    _call_lightning_datamodule_hook,
    _call_lightning_module_hook,
    _call_strategy_hook,
)


class Told(Callback):
    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.told.append(optimizer)


class Watches(Told):
    monitors = True  # as EarlyStopping


def test_a_library_calls_hooks(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Module(regression):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                _call_callback_hooks(self.trainer, "on_before_zero_grad", "all")
                _call_callback_hooks(self.trainer, "on_before_zero_grad", optimizer="few", monitoring_callbacks=True)
                _call_callback_hooks(self.trainer, "on_before_zero_grad", "others", monitoring_callbacks=False)
                self.returned = _call_lightning_module_hook(self.trainer, "test_step", 3, batch_idx=4)

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("own", float(batch))  # as in a test: over the epoch, not in a step
            return batch + batch_idx

    module, plain, watches = Module(), Told(), Watches()
    trainer = make_trainer(callbacks=[plain, watches])
    trainer.fit(module, loader)
    assert [each for each in plain.told if isinstance(each, str)] == ["all", "others"]
    assert [each for each in watches.told if isinstance(each, str)] == ["all", "few"]
    assert module.returned == 7
    assert _call_strategy_hook(trainer, "reduce_boolean_decision", True)


def test_a_datamodules_hook(make_trainer: Any, regression: Any, loader: Any) -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader

    trainer = make_trainer()
    trainer.fit(regression(), datamodule=Data())
    assert _call_lightning_datamodule_hook(trainer, "train_dataloader") is loader
    trainer.fit(regression(), loader)
    with pytest.raises(TypeError, match="There is no datamodule whose train_dataloader could be called"):
        _call_lightning_datamodule_hook(trainer, "train_dataloader")
