"""How long it takes from the command to the end of the first step of two processes, in seconds.

Each program trains the same small model with DDP over Gloo on this machine and writes the time at which rank 0 has done
its first step; the figure is the time from the start of the command to that. torchrun with a script that uses nothing
but torch is what there is to compare with. Compiled Python files are kept from round to round, as where a package is
installed. Programs take turns, so that a machine that slows down slows all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from report import print_table, versions, write_json

HEAD = """
import sys, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

NOTE = sys.argv[1]

def make_model():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

def make_loader():
    return DataLoader(TensorDataset(torch.randn(64, 16), torch.randn(64, 1)), batch_size=8)

def note(rank):
    if rank == 0:
        with open(NOTE, "w") as file:
            file.write(repr(time.time()))
"""
BARE = """
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = make_loader().dataset
for index, (x, y) in enumerate(DataLoader(data, batch_size=8, sampler=DistributedSampler(data))):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if index == 0:
        note(dist.get_rank())
dist.destroy_process_group()
"""
TRAINER = """
{imports}

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_model()
    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0:
            note(self.global_rank)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    Trainer(
        accelerator="cpu", devices=2, strategy="{strategy}", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Model(), make_loader())
"""
ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = make_model()
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), make_loader())
for index, (x, y) in enumerate(loader):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    if index == 0:
        note(accelerator.process_index)
"""
OURS, THEIRS = (
    "from drivetrain import LightningModule, Trainer",
    "from lightning.pytorch import LightningModule, Trainer",
)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
BASELINE = "torchrun, bare DDP script"
PROGRAMS: dict[str, tuple[str | None, str, list[str]]] = {
    BASELINE: (None, BARE, TORCHRUN),
    "drivetrain, ddp": ("drivetrain", TRAINER.format(imports=OURS, strategy="ddp"), []),
    "drivetrain, ddp_fork": ("drivetrain", TRAINER.format(imports=OURS, strategy="ddp_fork"), []),
    "drivetrain, ddp_spawn": ("drivetrain", TRAINER.format(imports=OURS, strategy="ddp_spawn"), []),
    "drivetrain under torchrun": ("drivetrain", TRAINER.format(imports=OURS, strategy="ddp"), TORCHRUN),
    "Lightning, ddp": ("lightning", TRAINER.format(imports=THEIRS, strategy="ddp"), []),
    "Lightning, ddp_spawn": ("lightning", TRAINER.format(imports=THEIRS, strategy="ddp_spawn"), []),
    "accelerate launch": (
        "accelerate", ACCELERATE, ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1",
                                   "--mixed_precision=no", "--dynamo_backend=no"],
    ),
}  # fmt: skip


def first_step(folder: Path, text: str, launcher: list[str]) -> float:
    """Seconds from the start of the command to the end of rank 0's first step."""
    script, note = folder / "train.py", folder / "note"
    script.write_text(HEAD + text)
    note.unlink(missing_ok=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.time()
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(note)], cwd=folder, env=environ, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{launcher} {script} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return float(note.read_text()) - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write all times to this file")
    arguments = parser.parse_args()
    there = {name: rest for name, (package, *rest) in PROGRAMS.items() if package is None or find_spec(package)}
    seconds: dict[str, list[float]] = {name: [] for name in there}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds + 1):
            for name, rest in there.items():
                text, launcher = rest
                seconds[name].append(first_step(Path(folder), str(text), list(launcher)))
    seconds = {name: found[1:] for name, found in seconds.items()}  # the first round warms the file cache
    rows: list[list[Any]] = []
    for name, found in seconds.items():
        ratio = statistics.median(one / base for one, base in zip(found, seconds[BASELINE], strict=True))
        rows.append([name, f"{statistics.median(found):.2f}", f"{min(found):.2f}", f"{ratio:.2f}"])
    print_table(["program", "median s", "fastest", "ratio"], rows)
    if arguments.json:
        write_json(arguments.json, {"versions": versions(), "arguments": vars(arguments), "seconds": seconds})


if __name__ == "__main__":
    main()
