"""What saving a checkpoint costs in calls of our own."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drivetrain
from drivetrain import Callback, LightningModule, Trainer
from drivetrain.strategies import FSDPStrategy

OURS = str(Path(drivetrain.__file__).parent)
AT_MOST = 5000


class FiftySevenParameters(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(28)], nn.Linear(8, 1, bias=False))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Saves(Callback):
    """Counts our calls in a save of the whole state, the second of a run, for which everything is imported."""

    def __init__(self, folder: Path, keeps: Any = None) -> None:
        self.folder, self.keeps, self.calls = folder, keeps, 0

    def state_dict(self) -> dict[str, Any]:
        return {} if self.keeps is None else {"kept": self.keeps}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        events: Counter[str] = Counter()

        def count(frame: Any, event: str, _: Any) -> None:
            events[event] += event == "call" and frame.f_code.co_filename.startswith(OURS)

        if trainer.global_step == 2:
            sys.setprofile(count)
        trainer.save_checkpoint(self.folder / str(trainer.global_step))
        sys.setprofile(None)
        self.calls = events["call"]


def calls(folder: Path, keeps: Any = None, **arguments: Any) -> int:
    model, saves = FiftySevenParameters(), Saves(folder, keeps)
    assert len(list(model.parameters())) == 57
    trainer = Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=saves, **arguments,
    )  # fmt: skip
    trainer.fit(model, [torch.randn(4, 8) for _ in range(4)])
    return saves.calls


def test_a_checkpoint_of_57_parameters_makes_at_most_5000_calls(tmp_path: Path) -> None:
    assert 0 < calls(tmp_path) <= AT_MOST


def calls_of_a_rank(folder: Path, kind: Any) -> int:
    warnings.filterwarnings("ignore", "All ranks have trained on the same")  # as they are to
    return calls(folder, devices=2, strategy=FSDPStrategy(state_dict_type=kind))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_neither_does_one_of_a_sharded_model(pool: Any, tmp_path: Path, kind: str) -> None:
    counts = pool.run(calls_of_a_rank, tmp_path, kind, group=False)
    assert 0 < min(counts) <= max(counts) <= AT_MOST


def test_many_values_that_are_looked_at_one_by_one_are_counted(tmp_path: Path) -> None:
    """The negative control."""
    assert calls(tmp_path, [(b"bytes",)] * AT_MOST) > AT_MOST
