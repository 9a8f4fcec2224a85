"""On a real CUDA device; skipped, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Engine, LightningModule, Trainer
from drivetrain.accelerators import CUDAAccelerator
from drivetrain.callbacks import Callback
from drivetrain.testing.conformance import AcceleratorConformance

pytestmark = pytest.mark.skipif(
    not CUDAAccelerator.is_available(), reason=f"no CUDA device: {CUDAAccelerator.why_unavailable()}"
)


class TestCUDA(AcceleratorConformance):
    accelerator = CUDAAccelerator
    tolerance = 1e-3  # the host and the device add in another order


class Regression(LightningModule):
    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
        self.reads = reads

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        if self.reads:
            loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Watch(Callback):
    """Makes every wait for the device an error between the flushes of the log."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx > 2:  # the first steps set things up
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        torch.cuda.set_sync_debug_mode("default")


def fit(folder: Path, reads: bool = False, **arguments: Any) -> Trainer:
    data = TensorDataset(torch.randn(400, 16), torch.randn(400, 1))
    loader: Any = DataLoader(data, batch_size=8, pin_memory=True)
    trainer = Trainer(
        accelerator="cuda", devices=1, max_epochs=1, default_root_dir=folder, logger=False, callbacks=[Watch()],
        enable_progress_bar=False, enable_checkpointing=False, **arguments,
    )  # fmt: skip
    trainer.fit(Regression(reads), loader)
    return trainer


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_never_waits_for_the_device(tmp_path: Path, precision: Any) -> None:
    try:
        assert fit(tmp_path, precision=precision, gradient_clip_val=1.0).global_step == 50
        with pytest.raises(RuntimeError, match="synchronizing"):  # the control
            fit(tmp_path, reads=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batches_from_pinned_memory_train_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the device, so the memory of many batches is freed before they are copied."""

    def trained(pins: bool) -> list[Any]:
        monkeypatch.setattr(CUDAAccelerator, "supports_pinned_memory", pins)
        torch.manual_seed(1)
        module, data = Regression(), TensorDataset(torch.randn(4000, 16), torch.randn(4000, 1))
        trainer = Trainer(
            accelerator="cuda", devices=1, max_epochs=2, default_root_dir=tmp_path, logger=False,
            enable_progress_bar=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True))
        return [each.tolist() for each in module.parameters()]

    assert trained(True) == trained(False)


def test_an_engine_runs_on_the_device_that_was_chosen() -> None:
    last = torch.cuda.device_count() - 1
    engine = Engine(accelerator="cuda", devices=[last], precision="16-mixed")
    module = nn.Linear(4, 1)
    model, optimizer = engine.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    loss = model(torch.ones(2, 4, device=engine.device)).sum()
    engine.backward(loss)
    optimizer.step()
    assert model.device == torch.device("cuda", last)
    assert torch.cuda.current_device() == last
    stats = engine.accelerator.get_device_stats(engine.device)
    assert stats["allocated_bytes.all.current"] > 0


def test_an_out_of_memory_error_says_what_took_the_memory(tmp_path: Path) -> None:
    class TooLarge(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                torch.empty(2**46, dtype=torch.uint8, device=self.device)  # 64 TiB
            return super().training_step(batch, batch_idx)

    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
    trainer = Trainer(accelerator="gpu", devices=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer.fit(TooLarge(), DataLoader(data, batch_size=8))
    [note] = [each for each in error.value.__notes__ if each.startswith("Out of memory on cuda")]
    assert "in use). It holds: parameters and buffers" in note
    assert "activations and the rest" in note
    assert "Change one of these" in note


def test_a_batch_that_does_not_fit_runs_again_in_parts(tmp_path: Path) -> None:
    class NeedsMuch(Regression):
        sizes: list[int] = []  # noqa: RUF012

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 2:
                torch.empty(2**46, dtype=torch.uint8, device=self.device)  # 64 TiB
            self.sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    data = TensorDataset(torch.randn(32, 16), torch.randn(32, 1))
    trainer = Trainer(
        accelerator="gpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        default_root_dir=tmp_path, split_on_oom=True,
    )  # fmt: skip
    trainer.fit(NeedsMuch(), DataLoader(data, batch_size=8))
    assert trainer.global_step == 4
    assert NeedsMuch.sizes == [2] * 16
