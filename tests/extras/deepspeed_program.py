"""A program that trains with DeepSpeed: ``deepspeed_program.py STAGE DEVICES FOLDER``; tests run it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain import Trainer
from drivetrain.testing._regression import GLOBAL_BATCH, Small, data


def run(strategy: str, devices: int, epochs: int, **paths: Any) -> dict[str, Any]:
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=epochs, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    module, loader = Small(), DataLoader(data(4), batch_size=GLOBAL_BATCH // 2)
    trainer.fit(module, loader, ckpt_path=paths.get("resume"))
    if "save" in paths:
        trainer.save_checkpoint(paths["save"])
    if devices == 1:
        assert "LOCAL_RANK" not in os.environ  # a later Trainer would think that a launcher has started it
        assert trainer.validate(module, loader, verbose=False)
        module(torch.zeros(1, 4))
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def main() -> None:
    strategy, devices, folder = f"deepspeed_stage_{sys.argv[1]}", int(sys.argv[2]), Path(sys.argv[3])
    if devices == 1:
        alone = run("auto", 1, 1, save=folder / "auto.ckpt"), run("auto", 1, 2, resume=folder / "auto.ckpt")
        for first, then in ((strategy, strategy), (strategy, "auto"), ("auto", strategy)):
            path = folder / f"{first}-{then}.ckpt"
            found = run(first, 1, 1, save=path), run(then, 1, 2, resume=path)
            torch.testing.assert_close(found, alone, rtol=0, atol=0)
    else:
        run(strategy, devices, 1, save=folder / "several.ckpt")
    print("trained")


if __name__ == "__main__":
    main()
