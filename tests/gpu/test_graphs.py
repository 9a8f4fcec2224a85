"""``Trainer(cuda_graphs=...)`` on a real device; skipped, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import LightningModule, Trainer
from drivetrain.accelerators import CUDAAccelerator
from drivetrain.loops import graphs

pytestmark = pytest.mark.skipif(
    not CUDAAccelerator.is_available(), reason=f"no CUDA device: {CUDAAccelerator.why_unavailable()}"
)


class Net(LightningModule):
    def __init__(self, waits: bool = False, kind: Any = torch.optim.AdamW) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 1))
        self.waits, self.kind = waits, kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss if not self.waits or loss.item() > -1 else None

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(folder: Path, module: Net, on: Any = True, **arguments: Any) -> tuple[list[Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(324, 16, generator=generator), torch.randn(324, 1, generator=generator))
    loader: Any = DataLoader(data, batch_size=8, pin_memory=True)
    torch.manual_seed(2)
    trainer = Trainer(
        accelerator="gpu", devices=1, max_epochs=5, default_root_dir=folder, logger=False, cuda_graphs=on,
        enable_progress_bar=False, enable_checkpointing=False, **arguments,
    )  # fmt: skip
    trainer.fit(module, loader)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return [each.detach().clone() for each in (*module.parameters(), *module.buffers())], values


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_replayed_steps_equal_steps_without_a_graph(
    kind: Any, precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[int] = []
    replayed = graphs.GraphedSteps._replayed
    monkeypatch.setattr(graphs.GraphedSteps, "_replayed", lambda *given: (replays.append(1), replayed(*given))[1])
    ours = fit(tmp_path, Net(kind=kind), precision=precision, gradient_clip_val=1.0)
    assert len(replays) > 150
    monkeypatch.setattr(graphs, "WARM_UPS", 10**9)  # the reference never gets to recording
    theirs = fit(tmp_path, Net(kind=kind), precision=precision, gradient_clip_val=1.0)
    assert all(map(torch.equal, ours[0], theirs[0]))
    assert ours[1] == theirs[1]


def test_a_step_that_waits_runs_on_without_graphs(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "drivetrain")
    parameters, _ = fit(tmp_path, Net(waits=True), on="auto")
    assert all(bool(each.isfinite().all()) for each in parameters)
    assert any("the step waits for the device at" in each.message for each in caplog.records)


def test_a_recording_that_fails_leaves_a_working_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level("INFO", "drivetrain")
    record = graphs.GraphedSteps._record

    def failing(self: Any, known: Any, batch: Any) -> None:
        self._recorder.record(lambda: torch.zeros(1, device=self._device).item())
        record(self, known, batch)

    monkeypatch.setattr(graphs.GraphedSteps, "_record", failing)
    parameters, _ = fit(tmp_path, Net(), on="auto")
    assert all(bool(each.isfinite().all()) for each in parameters)
    assert any("not permitted when stream is capturing" in each.message for each in caplog.records)  # the cause
