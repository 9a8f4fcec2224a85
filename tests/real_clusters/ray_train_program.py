"""Runs the suite for strategies on one of Ray's, in the workers of Ray Train, and prints what it does not pass.

python -m drivetrain.compat ray_train_program.py FOLDER RayDDPStrategy
"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def check(settings: dict[str, str]) -> None:
    """Run each test in this worker; the other worker runs it at the same time."""
    import ray.train.lightning as parts

    from drivetrain.testing.strategy_conformance import StrategyConformance

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)

    class Suite(StrategyConformance):
        strategy = getattr(parts, settings["strategy"])
        devices = 2

        def trainer(self, strategy: Any = None, **arguments: Any) -> Any:
            return super().trainer(strategy, **{"plugins": [parts.RayLightningEnvironment()], **arguments})

    folder = Path(settings["folder"])
    rank = ray.train.get_context().get_world_rank()
    for name, test in vars(StrategyConformance).items():
        if name.startswith("test_"):
            (folder / name).mkdir(exist_ok=True)
            try:
                test.row(Suite(), folder / name)
                found = "ok"
            except BaseException:
                found = traceback.format_exc()
            (folder / f"{name}.{rank}.txt").write_text(found)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        check,
        train_loop_config={"folder": str(folder), "strategy": sys.argv[2]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "storage"), name="run"),
    ).fit()
