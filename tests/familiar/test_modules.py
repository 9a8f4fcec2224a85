"""Modules, data modules and what they log, as programs written for Lightning expect it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningDataModule, LightningModule
from drivetrain.errors import WrongTypeError
from drivetrain.strategies import SingleDeviceStrategy


class Net(LightningModule):
    def __init__(self, width: int = 1, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stateless:
    """A scheduler of a program's own that returns no state."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self, epoch: int) -> None:
        raise AssertionError  # lr_scheduler_step is overridden

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state_dict: Any) -> None:
        assert state_dict is None


class WithScheduler(Net):
    scheduler_class: type = Stateless

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_scheduler_step(scheduler, None)
        return None

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.steps += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [self.scheduler_class(optimizer)]


@pytest.mark.parametrize(("by_hand", "steps"), [(True, 4), (False, 1)])
def test_a_scheduler_whose_state_is_none_is_stepped_by_the_module_and_resumes(
    make_trainer: Any, loader: Any, tmp_path: Path, by_hand: bool, steps: int
) -> None:
    trainer = make_trainer()
    trainer.fit(WithScheduler(by_hand), loader)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = make_trainer(max_epochs=2)
    resumed.fit(WithScheduler(by_hand), loader, ckpt_path=tmp_path / "one.ckpt")
    assert trainer.lr_scheduler_configs[0].scheduler.steps == steps
    assert resumed.lr_scheduler_configs[0].scheduler.steps == steps


@pytest.mark.parametrize("missing", ["state_dict", "load_state_dict"])
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_scheduler_without_the_methods_for_its_state_is_a_type_error(
    make_trainer: Any, loader: Any, missing: str, by_hand: bool
) -> None:
    class Lacking(WithScheduler):
        scheduler_class = type("Own", (), {k: v for k, v in vars(Stateless).items() if k != missing})

    with pytest.raises(WrongTypeError, match=f"returned an Own.*, which has no {missing}") as caught:
        make_trainer().fit(Lacking(by_hand), loader)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("given", [True, False])
def test_fast_dev_run_reads_back_as_given(make_trainer: Any, loader: Any, given: bool) -> None:
    trainer = make_trainer(fast_dev_run=given)
    assert trainer.fast_dev_run is given
    trainer.fit(Net(), loader)
    assert trainer.fast_dev_run is given


@pytest.mark.parametrize(("spelt", "expected"), [("SUM", 6.0), ("Mean", 1.5), ("MAX", 3.0), ("Min", 0.0)])
def test_a_reduction_may_be_written_in_capitals(make_trainer: Any, loader: Any, spelt: str, expected: float) -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", float(batch_idx), on_step=False, on_epoch=True, reduce_fx=spelt)
            return super().training_step(batch, batch_idx)

    trainer = make_trainer()
    trainer.fit(Logs(), loader)
    assert trainer.callback_metrics["value"] == expected


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("attached", [True, False])
def test_torch_jit_script_compiles_a_module_with_and_without_a_trainer(make_trainer: Any, attached: bool) -> None:
    module = nn.Sequential(Net(width=2), nn.ReLU()) if not attached else Net(width=2)
    if attached:
        module.trainer = trainer = make_trainer()
    x = torch.ones(1, 4)
    expected = module(x)
    assert torch.equal(torch.jit.script(module)(x), expected)
    if attached:
        assert module.trainer is trainer


def test_print_of_a_data_module_shows_the_loaders_and_why_one_is_missing(loader: Any) -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader

        def val_dataloader(self) -> Any:
            return [loader, DataLoader(TensorDataset(torch.ones(3, 2)))]

        def test_dataloader(self) -> Any:
            return self.made_in_setup

    assert str(Data()).splitlines() == [
        "Data",
        "  train_dataloader: DataLoader of 32 samples",
        "  val_dataloader: [DataLoader of 32 samples, DataLoader of 3 samples]",
        "  test_dataloader: not there yet (AttributeError: 'Data' object has no attribute 'made_in_setup')",
    ]


@pytest.mark.parametrize("key", ["module_arguments", "hparams"])
@pytest.mark.parametrize("version", ["0.6.0", None])
def test_hyperparameters_under_an_old_key_are_those_of_the_module(
    make_trainer: Any, loader: Any, tmp_path: Path, key: str, version: str | None
) -> None:
    trainer = make_trainer()
    trainer.fit(Net(), loader)
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    checkpoint = torch.load(tmp_path / "new.ckpt", weights_only=True)
    checkpoint[key] = {**checkpoint.pop("hyper_parameters"), "lr": 7.0}
    if version:  # otherwise an edited file of today
        checkpoint = {
            "state_dict": checkpoint["state_dict"],
            key: checkpoint[key],
            "pytorch-lightning_version": version,
        }
    del checkpoint["hparams_name" if not version else "pytorch-lightning_version"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    assert Net.load_from_checkpoint(tmp_path / "old.ckpt").hparams == {"width": 1, "lr": 7.0}
    assert Net.load_from_checkpoint(tmp_path / "old.ckpt", lr=5.0).hparams.lr == 5.0


def test_a_strategy_of_one_device_that_was_built_alone_has_its_root_device() -> None:
    assert SingleDeviceStrategy().root_device == torch.device("cpu")
    assert SingleDeviceStrategy("cpu").root_device == torch.device("cpu")
