"""Fine-tuning with several ranks: what is thawed is trained as in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.sharded import Saves, near, same, whole
from tests.distributed.test_fsdp import Net, token_data, trainer
from torch.utils.data import DataLoader

from drivetrain.callbacks import BackboneFinetuning


class Tuned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.blocks

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


def fitted(ranks: int, kind: str, save: Path | None = None, resume: Path | None = None) -> dict[str, Any]:
    module = Tuned()
    callbacks = [BackboneFinetuning(1), *([Saves(save, at=8)] if save else [])]
    ours = trainer(ranks, kind, callbacks=callbacks, max_epochs=3)
    ours.fit(module, DataLoader(token_data(40), batch_size=8 // ranks), ckpt_path=resume)
    return {name: whole(value).detach().clone() for name, value in module.state_dict().items()}


@functools.cache
def alone() -> dict[str, Any]:
    return fitted(1, "ddp")


def both(kind: str, path: Path) -> list[dict[str, Any]]:
    return [fitted(2, kind, save=path), fitted(2, kind, resume=path)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_train_what_is_thawed_as_one_process_does_and_resume_in_the_middle_of_an_epoch(
    pool: Any, tmp_path: Path, kind: str
) -> None:
    for uninterrupted, resumed in pool.run(both, kind, tmp_path / "one.ckpt", group=False):
        same(uninterrupted, resumed)
        near(uninterrupted, alone())
    assert not torch.equal(alone()["backbone.0.first.weight"], Tuned().backbone[0].first.weight.double())
