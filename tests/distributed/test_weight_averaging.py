"""Averages of weights that ranks share or hold shards of."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.sharded import Saves, near, same, whole
from tests.distributed.test_fsdp import Net, trainer
from tests.distributed.test_fsdp import token_data as data
from torch.utils.data import DataLoader

from drivetrain.callbacks import EMAWeightAveraging
from drivetrain.strategies import FSDPStrategy


def fitted(ranks: int, kind: str, save: Path | None = None, resume: Path | None = None) -> dict[str, Any]:
    module, ema = Net(), EMAWeightAveraging(decay=0.6)
    callbacks = [ema, *([Saves(save, at=5)] if save else [])]
    strategy = {"ddp": "ddp"}.get(kind) or FSDPStrategy(state_dict_type=kind)
    ours = trainer(ranks, strategy, callbacks=callbacks, limit_val_batches=1.0)
    loaders = [DataLoader(data(count), batch_size=8 // ranks) for count in (24, 16)]
    ours.fit(module, *loaders, ckpt_path=resume)
    kept = sum(average.numel() for average, _ in ema._pairs)
    return {
        "weights": {name: whole(value).detach().clone() for name, value in module.state_dict().items()},
        "loss": float(ours.callback_metrics["loss"]),
        "kept": kept,
    }


@functools.cache
def alone() -> dict[str, Any]:
    return fitted(1, "ddp")


def both(kind: str, path: Path) -> list[dict[str, Any]]:
    return [fitted(2, kind, save=path), fitted(2, kind, resume=path)]


@pytest.mark.parametrize("kind", ["ddp", "full", "sharded"])
def test_ranks_keep_the_average_of_one_process_and_of_their_shards_alone(pool: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "one.ckpt"
    everyones = pool.run(both, kind, path, group=False)
    total = sum(value.numel() for value in alone()["weights"].values())
    for uninterrupted, resumed in everyones:
        same(uninterrupted["weights"], resumed["weights"])
        assert uninterrupted["loss"] == resumed["loss"]
        near(uninterrupted["weights"], alone()["weights"])
        near(uninterrupted["loss"], alone()["loss"])
    kept = [each["kept"] for each, _ in everyones]
    assert kept == [total, total] if kind == "ddp" else sum(kept) == total
    if kind == "full":
        found = torch.load(path, weights_only=True)
        assert {name: value.shape for name, value in found["averaged_state_dict"].items()} == {
            name: value.shape for name, value in alone()["weights"].items()
        }
