"""A rewritten program trains natively to the weights that it has under ``drivetrain exec``."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from drivetrain import compat
from drivetrain.compat import command, table
from drivetrain.legacy.migrate.program import migrate

EARLIER = """
import torch
from torch.utils.data import DataLoader

import pytorch_lightning as pl
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.core.lightning import LightningModule
from pytorch_lightning.utilities.distributed import rank_zero_only


class Net(LightningModule):
    def __init__(self, hparams):
        super().__init__()
        self.hparams = hparams
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss, sync_dist_op="mean")
        return loss

    def test_step(self, batch, batch_idx):
        self.log("tested", self.net(batch).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


seed_everything(3)
loader = DataLoader(list(torch.randn(12, 4)), batch_size=2, shuffle=True)
trainer = Trainer(
    gpus=0, max_epochs=2, checkpoint_callback=ModelCheckpoint(dirpath="kept", period=1), weights_summary=None,
    progress_bar_refresh_rate=0, logger=False, accumulate_grad_batches={0: 1, 1: 2}, gradient_clip_val=0.1,
)
net = Net({"lr": 0.1})
trainer.fit(net, train_dataloader=loader)
trainer.test(net, test_dataloaders=loader)
rank_zero_only(torch.save)(net.state_dict(), "weights.pt")
"""

LATEST = EARLIER.replace("pytorch_lightning.core.lightning", "lightning.pytorch.core.module")
for _was, _now in {
    "pytorch_lightning as pl": "lightning as L", "from pytorch_lightning": "from lightning.pytorch",
    "utilities.distributed": "utilities.rank_zero", "self.hparams = hparams": "self.save_hyperparameters(hparams)",
    "sync_dist_op": "reduce_fx", "gpus=0": "accelerator='cpu'", "weights_summary=None": "enable_model_summary=False",
    "checkpoint_callback=": "callbacks=", "period": "every_n_epochs", "train_dataloader=": "train_dataloaders=",
    "progress_bar_refresh_rate=0": "enable_progress_bar=False", "test_dataloaders=": "dataloaders=",
    "accumulate_grad_batches={0: 1, 1: 2}": "accumulate_grad_batches=2",
}.items():  # fmt: skip
    LATEST = LATEST.replace(_was, _now)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:train_dataloader:UserWarning")
@pytest.mark.parametrize("generation", [*table.GENERATIONS, ""])
def test_a_rewritten_program_trains_to_the_same_weights(
    generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = EARLIER if generation else LATEST
    source = migrate("train.py", text.encode(), generation)
    assert [remark for remark in source.remarks if remark.is_left] == []
    assert "lightning." not in source.result().replace("pytorch_lightning.", "lightning.")
    for name, program in (("under_exec", text), ("natively", source.result())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(program, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.chdir(tmp_path / "under_exec")
    try:
        assert not command.main([*(["--generation", generation] if generation else []), "train.py"])
    finally:
        compat.uninstall()
    monkeypatch.chdir(tmp_path / "natively")
    runpy.run_path("train.py", run_name="__main__")
    then, now = (torch.load(tmp_path / name / "weights.pt") for name in ("under_exec", "natively"))
    assert then.keys() == now.keys()
    for name in then:
        torch.testing.assert_close(then[name], now[name], rtol=0.0, atol=0.0)
    [old], [new] = (sorted((tmp_path / name / "kept").iterdir()) for name in ("under_exec", "natively"))
    step = int(re.findall(r"step=(\d+)", old.name)[0])
    assert new.name == old.name.replace(f"step={step}", f"step={step + bool(generation)}")  # then from 0
