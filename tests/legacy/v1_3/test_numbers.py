"""The numbers of the original, in a program of an earlier generation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import pytorch_lightning as pl, torch

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
    def training_step(self, batch, batch_idx):
        return (self.weight * batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

trainer = pl.Trainer(
    max_epochs=1, accumulate_grad_batches=2, logger=False, checkpoint_callback=False, progress_bar_refresh_rate=0,
    weights_summary=None,
)
net = Net()
trainer.fit(net, torch.utils.data.DataLoader(torch.ones(3, 1)))
print(pl.__version__, net.weight.item())
"""


@pytest.mark.parametrize(("generation", "version"), [("1.1", "1.1.0"), ("1.3", "1.3.8")])
def test_they_are_an_option_beside_the_generation(tmp_path: Path, generation: str, version: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    printed = []
    for numbers in ([], ["--numbers", "original"]):
        command = [sys.executable, "-W", "ignore", "-m", "drivetrain.compat", "--generation", generation, *numbers]
        done = subprocess.run([*command, "program.py"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.split()[-2:])
    # the last window has one batch of two: its gradient is that batch's, or half of it
    assert printed == [[version, "-2.0"], [version, "-1.5"]]
