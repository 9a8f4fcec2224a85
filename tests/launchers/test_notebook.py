"""A notebook in a fresh kernel trains on several processes, and may go on with what they leave."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

MODEL = """
import torch, warnings
import torch._dynamo  # optimizers import it: without this, each process that is copied from the kernel would
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Callback, LightningModule, Trainer

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[0].sum(1, keepdim=True))
    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
             enable_model_summary=False)
model = Model()
"""

# Ctrl-C, in the kernel's process and where it waits for two others.
INTERRUPTED = """
import os, signal
from pathlib import Path

class Interrupts(Model):
    def training_step(self, batch, batch_idx):
        if self.global_step == 5 and self.global_rank + 1 == self.trainer.world_size:
            os.kill(kernel, signal.SIGINT)
        return super().training_step(batch, batch_idx)

kernel, ended = os.getpid(), []
for devices in (1, 2):
    folder = Path(f"interrupted-{devices}")
    try:
        Trainer(**{**quiet, "enable_checkpointing": None}, devices=devices, max_epochs=-1,
                default_root_dir=folder).fit(Interrupts(), loader)
    except BaseException as error:
        ended += [devices, type(error).__name__, [path.name for path in folder.rglob("stopped.ckpt")]]
"""


def run(folder: Path, *cells: str) -> str:
    """What the last cell printed."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (MODEL, *cells)])
    client = NotebookClient(notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute()
    return "".join(output.get("text", "") for output in notebook.cells[-1].outputs if output.get("name") == "stdout")


@pytest.mark.timeout(200)
def test_a_notebook_trains_on_two_processes(tmp_path: Path) -> None:
    said = run(
        tmp_path,
        "trainer = Trainer(**quiet, devices=2, max_epochs=1)\ntrainer.fit(model, loader)",
        "trainer.fit_loop.max_epochs = 20\ntrainer.fit(model, loader)",
        "predicted = torch.cat(trainer.predict(model, loader))",
        "wanted = torch.cat([x for x, in loader]).sum(1, keepdim=True)",
        INTERRUPTED,
        "print(trainer.plan)\n"
        "print(*ended)\n"
        "print(trainer.global_step, tuple(predicted.shape), float((predicted - wanted).abs().max()) < 0.2)",
    )
    assert "1 KeyboardInterrupt ['stopped.ckpt'] 2 KeyboardInterrupt ['stopped.ckpt']" in said
    assert re.search(r"strategy +DDPStrategy +because there are 2 devices, and this is a notebook", said)
    assert "2, started by fork" in said
    assert said.splitlines()[-1] == "80 (32, 1) True"


@pytest.mark.timeout(200)
def test_strategies_that_do_not_work_in_a_notebook_name_the_one_that_does(tmp_path: Path) -> None:
    said = run(
        tmp_path,
        'for name in ("ddp", "ddp_spawn", "ddp_forkserver"):\n'
        "    try:\n"
        "        Trainer(**quiet, devices=2, strategy=name).fit(model, loader)\n"
        "    except Exception as error:\n"
        '        print(name, type(error).__name__, error, sep=": ")\n',
    )
    again, *pickling = said.splitlines()
    assert re.search('^ddp: ConfigurationError: .*run the notebook again, .* Write .*="ddp_notebook"', again)
    for name, line in zip(("ddp_spawn", "ddp_forkserver"), pickling, strict=True):
        assert line == (
            f"{name}: ConfigurationError: The new processes cannot import Model, which is defined in this notebook. "
            'Write strategy="ddp_notebook", whose processes are copies of this one, or import it from a file. [DT1052]'
        )
