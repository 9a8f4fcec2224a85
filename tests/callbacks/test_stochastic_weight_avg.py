from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Regression, regression_data
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader

from drivetrain import Callback, parity
from drivetrain.callbacks import OnExceptionCheckpoint, StochasticWeightAveraging
from drivetrain.data import CombinedLoader
from drivetrain.errors import ConfigurationError

EPOCHS, START = 6, 3


class Normed(Regression):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]


def swa(**arguments: Any) -> StochasticWeightAveraging:
    return StochasticWeightAveraging(0.02, 0.5, annealing_epochs=2, **arguments)


def by_hand(strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The loop of torch's documentation: the averaged model's weights, and those that were trained."""
    module = Normed()
    [optimizer], [scheduler] = module.configure_optimizers()
    averaged, swa_scheduler = AveragedModel(module.net), SWALR(optimizer, 0.02, 2, strategy)
    loader = DataLoader(regression_data(), batch_size=8)
    for epoch in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            module.loss(batch).backward()
            optimizer.step()
        if epoch >= START:
            averaged.update_parameters(module.net)
            swa_scheduler.step()
        else:
            scheduler.step()
    update_bn([batch[0] for batch in loader], averaged)
    return averaged.module.state_dict(), module.net.state_dict()


@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_it_is_torchs_documented_loop(loader: Any, make_trainer: Any, tmp_path: Path, strategy: Any) -> None:
    module = Normed()
    trainer = make_trainer(max_epochs=EPOCHS, callbacks=swa(annealing_strategy=strategy))
    trainer.fit(module, loader)
    averaged, trained = by_hand(strategy)
    for name, value in module.net.state_dict().items():
        torch.testing.assert_close(value, averaged[name], rtol=1e-6, atol=1e-7, msg=name)
    assert trainer.global_step == EPOCHS * 4  # the pass for batch norm is no training
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)
    for name, value in trained.items():
        if "num_batches" not in name:
            torch.testing.assert_close(found["state_dict"][f"net.{name}"], value, rtol=1e-6, atol=1e-7, msg=name)


class SavesAt(Callback):
    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("batch", [12, 18])  # at the end of the epoch before it begins, and inside one of its epochs
def test_a_resumed_run_is_bit_equal(data: Any, make_trainer: Any, tmp_path: Path, batch: int) -> None:
    def fitted(resume: Path | None = None) -> Any:
        torch.manual_seed(5)
        module, path = Normed(), tmp_path / "one.ckpt"
        trainer = make_trainer(max_epochs=EPOCHS, callbacks=[swa(), *([] if resume else [SavesAt(path, batch)])])
        trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        found = torch.load(tmp_path / "end.ckpt", weights_only=True)
        return module.state_dict(), found["state_dict"], found["averaged_state_dict"], found["lr_schedulers"]

    for one, other in zip(fitted(), fitted(tmp_path / "one.ckpt"), strict=True):
        if isinstance(one, list):
            assert one[0]["last_epoch"] == other[0]["last_epoch"]
            continue
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, msg=name)


def test_what_it_refuses(loader: Any, make_trainer: Any) -> None:
    for arguments in [{"swa_lrs": 0}, {"swa_epoch_start": 1.5}, {"annealing_epochs": -1}, {"annealing_strategy": "x"}]:
        with pytest.raises(ConfigurationError, match=next(iter(arguments))):
            StochasticWeightAveraging(**{"swa_lrs": 0.1, **arguments})
    with pytest.raises(ConfigurationError, match="is a fraction, and max_epochs is unlimited"):
        make_trainer(max_epochs=-1, max_steps=3, callbacks=swa()).fit(Normed(), loader)
    with pytest.raises(ConfigurationError, match="has 2 learning rates, and SGD has 1"):
        make_trainer(callbacks=StochasticWeightAveraging([0.1, 0.2], 0)).fit(Normed(), loader)
    manual = Normed()
    manual.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="needs one optimizer and automatic optimization"):
        make_trainer(callbacks=swa()).fit(manual, loader)


class WithoutNumber(Normed):
    def training_step(self, batch: Any) -> Any:
        return self.loss(batch)


def test_statistics_for_a_step_that_takes_the_batch_alone(loader: Any, make_trainer: Any) -> None:
    found = []
    for kind in (Normed, WithoutNumber):
        module = kind()
        make_trainer(max_epochs=EPOCHS, callbacks=swa()).fit(module, loader)
        found.append(module.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=0, msg=name)


class AlwaysTrains(nn.Sequential):
    def train(self, mode: bool = True) -> Any:
        return self


def test_a_part_whose_train_does_nothing_gets_its_statistics(loader: Any, make_trainer: Any) -> None:
    found = []
    for kind in (nn.Sequential, AlwaysTrains):
        module = Normed()
        module.net = kind(*module.net)
        make_trainer(max_epochs=EPOCHS, callbacks=swa()).fit(module, loader)
        found.append(module.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=0, msg=name)


class OfSeveral(Normed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch["one"])


@pytest.mark.parametrize("combined", [dict, CombinedLoader])
def test_statistics_over_several_loaders(loader: Any, make_trainer: Any, combined: Any) -> None:
    found = []
    for kind, given in ((Normed, loader), (OfSeveral, combined({"one": loader, "other": loader}))):
        module = kind()
        make_trainer(max_epochs=EPOCHS, callbacks=swa()).fit(module, given)
        found.append(module.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=0, msg=name)


class Raises(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == START and batch_idx == 0:
            raise KeyError("here")


class Plain(Normed):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_it_resumes_after_an_exception_in_the_first_window_of_its_schedule(
    loader: Any, make_trainer: Any, tmp_path: Path
) -> None:
    def fitted(*callbacks: Any, ckpt_path: Path | None = None) -> dict[str, Any]:
        torch.manual_seed(5)
        module = Plain()
        options = {"accumulate_grad_batches": 3, "enable_checkpointing": bool(callbacks)}
        trainer = make_trainer(max_epochs=EPOCHS, callbacks=[swa(), *callbacks], **options)
        trainer.fit(module, loader, ckpt_path=ckpt_path)
        return module.state_dict()

    expected = fitted()
    with pytest.raises(KeyError, match="here"):
        fitted(OnExceptionCheckpoint(tmp_path, "stopped"), Raises())
    resumed = fitted(ckpt_path=tmp_path / "stopped.ckpt")
    for name, value in expected.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, msg=name)


# ---- with the original's numbers -------------------------------------------------------------------------------------


@pytest.fixture
def early() -> Iterator[None]:
    before = parity.use(parity.Parity(early_averages=True))
    yield
    parity.use(before)


def early_by_hand() -> dict[str, Any]:
    """The average of the parameters as epochs start, its statistics, and a step by the gradients that are left."""
    module = Normed()
    [optimizer], [scheduler] = module.configure_optimizers()
    averages: list[torch.Tensor] = []
    loader = DataLoader(regression_data(), batch_size=8)
    current: Any = scheduler
    for epoch in range(EPOCHS):
        if epoch == START - 1:
            current = SWALR(optimizer, 0.02, 2)
        if epoch >= START - 1:
            number = epoch - (START - 1)
            values = [parameter.detach().clone() for parameter in module.parameters()]
            pairs = zip(averages or values, values, strict=True)
            averages = [average + (value - average) / (number + 1) for average, value in pairs]
        for batch in loader:
            optimizer.zero_grad()
            module.loss(batch).backward()
            optimizer.step()
        current.step()
    with torch.no_grad():
        for parameter, average in zip(module.parameters(), averages, strict=True):
            parameter.copy_(average)
    update_bn([batch[0] for batch in loader], module.net)
    optimizer.step()
    return module.net.state_dict()


@pytest.mark.usefixtures("early")
def test_a_switch_averages_the_starts_of_epochs(loader: Any, make_trainer: Any) -> None:
    module, callback = Normed(), swa()
    make_trainer(max_epochs=EPOCHS, callbacks=callback).fit(module, loader)
    assert (callback.swa_start, callback.n_averaged) == (START - 1, EPOCHS - START + 1)
    expected = early_by_hand()
    for name, value in module.net.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=name)
    other = by_hand("cos")[0]
    assert not torch.allclose(module.net[0].weight, other["0.weight"])  # the control


@pytest.mark.usefixtures("early")
def test_with_the_switch_a_run_that_ends_early_keeps_its_trained_weights(loader: Any, make_trainer: Any) -> None:
    class Ends(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.weights = pl_module.net[0].weight.clone()
            trainer.should_stop = trainer.current_epoch == START

    ends, module = Ends(), Normed()
    make_trainer(max_epochs=EPOCHS, callbacks=[swa(), ends]).fit(module, loader)
    assert torch.equal(module.net[0].weight, ends.weights)
