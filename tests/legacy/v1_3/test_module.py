"""The calls of a module of the 1.3 generation: several optimizers, hiddens, ends of epochs, old hooks."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.errors import ConfigurationError
from drivetrain.legacy import v1_3 as pl
from drivetrain.loggers import CSVLogger


class Two(pl.LightningModule):
    """Two layers, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)
        self.seen: list[Any] = []

    def loss(self, batch: Any, index: int) -> torch.Tensor:
        return (self.first(batch) - (self.second(batch) if index else 0)).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:
        self.seen.append((batch_idx, optimizer_idx, self.first.weight.requires_grad))
        return self.loss(batch, optimizer_idx)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.first, self.second)]


class One(Two):
    """The same with one optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return {"loss": self.loss(batch, 0), "index": batch_idx}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tensors() -> torch.Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def loader() -> DataLoader[Any]:
    return DataLoader(list(tensors()), batch_size=4)


def fit(model: Any, *loaders: Any, **flags: Any) -> pl.Trainer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = pl.Trainer(**{
            "max_epochs": 1, "logger": False, "checkpoint_callback": False, "progress_bar_refresh_rate": 0,
            "weights_summary": None, "num_sanity_val_steps": 0, **flags,
        })  # fmt: skip
        trainer.fit(model, *(loaders or (loader(),)))
    return trainer


@pytest.mark.parametrize("accumulate", [1, 2])
def test_several_optimizers_train_as_a_loop_written_by_hand(accumulate: int) -> None:
    model, plain = Two(), Two()
    trainer = fit(model, accumulate_grad_batches=accumulate, gradient_clip_val=0.3)
    optimizers = plain.configure_optimizers()
    for batch_idx, batch in enumerate(tensors().split(4)):
        for index, optimizer in enumerate(optimizers):
            for parameter in plain.parameters():
                parameter.requires_grad_(any(parameter is own for own in optimizer.param_groups[0]["params"]))
            loss = plain.loss(batch, index) / accumulate
            if batch_idx % accumulate == 0:
                optimizer.zero_grad()
            loss.backward()
            if (batch_idx + 1) % accumulate == 0:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.3)
                optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert model.seen[:2] == [(0, 0, True), (0, 1, False)]  # the other optimizer's parameters are switched off
    assert trainer.global_step == 4 // accumulate  # counted once for each window, as it was


def test_optimizers_take_turns_by_frequency() -> None:
    class Turns(Two):
        def configure_optimizers(self) -> Any:
            first, second = super().configure_optimizers()
            return [{"optimizer": first, "frequency": 1}, {"optimizer": second, "frequency": 2}]

    model = Turns()
    fit(model)
    assert [(batch, index) for batch, index, _ in model.seen] == [(0, 0), (1, 1), (2, 1), (3, 0)]


def test_an_optimizer_step_with_the_arguments_of_that_time() -> None:
    class Own(Two):
        def optimizer_step(  # type: ignore[override]
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int, optimizer_closure: Any,
            on_tpu: bool = False, using_native_amp: bool = False, using_lbfgs: bool = False,
        ) -> None:  # fmt: skip
            if optimizer_idx == 0 or batch_idx % 2:
                super().optimizer_step(
                    epoch, batch_idx, optimizer, optimizer_idx, optimizer_closure, on_tpu, using_native_amp
                )

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int) -> None:
            zeroed.append(optimizer_idx)
            optimizer.zero_grad()

    zeroed: list[int] = []
    model = Own()
    fit(model)
    assert [index for _, index, _ in model.seen] == [0, 0, 1, 0, 0, 1] == zeroed


def test_one_optimizer_with_the_arguments_of_that_time() -> None:
    class Own(One):
        def optimizer_step(  # type: ignore[override]
            self, current_epoch: int, batch_nb: int, optimizer: Any, optimizer_idx: int, closure: Any,
            on_tpu: bool, using_native_amp: bool, using_lbfgs: bool,
        ) -> None:  # fmt: skip
            seen.append((batch_nb, optimizer_idx, using_lbfgs))
            optimizer.step(closure=closure)

    seen: list[Any] = []
    model, plain = Own(), One()
    fit(model)
    fit(plain)
    assert seen == [(index, 0, False) for index in range(4)]
    assert torch.equal(model.first.weight, plain.first.weight)


def test_hiddens_pass_from_part_to_part_of_a_sequence() -> None:
    class Recurrent(pl.LightningModule):
        truncated_bptt_steps = 2

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.LSTM(1, 3, batch_first=True)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int, hiddens: Any) -> Any:
            x, _ = batch
            self.seen.append((tuple(x.shape), None if hiddens is None else hiddens[0].requires_grad))
            out, hiddens = self.net(x, hiddens)
            return {"loss": out.mean(), "hiddens": hiddens}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = [(torch.randn(6, 1), torch.randn(6, 1)) for _ in range(4)]
    model = Recurrent()
    fit(model, DataLoader(data, batch_size=2))
    assert model.seen == [((2, 2, 1), None), ((2, 2, 1), False), ((2, 2, 1), False)] * 2
    by_flag = Recurrent()
    fit(by_flag, DataLoader(data, batch_size=2), truncated_bptt_steps=3)
    assert [shape for shape, _ in by_flag.seen] == [(2, 3, 1)] * 4
    with pytest.raises(ConfigurationError, match="time steps"):
        model.tbptt_split_batch([torch.zeros(1, 2), torch.zeros(1, 3)], 1)


def test_the_ends_of_epochs_get_the_outputs() -> None:
    class Ends(One):
        def training_epoch_end(self, outputs: Any) -> None:
            ends["training"] = [each["index"] for each in outputs]
            self.log("total", torch.stack([each["loss"] for each in outputs]).sum())
            assert not any(each["loss"].requires_grad for each in outputs)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
            return (batch_idx, dataloader_idx)

        def validation_epoch_end(self, outputs: Any) -> None:
            ends["validation"] = outputs

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            return batch_idx

        def test_epoch_end(self, outputs: Any) -> Any:
            return {"log": {"test": float(sum(outputs))}}

        def on_train_epoch_end(self, outputs: Any) -> None:  # type: ignore[override]
            ends["hook"] = len(outputs)

        def on_epoch_end(self) -> None:
            ends["epochs"] = ends.get("epochs", 0) + 1

    ends: dict[str, Any] = {}
    model = Ends()
    trainer = fit(model, loader(), [loader(), loader()])
    assert ends == {
        "training": [0, 1, 2, 3], "hook": 4, "epochs": 2,
        "validation": [[(index, number) for index in range(4)] for number in range(2)],
    }  # fmt: skip
    assert "total" in trainer.callback_metrics
    with pytest.warns(FutureWarning, match=r"self.log\(name, value, prog_bar=True\)"):
        assert trainer.test(model, dataloaders=loader(), verbose=False) == [{"test": 6.0}]


def test_a_batch_moves_to_a_device_by_two_arguments() -> None:
    class Moves(One):
        def transfer_batch_to_device(self, batch: Any, device: Any) -> Any:  # type: ignore[override]
            devices.append(device)
            return super().transfer_batch_to_device(batch, device)

    devices: list[Any] = []
    model = Moves()
    fit(model)
    assert devices == [torch.device("cpu")] * 4
    assert One().transfer_batch_to_device([torch.ones(1)], torch.device("meta"))[0].device.type == "meta"
    assert model.transfer_batch_to_device([torch.ones(1)], torch.device("meta"))[0].device.type == "meta"


def test_outputs_of_several_optimizers_come_as_a_list_for_each() -> None:
    class Ends(Two):
        def training_epoch_end(self, outputs: Any) -> None:
            shapes.extend(len(each) for each in outputs)

    shapes: list[int] = []
    fit(Ends())
    assert shapes == [4, 4]


def test_a_step_may_return_what_to_log_and_what_to_show(tmp_path: Path) -> None:
    class Dictionaries(One):
        def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            loss = self.loss(batch, 0)
            return {"loss": loss, "log": {"logged": loss.detach()}, "progress_bar": {"shown": 1.0}}

    model = Dictionaries()
    trainer = fit(model, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert "logged" in trainer.logged_metrics
    assert "shown" not in trainer.logged_metrics
    assert trainer.progress_bar_dict["shown"] == 1.0
    assert "logged" not in trainer.progress_bar_dict


@pytest.mark.parametrize("backend", [None, "ddp", "dp", "ddp2"])
def test_step_ends_are_called_under_every_accelerator(backend: str | None) -> None:
    class Ends(One):
        def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            return {"loss": self.loss(batch, 0)}

        def training_step_end(self, output: Any) -> Any:
            ends.append("training")
            return output["loss"].mean()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch, 0)

        def validation_step_end(self, output: Any) -> Any:
            ends.append("validation")

    ends: list[str] = []
    fit(Ends(), loader(), loader(), distributed_backend=backend)
    assert ends == ["training"] * 4 + ["validation"] * 4


@pytest.mark.parametrize("given", [argparse.Namespace(lr=0.5), {"lr": 0.5}], ids=["namespace", "dictionary"])
def test_hparams_may_be_set_and_come_back_from_a_checkpoint(tmp_path: Path, given: Any) -> None:
    model = Configured(given)
    assert model.hparams.lr == 0.5
    trainer = fit(model)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Configured.load_from_checkpoint(str(tmp_path / "a.ckpt"))
    assert loaded.hparams.lr == 0.5


class Configured(One):
    """Takes its hyperparameters as one object."""

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        self.hparams = hparams


def test_callbacks_with_the_arguments_of_that_time() -> None:
    class Old(pl.Callback):
        def on_train_batch_end(  # type: ignore[override]
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
        ) -> None:
            seen.append((batch_idx, dataloader_idx))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any, outputs: Any) -> None:  # type: ignore[override]
            seen.append(type(outputs))

    seen: list[Any] = []
    fit(One(), callbacks=[Old()])
    assert seen == [(index, 0) for index in range(4)] + [list]


def test_more_hooks_with_the_arguments_of_that_time() -> None:
    class Old(One):
        def backward(self, loss: Any, optimizer: Any, optimizer_idx: int) -> None:  # type: ignore[override]
            seen.append(("backward", optimizer_idx))
            loss.backward()

        def transfer_batch_to_device(self, batch: Any, device: Any) -> Any:  # type: ignore[override]
            seen.append(("transfer", device.type))
            return batch

        def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:  # type: ignore[override]
            seen.append(("start", dataloader_idx))

    seen: list[Any] = []
    fit(Old(), limit_train_batches=1)
    assert seen == [("transfer", "cpu"), ("start", 0), ("backward", 0)]


def test_s2_15_an_accelerators_optimizer_zero_grad_counts_beside_the_modules() -> None:
    class Own(pl.CPUAccelerator):
        def optimizer_zero_grad(self, current_epoch: int, batch_idx: int, optimizer: Any, opt_idx: int) -> None:
            calls.append("accelerator")
            super().optimizer_zero_grad(current_epoch, batch_idx, optimizer, opt_idx)

    class Module(One):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int) -> None:
            calls.append("module")
            super().optimizer_zero_grad(epoch, batch_idx, optimizer, optimizer_idx)

    calls: list[str] = []
    accelerator = Own(pl.PrecisionPlugin(), pl.SingleDevicePlugin())
    fit(Module(), accelerator=accelerator, limit_train_batches=1)
    assert calls == ["accelerator", "module"]
    fit(One(), accelerator=Own(pl.PrecisionPlugin(), pl.SingleDevicePlugin()), limit_train_batches=1)
    assert calls[2:] == ["accelerator"]


def test_manual_optimization_with_the_arguments_of_that_time() -> None:
    class Manual(Two):
        @property
        def automatic_optimization(self) -> bool:  # type: ignore[override]
            return False

        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int = 0) -> None:
            for index, optimizer in enumerate(self.optimizers()):
                loss = self.loss(batch, index)
                optimizer.zero_grad()
                self.manual_backward(loss, optimizer)
                optimizer.step()
                self.log("loss", loss, reduce_fx=torch.mean, tbptt_reduce_fx=torch.mean, sync_dist_op="mean")

    model, plain = Manual(), Two()
    trainer = fit(model)
    optimizers = plain.configure_optimizers()
    for batch in tensors().split(4):
        for index, optimizer in enumerate(optimizers):
            loss = plain.loss(batch, index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(model.first.weight, plain.first.weight)
    assert "loss" in trainer.callback_metrics


def test_a_callback_may_return_its_state(tmp_path: Path) -> None:
    class Counts(pl.Callback):
        def __init__(self) -> None:
            self.batches = 0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.batches += 1

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> Any:
            return {"batches": self.batches}

        def on_load_checkpoint(self, callback_state: Any) -> None:  # type: ignore[override]
            self.batches = callback_state["batches"]

    fit(One(), callbacks=[Counts()]).save_checkpoint(tmp_path / "a.ckpt")
    resumed = Counts()
    fit(One(), callbacks=[resumed], resume_from_checkpoint=str(tmp_path / "a.ckpt"), max_epochs=2)
    assert resumed.batches == 8


def test_a_step_with_manual_optimization_may_require_optimizer_idx() -> None:
    class Manual(Two):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> None:
            seen.append((batch_idx, optimizer_idx))
            for index, optimizer in enumerate(self.optimizers()):
                self.manual_backward(self.loss(batch, index), optimizer)
                optimizer.step()
                optimizer.zero_grad()

    seen: list[Any] = []
    fit(Manual())
    assert seen == [(index, 0) for index in range(4)]


def test_the_third_argument_of_an_evaluation_step_may_have_any_name() -> None:
    class Named(One):
        def validation_step(self, batch: Any, batch_idx: int, dataset_idx: int) -> None:
            seen.append((batch_idx, dataset_idx))

    seen: list[Any] = []
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.validate(Named(), [DataLoader(tensors(), batch_size=8), DataLoader(tensors(), batch_size=16)])
    assert seen == [(0, 0), (1, 0), (0, 1)]
