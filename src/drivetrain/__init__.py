"""drivetrain: train PyTorch models on any hardware, with a Trainer or with a loop of your own.

``import drivetrain as dt``. The public names below are imported when they are first used, so importing the package
costs next to nothing. Everything else has the familiar import paths: ``drivetrain.callbacks``,
``drivetrain.loggers``, ``drivetrain.accelerators``, ``drivetrain.strategies``, ``drivetrain.plugins``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.base.lazy import lazy
from drivetrain.base.moved import find_moved_modules

if TYPE_CHECKING:
    from drivetrain.base.seed import seed_everything as seed_everything
    from drivetrain.callback import Callback as Callback
    from drivetrain.engine.engine import Engine as Engine
    from drivetrain.module.datamodule import LightningDataModule as LightningDataModule
    from drivetrain.module.losses import WeightedLoss as WeightedLoss
    from drivetrain.module.module import LightningModule as LightningModule
    from drivetrain.trainer.trainer import Trainer as Trainer

__version__ = "0.1.0"

_PUBLIC = {
    "Callback": "callback",
    "Engine": "engine",
    "LightningDataModule": "module",
    "LightningModule": "module",
    "Trainer": "trainer",
    "WeightedLoss": "module",
    "seed_everything": "base.seed",
}
__all__ = [
    "Callback", "Engine", "LightningDataModule", "LightningModule", "Trainer", "WeightedLoss", "seed_everything",
]  # fmt: skip

find_moved_modules()
__getattr__, __dir__ = lazy(__name__, _PUBLIC)
