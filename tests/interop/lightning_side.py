"""What the tests have Lightning do, in its own environment.

``lightning_side.py write FOLDER | load FILE ANSWER | resume FILE ANSWER``
"""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Any

import torch
from net import Net, loader, state, trainer


class Colour(enum.Enum):
    RED = 1


def write(folder: Path) -> None:
    """Runs from which the tests go on, and the state in which each of them ended."""
    variants: dict[str, dict[str, Any]] = {
        "epochs": {},
        "windows": {"accumulate_grad_batches": 3},
        "steps": {"checkpoints": {"every_n_train_steps": 4, "monitor": None}},
        "validation": {"checkpoints": {"save_on_train_epoch_end": False}},
    }
    for name, arguments in variants.items():
        run(folder / name, Net(width=6, lr=0.03), arguments)
    run(folder / "manual", Net(manual=True), {})
    run(folder / "exotic", Net(path=Path("a") / "b", colour=Colour.RED, depth=3), {"epochs": 1})


def run(folder: Path, net: Any, arguments: dict[str, Any]) -> None:
    fitted = trainer(folder, **arguments)
    fitted.fit(net, loader(), loader())
    torch.save(state(fitted, net), folder / "end.pt")


def load(path: Path, answer: Path) -> None:
    """Load a file of ours with Lightning's own method."""
    net = Net.load_from_checkpoint(path)
    torch.save({"weights": dict(net.state_dict()), "hparams": dict(net.hparams)}, answer)


def resume(path: Path, answer: Path) -> None:
    """Train on from a file that ``drivetrain checkpoint convert`` has written, for two epochs in all."""
    manual = torch.load(path, weights_only=True)["hyper_parameters"]["manual"]
    fitted, net = trainer(path.parent / "resumed", epochs=2), Net(width=6, lr=0.03, manual=manual)
    fitted.fit(net, loader(), loader(), ckpt_path=path)
    torch.save({"epoch": fitted.current_epoch, "global_step": fitted.global_step, **state(fitted, net)}, answer)


if __name__ == "__main__":
    torch.manual_seed(3)
    {"write": write, "load": load, "resume": resume}[sys.argv[1]](*map(Path, sys.argv[2:]))
