from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import Regression, regression_data
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from drivetrain import Callback, LightningModule
from drivetrain.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from drivetrain.callbacks.finetuning import multiplicative
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger

SCHEDULERS: dict[str, Any] = {
    "none": None,
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "plateau": lambda optimizer: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, min_lr=[1e-3]), "monitor": "loss"
    },
}  # fmt: skip


class Tuned(Regression):
    def __init__(self, scheduler: str = "none") -> None:
        torch.manual_seed(3)
        super().__init__()
        self.backbone, self.scheduler = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh()), scheduler
        self.net = nn.Linear(8, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(self.backbone(batch[0])), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=0.05)
        make = SCHEDULERS[self.scheduler]
        return optimizer if make is None else {"optimizer": optimizer, "lr_scheduler": make(optimizer)}


def by_hand(epochs: int, thaw_at: int) -> tuple[dict[str, Any], list[float]]:
    """A plain loop: the backbone without its batch norm frozen, then added with a tenth of the rate, which doubles."""
    module = Tuned()
    frozen, norm = module.backbone[0], module.backbone[1]
    frozen.requires_grad_(False)
    optimizer = torch.optim.Adam([*norm.parameters(), *module.net.parameters()], lr=0.05)
    rates = []
    for epoch in range(epochs):
        if epoch == thaw_at:
            frozen.requires_grad_(True)
            optimizer.add_param_group({"params": list(frozen.parameters()), "lr": 0.05 * 0.1})
        elif epoch > thaw_at:
            optimizer.param_groups[1]["lr"] = min(0.05, 2 * optimizer.param_groups[1]["lr"])
        rates.append(optimizer.param_groups[-1]["lr"])
        for batch in DataLoader(regression_data(), batch_size=8):
            optimizer.zero_grad()
            module.loss(batch).backward()
            optimizer.step()
    return module.state_dict(), rates


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, msg=name)


def test_the_backbone_is_tuned_as_in_a_plain_loop(loader: Any, make_trainer: Any) -> None:
    class Rates(Callback):
        position = "last"

        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                self.seen.append(trainer.optimizers[0].param_groups[-1]["lr"])

    expected, rates = by_hand(7, 2)
    module, seen = Tuned(), Rates()
    make_trainer(max_epochs=7, callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=2), seen]).fit(module, loader)
    same(module.state_dict(), expected)
    assert seen.seen == rates
    assert rates[-1] == 0.05  # aligned
    assert multiplicative(3) == 2.0


@pytest.mark.parametrize("name", [None, "head"])
def test_the_learning_rate_monitor_renames_its_keys_when_a_group_is_added(
    loader: Any, make_trainer: Any, tmp_path: Path, name: str | None
) -> None:
    class Named(Tuned):
        def configure_optimizers(self) -> Any:
            group = {"params": [each for each in self.parameters() if each.requires_grad]}
            optimizer = torch.optim.SGD([group | ({"name": name} if name else {})], lr=0.5)
            return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]

    monitor = LearningRateMonitor("epoch")
    tuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.125, lambda_func=lambda epoch: 1)
    trainer = make_trainer(max_epochs=3, logger=CSVLogger(tmp_path), callbacks=[tuning, monitor], log_every_n_steps=1)
    trainer.fit(Named(), loader)
    assert monitor.lrs == {f"lr-SGD/{name or 'pg1'}": [0.5, 0.25, 0.125], "lr-SGD/pg2": [0.125, 0.125]}


class SavesAt(Callback):
    def __init__(self, path: Path, batch: int, fails: bool = False) -> None:
        self.path, self.batch, self.fails = path, batch, fails

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.batch and not self.fails:
            trainer.save_checkpoint(self.path)

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.batch and self.fails:
            raise RuntimeError("on purpose")


# before the thaw, which comes after eight batches, and after it in the middle and at the end of an epoch
@pytest.mark.parametrize(("scheduler", "batch"), [*((each, 10) for each in SCHEDULERS), ("lambda", 7), ("lambda", 12)])
def test_a_resumed_run_is_bit_equal_before_and_after_the_thaw(
    data: Any, make_trainer: Any, tmp_path: Path, scheduler: str, batch: int
) -> None:
    def fitted(resume: Path | None = None) -> Any:
        torch.manual_seed(5)
        module, saves = Tuned(scheduler), [] if resume else [SavesAt(tmp_path / "one.ckpt", batch)]
        trainer = make_trainer(max_epochs=4, callbacks=[BackboneFinetuning(2), *saves])
        trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), ckpt_path=resume)
        return module, trainer.optimizers[0]

    module, optimizer = fitted()
    resumed, again = fitted(tmp_path / "one.ckpt")
    same(module.state_dict(), resumed.state_dict())
    groups = [[group["lr"] for group in each.param_groups] for each in (optimizer, again)]
    assert groups[0] == groups[1]
    assert all(each.requires_grad for each in resumed.parameters())
    assert not torch.equal(module.backbone[0].weight, Tuned().backbone[0].weight)


class Frozen(Callback):
    """Notes after each batch which parameters are frozen."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append(sorted(name for name, each in pl_module.named_parameters() if not each.requires_grad))


@pytest.mark.parametrize("thaw_at", [0, 2])
@pytest.mark.filterwarnings("ignore:.*val_dataloader")
def test_a_resumed_run_knows_parameters_that_pruning_has_renamed_since_the_epoch_began(
    data: Any, make_trainer: Any, tmp_path: Path, thaw_at: int
) -> None:
    def fitted(resume: Path | None = None) -> Any:
        torch.manual_seed(5)
        module, frozen = Tuned(), Frozen()
        callbacks = [BackboneFinetuning(thaw_at), ModelPruning("l1_unstructured", None, amount=0.2), frozen]
        saves = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        trainer = make_trainer(max_epochs=3, callbacks=[*callbacks, saves], enable_checkpointing=True)
        trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), ckpt_path=resume)
        return module.state_dict(), frozen.seen

    whole, seen = fitted()
    resumed, again = fitted(tmp_path / "epoch=0.ckpt")
    same(whole, resumed)
    assert again == seen[4:]
    assert bool(again[0]) == (thaw_at > 0)


def test_after_an_exception_in_a_thawed_epoch(data: Any, make_trainer: Any, tmp_path: Path) -> None:
    def fitted(resume: Path | None = None, fails: bool = False) -> Any:
        module = Tuned("lambda")
        callbacks = [BackboneFinetuning(1), OnExceptionCheckpoint(tmp_path), SavesAt(tmp_path, 6, fails)]
        trainer = make_trainer(max_epochs=3, callbacks=callbacks if fails else callbacks[:1],
                               enable_checkpointing=fails)  # fmt: skip
        trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=resume)
        return module.state_dict()

    with pytest.raises(RuntimeError, match="on purpose"):
        fitted(fails=True)
    same(fitted(tmp_path / "on_exception.ckpt"), fitted())


def test_ones_own_schedule_and_what_is_frozen() -> None:
    module = Tuned()
    BaseFinetuning.freeze(module, train_bn=False)
    assert not any(each.requires_grad for each in module.parameters())
    assert not module.backbone[1].track_running_stats
    BaseFinetuning.freeze([[module.backbone], module.net], train_bn=True)
    assert [each.requires_grad for each in module.backbone[1].parameters()] == [True, True]
    assert set(BaseFinetuning.filter_params(module, requires_grad=True)) == set(module.backbone[1].parameters())
    assert list(BaseFinetuning.filter_params(module, train_bn=False, requires_grad=True)) == []
    assert BaseFinetuning.flatten_modules([module.backbone, module.backbone[0]]) == list(module.backbone)
    optimizer = torch.optim.SGD(module.backbone[1].parameters(), lr=1.0)
    BaseFinetuning.unfreeze_and_add_param_group(module.net, optimizer)
    assert optimizer.param_groups[1]["lr"] == 0.1
    assert optimizer.param_groups[1]["params"] == list(module.net.parameters())
    module.net.requires_grad_(False)
    with pytest.warns(UserWarning, match="2 of the 2 parameters to be added are already in SGD"):
        BaseFinetuning.unfreeze_and_add_param_group(module.net, optimizer)
    BaseFinetuning.freeze_module(module.net)
    assert not module.net.weight.requires_grad


def test_what_it_refuses(loader: Any, make_trainer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"freezes pl_module.backbone, and Regression has no module"):
        make_trainer(callbacks=BackboneFinetuning()).fit(Regression(), loader)
    with pytest.raises(ConfigurationError, match="unfreeze_backbone_at_epoch"):
        BackboneFinetuning(-1)
    with pytest.raises(ConfigurationError, match="backbone_initial_lr"):
        BackboneFinetuning(backbone_initial_lr=0)


def test_a_state_of_lightnings_is_restored(data: Any, make_trainer: Any, tmp_path: Path) -> None:
    path, module = tmp_path / "one.ckpt", Tuned()
    tuning: Any = BackboneFinetuning(1, train_bn=False)
    trainer = make_trainer(max_epochs=3, callbacks=[tuning, SavesAt(path, 6)])
    trainer.fit(module, DataLoader(data, batch_size=8))
    file = torch.load(path, weights_only=True)
    options = {"lr": 0.005, "betas": (0.9, 0.999)}
    names = [group["params"] for group in file["callbacks"]["BackboneFinetuning"]["groups"][0]]
    file["callbacks"]["BackboneFinetuning"] = {
        "internal_optimizer_metadata": {0: [{"params": each, **options} for each in names]},
        "previous_backbone_lr": 0.005,
    }
    torch.save(file, path)
    other = Tuned()
    make_trainer(max_epochs=3, callbacks=BackboneFinetuning(1, train_bn=False)).fit(
        other, DataLoader(data, batch_size=8), ckpt_path=path
    )
    same(module.state_dict(), other.state_dict())


class Halves(Callback):
    """Multiplies learning rates, which is not to be done twice, and steps a scheduler by hand."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9


class FailsWhere(Callback):
    def __init__(self, hook: str, epoch: int) -> None:
        self.epoch = epoch
        setattr(self, hook, self._fail)

    def _fail(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == self.epoch:
            raise RuntimeError("on purpose")

    def on_train_epoch_start(self, *_: Any) -> None: ...

    def on_before_backward(self, *_: Any) -> None: ...

    def on_after_backward(self, *_: Any) -> None: ...


@pytest.mark.parametrize("hooks", ["on_train_epoch_start", "on_before_backward", "on_after_backward"])
@pytest.mark.parametrize("further", ["none", "halves", "swa"])
def test_after_an_exception_where_the_epoch_that_thaws_begins(
    data: Any, make_trainer: Any, tmp_path: Path, hooks: str, further: str
) -> None:
    def fitted(resume: Path | None = None, fails: list[Callback] | None = None) -> Any:
        torch.manual_seed(5)
        module = Tuned("lambda")
        others: list[Callback] = {"none": [], "halves": [Halves()], "swa": [StochasticWeightAveraging(0.01, 2)]}[
            further
        ]
        callbacks = [BackboneFinetuning(2), *others, *(fails or ()), OnExceptionCheckpoint(tmp_path)]
        trainer = make_trainer(max_epochs=4, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), ckpt_path=resume)
        optimizer = trainer.optimizers[0]
        return module.state_dict(), [group["lr"] for group in optimizer.param_groups]

    path = tmp_path / "on_exception.ckpt"
    for epoch in (2, 3):
        for resume in (None, path):  # interrupted twice at the same place
            with pytest.raises(RuntimeError, match="on purpose"):
                fitted(resume, [FailsWhere(hooks, epoch)])
        (weights, rates), (whole, expected) = fitted(path), fitted()
        same(weights, whole)
        assert rates == expected


def test_groups_that_a_subclass_keeps_are_found_after_pruning() -> None:
    module, callback = LightningModule(), BaseFinetuning()
    module.layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    callback._store(module, 0, 0, optimizer.param_groups)
    nn.utils.prune.random_unstructured(module.layer, "weight", 0.5)
    callback._restarting = True
    fresh = torch.optim.SGD(module.parameters(), lr=0.1)
    trainer: Any = SimpleNamespace(optimizers=[fresh], lr_scheduler_configs=[])
    callback.on_fit_start(trainer, module)
    [group] = fresh.param_groups
    assert group["lr"] == 0.5
    assert {id(each) for each in group["params"]} == {id(module.layer.weight_orig), id(module.layer.bias)}
