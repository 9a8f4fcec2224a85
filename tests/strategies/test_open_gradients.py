"""A strategy that holds the gradients of a window elsewhere than in ``parameter.grad``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, LightningModule, Trainer, WeightedLoss
from drivetrain.errors import CheckpointError
from drivetrain.strategies import SingleDeviceStrategy


class Elsewhere(SingleDeviceStrategy):
    """After each backward pass it takes the gradients away, and returns them before the optimizer's step."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.held: dict[str, Tensor] = {}
        self.loaded: list[list[str]] = []

    def post_backward(self, closure_loss: Tensor) -> None:
        for name, parameter in self.lightning_module.named_parameters():
            if parameter.grad is not None:
                before = self.held.get(name)
                self.held[name] = parameter.grad if before is None else before + parameter.grad
                parameter.grad = None

    def open_gradients(self) -> dict[str, Tensor]:
        return self.held

    def load_open_gradients(self, gradients: Any) -> None:
        self.loaded.append(sorted(gradients))
        self.held = {name: gradient.clone() for name, gradient in gradients.items()}

    def give_back(self) -> None:
        for name, parameter in self.lightning_module.named_parameters():
            parameter.grad = self.held.pop(name, None)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> WeightedLoss:
        return WeightedLoss(self.layer(batch[0]).square().mean(), int(batch[1].sum()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Save(Callback):
    def __init__(self, path: Path, at: int) -> None:
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            trainer.save_checkpoint(self.path)


class LastBatch(Elsewhere):
    """Leaves the last backward pass of a window to the loop, with what was held before."""

    windows = 3

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def post_backward(self, closure_loss: Tensor) -> None:
        self.passes += 1
        super().post_backward(closure_loss)
        if self.passes % self.windows == 0:
            self.give_back()


def loader() -> Any:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(24, 3, generator=generator), torch.randint(1, 99, (24,), generator=generator)), 2
    )


def trainer(strategy: Any, **arguments: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", strategy=strategy, precision="64-true", max_epochs=1, accumulate_grad_batches=3,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **arguments,
    )  # fmt: skip


def fitted(strategy: Any, ckpt_path: Path | None = None, **arguments: Any) -> Tensor:
    module = Net()
    trainer(strategy, **arguments).fit(module, loader(), ckpt_path=ckpt_path)
    return module.layer.weight.detach()


def test_weights_of_later_batches_change_the_unit_of_gradients_that_are_held_elsewhere() -> None:
    expected = fitted("single_device")
    torch.testing.assert_close(fitted(LastBatch()), expected, rtol=1e-12, atol=1e-12)


def test_a_unit_that_is_not_changed_is_seen() -> None:
    """The control: gradients held elsewhere and not scaled give other weights."""

    class Hidden(LastBatch):
        def open_gradients(self) -> dict[str, Tensor]:
            return {}

    assert not torch.allclose(fitted(Hidden()), fitted("single_device"), rtol=1e-6)


def test_a_checkpoint_inside_a_window_has_them(tmp_path: Path) -> None:
    strategy = LastBatch()
    expected = fitted(strategy, callbacks=[Save(tmp_path / "one.ckpt", 4)])
    resuming = LastBatch()
    resuming.passes = 5
    found = fitted(resuming, ckpt_path=tmp_path / "one.ckpt")
    assert resuming.loaded == [["layer.bias", "layer.weight"]]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_gradient_of_another_shape_is_an_error(tmp_path: Path) -> None:
    fitted("single_device", callbacks=[Save(tmp_path / "one.ckpt", 4)])
    checkpoint = torch.load(tmp_path / "one.ckpt", weights_only=True)
    checkpoint["restart"]["gradients"]["layer.bias"] = torch.zeros(5, dtype=torch.float64)
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=r"'layer.bias'\] is a gradient of shape \(5,\)"):
        fitted("single_device", ckpt_path=tmp_path / "other.ckpt")
