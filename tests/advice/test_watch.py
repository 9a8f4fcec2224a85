"""What a fit shows only while it runs is said once; what is meant is not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule
from drivetrain.errors import ConfigurationError, LoggingError

pytestmark = pytest.mark.filterwarnings("ignore:.* has a validation_step but there is no validation loader")


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).pow(2).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ByHand(Net):
    """Two optimizers; ``steps``: which of them step."""

    def __init__(self, steps: tuple[int, ...], schedules: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps, self.schedules = steps, schedules

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for index in self.steps:
            optimizer = self.optimizers()[index]
            optimizer.zero_grad()
            self.manual_backward(self.net(batch[0]).pow(2).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(self.net[place].parameters(), lr=0.01) for place in (0, 2)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 1) for each in optimizers] if self.schedules else []


def test_an_optimizer_that_never_steps_is_named(make_trainer: Any, loader: Any) -> None:
    model = ByHand(steps=(0,))
    trainer = make_trainer(max_epochs=2)
    with pytest.warns(UserWarning, match="number 1 has not changed a parameter in this epoch") as record:
        trainer.fit(model, loader)
    assert len([each for each in record if "Of the optimizers" in str(each.message)]) == 1
    assert not any(each._optimizer_step_post_hooks for each in trainer.optimizers)


def test_optimizers_that_step_are_left_alone(make_trainer: Any, loader: Any) -> None:
    trainer = make_trainer()
    trainer.fit(ByHand(steps=(0, 1)), loader)
    assert not any(each._optimizer_step_post_hooks for each in trainer.optimizers)


def test_schedulers_that_nobody_steps_are_said(make_trainer: Any, loader: Any) -> None:
    with pytest.warns(UserWarning, match=r"have never stepped.*self\.lr_schedulers\(\)\.step\(\)"):
        make_trainer().fit(ByHand(steps=(0, 1), schedules=True), loader)


class Scheduled(Net):
    """``interval``: of the scheduler; ``also``: the step calls it too."""

    def __init__(self, interval: str, also: bool) -> None:
        super().__init__()
        self.interval, self.also = interval, also

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.also and batch_idx > 0:
            self.lr_schedulers().step()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_scheduler_that_is_stepped_twice_is_said(make_trainer: Any, loader: Any, interval: str) -> None:
    with pytest.warns(UserWarning, match="StepLR has stepped . times in an epoch .* other code calls its step"):
        make_trainer(max_epochs=2).fit(Scheduled(interval, also=True), loader)
    make_trainer(max_epochs=2).fit(Scheduled(interval, also=False), loader)


def test_an_epoch_without_a_step_is_said(make_trainer: Any, loader: Any) -> None:
    class Closes(Net):
        def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()

    with pytest.warns(UserWarning, match="had losses, and no optimizer step was made"):
        make_trainer().fit(Closes(), loader)


def test_eval_mode_that_begins_while_training_is_said(make_trainer: Any, loader: Any) -> None:
    class Evaluates(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.eval()

    with pytest.warns(UserWarning, match="Modules in eval mode: 5 of the 5") as record:
        make_trainer(max_epochs=2, callbacks=Evaluates()).fit(Net(), loader, loader)
    assert len([each for each in record if "eval mode" in str(each.message)]) == 1


def test_train_mode_in_a_validation_is_said(make_trainer: Any, loader: Any) -> None:
    class Trains(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.train()
            super().validation_step(batch, batch_idx)

    class Drops(Net):  # dropout at test time, on purpose
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net[1].train()
            super().validation_step(batch, batch_idx)

    with pytest.warns(UserWarning, match="set to train mode during the validation"):
        make_trainer(num_sanity_val_steps=0).fit(Trains(), loader, loader)
    make_trainer(num_sanity_val_steps=0).fit(Drops(), loader, loader)


def test_layers_that_come_late_are_said(make_trainer: Any, loader: Any) -> None:
    class Replaces(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                pl_module.net = nn.Sequential(nn.Linear(4, 1))

    with pytest.warns(UserWarning, match=r"Parameters .* have come since training began, 2 in all.*'net.0.weight'"):
        make_trainer(max_epochs=2, callbacks=Replaces()).fit(Net(), loader)


class Measures(Net):
    """``how`` its metric is used in validation."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.metric, self.how = pytest.importorskip("torchmetrics").MeanMetric(), how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.how == "shared":
            self.metric.update(2.0)
            self.log("train_mean", self.metric, on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.how == "batches":
            self.log("mean", self.metric(1.0))
            return
        self.metric.update(1.0)
        if self.how in ("object", "shared"):
            self.log("mean", self.metric)
        elif self.how == "step":
            self.log("mean", self.metric, on_step=True, on_epoch=False)
        else:
            self.log("mean", self.metric.compute())

    def on_validation_epoch_end(self) -> None:
        if self.how == "reset":
            self.metric.reset()


@pytest.mark.parametrize("how", ["object", "reset", "batches"])
def test_a_metric_that_is_reset_or_only_called_is_right(make_trainer: Any, loader: Any, how: str) -> None:
    make_trainer(max_epochs=3).fit(Measures(how), loader, loader)


def test_a_metric_of_two_stages_is_an_error(make_trainer: Any, loader: Any) -> None:
    with pytest.raises(LoggingError, match="also logged as 'train_mean' in another stage"):
        make_trainer(num_sanity_val_steps=0).fit(Measures("shared"), loader, loader)


def test_a_metric_without_a_value_of_the_step_is_an_error(make_trainer: Any, loader: Any) -> None:
    with pytest.raises(LoggingError, match=r"has no value of this step, because it was given its batch by update\(\)"):
        make_trainer(num_sanity_val_steps=0).fit(Measures("step"), loader, loader)


def test_an_empty_loader_beside_others_is_said(make_trainer: Any, loader: Any, data: TensorDataset) -> None:
    class Several(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    empty = DataLoader(TensorDataset(torch.ones(0, 4)), batch_size=2)
    with pytest.warns(UserWarning, match="nothing to validate on: the DataLoader over the TensorDataset of 0 samples"):
        make_trainer(num_sanity_val_steps=0).fit(Several(), loader, [loader, empty])


def test_a_window_keeps_its_gradients(make_trainer: Any, loader: Any) -> None:
    class Clears(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.optimizers().zero_grad()
            return super().training_step(batch, batch_idx)

    class ClearsAll(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.zero_grad()
            return super().training_step(batch, batch_idx)

    for model in (Clears(), ClearsAll()):
        with pytest.raises(ConfigurationError, match=r"zero_grad\(\) was called between the batches of one optimizer"):
            make_trainer(accumulate_grad_batches=2).fit(model, loader)
    make_trainer().fit(Clears(), loader)  # where a window is one batch, nothing is lost


def test_a_run_inside_of_a_run_is_an_error(make_trainer: Any, loader: Any) -> None:
    class Validates(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.validate(pl_module, loader)

    trainer = make_trainer(callbacks=Validates())
    with pytest.raises(ConfigurationError, match=r"trainer\.validate was called while trainer\.fit runs"):
        trainer.fit(Net(), loader)
    trainer.callbacks.clear()
    trainer.fit(Net(), loader)  # afterwards it can be used again


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_that_add_up_are_said(make_trainer: Any, loader: Any, clears: bool) -> None:
    class Steps(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            if clears:
                self.optimizers().zero_grad()
            self.manual_backward(self.net(batch[0]).pow(2).mean())
            self.optimizers().step()

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        make_trainer().fit(Steps(), loader)
    assert any("gradients of two optimizer steps in a row" in str(each.message) for each in record) is not clears


def said(trainer: Any, model: Any, *loaders: Any) -> list[str]:
    """Fit; return what was warned of."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        trainer.fit(model, *loaders)
    return [str(each.message) for each in record]


@pytest.mark.parametrize("detaches", [False, True])
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_parameters_that_the_loss_does_not_reach_are_said(
    make_trainer: Any, loader: Any, detaches: bool, validates: bool, kind: Any, caplog: Any
) -> None:
    class Detaches(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.net[0](batch[0])
            return self.net[2](hidden.detach() if detaches else hidden).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return kind(self.parameters(), lr=0.01)

    with caplog.at_level("INFO", logger="drivetrain"):
        make_trainer(max_epochs=2).fit(Detaches(), loader, *[loader] * validates)
    assert caplog.text.count("no gradient has reached so far: 2, for example 'net.0.weight'") == detaches


@pytest.mark.parametrize("of", ["module", "trainer"])
def test_a_stop_that_is_asked_of_the_module_is_said(make_trainer: Any, loader: Any, of: str) -> None:
    class Stops(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            if of == "module":
                self.should_stop = True
            else:
                self.trainer.should_stop = True

    found = said(make_trainer(), Stops(), loader)
    assert ("self.should_stop of a module has no effect. Write self.trainer.should_stop = True." in found) == (
        of == "module"
    )
